"""Tests of losses of parts none of whose labels counts, whether the host knows that or not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.source import Source
from schedlang.language.syntax import parse
from schedlang.passes.elaborate.state import Settings
from schedlang.runtime.assembly import Assembly
from schedlang.runtime.zero_weight_loss import zero_unlabelled_loss
from schedlang.schedule import Schedule

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.1},
    "weighted": {"weight": torch.tensor([1.0, 2.0, 0.5])},
    "both": {"weight": torch.tensor([1.0, 2.0, 0.5]), "label_smoothing": 0.1},
    "another": {"ignore_index": 2},
}


def trained(labels: Tensor, way: dict[str, Any], weight: Any) -> tuple[Tensor, Tensor, Tensor]:
    """A loss that is multiplied by what is learned, and gradients for its weight in a batch."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 3, generator=draw).requires_grad_()
    sure = torch.tensor(0.5, requires_grad=True)
    with zero_unlabelled_loss(weight):
        loss = F.cross_entropy(logits, labels, **way) * sure
    loss.backward(torch.as_tensor(weight, dtype=loss.dtype))
    assert logits.grad is not None and sure.grad is not None
    return loss.detach(), logits.grad, sure.grad


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("known", [True, False])
def test_no_gradient_that_is_no_number(way: str, known: bool) -> None:
    """Of a part without labels loss and gradients are zero, and those of any other are torch's."""
    given = WAYS[way]
    ignored = given.get("ignore_index", -100)
    number = float if known else torch.tensor
    for found in trained(torch.full((4,), ignored), given, number(0.0)):
        assert not found.any()
    labels = torch.tensor([0, 1, ignored, 1])
    for mine, plain in zip(trained(labels, given, number(2.0)), trained(labels, given, 2.0)):
        assert torch.equal(mine, plain) and mine.isfinite().all()


def test_nothing_in_the_whole_batch() -> None:
    """Then a part weighs something all the same, and its loss is the model's own of nothing."""
    assert trained(torch.full((4,), -100), {}, torch.tensor(1.0))[0].isnan()


class Read(nn.Module):
    """A loss of its own, of labels that may all be ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(8, 6), nn.Linear(6, 8), nn.Linear(8, 6)
        self.head = nn.Linear(6, 8)

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        """The loss beside the logits."""
        logits = self.head(self.down(self.up(self.table(ids)).relu()))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


ROWS = {
    "dp": "zero(stage=0, over=dp)",
    "zero": "zero(stage=3, over=dp)",
    "tp": "up  shard(col, over=tp)\ndown  shard(row, over=tp)",
}


def _step(rows: str, labels: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The loss of a step on this rank, and the weights after it."""
    torch.manual_seed(0)
    axis = "tp" if "tp" in rows else "dp"
    text = f'schedule 1\nmesh({axis}=2)\nstep "s" {{\n{rows}\n}}\n'
    sch = Schedule(Read().double(), parse(Source("a.sched", text)), Settings())
    batch = {"ids": torch.arange(24).view(4, 6) % 8, "labels": labels}
    program = sch.build(batch=batch, loss=lambda out, _: out[0], optimizer=_optimizer)
    value = program.train_step(batch)
    return value, list(program.state_dict().values())


def _optimizer(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("ignored", ["all", "of one rank"])
def test_a_step_without_labels(rows: str, ignored: str, threads: Any) -> None:
    """Under every layout it is what the original makes of it: of nothing no number, else one."""
    labels = torch.arange(24).view(4, 6) % 7
    labels[: 4 if ignored == "all" else 2] = -100
    torch.manual_seed(0)
    plain = Read().double()
    loss = plain(torch.arange(24).view(4, 6) % 8, labels)[0]
    loss.backward()
    _optimizer(plain.named_parameters()).step()
    for value, state in threads.run(_step, 2, ROWS[rows], labels):
        assert torch.allclose(value.double(), loss.detach(), equal_nan=True), (value, loss)
        for mine, other in zip(state, plain.state_dict().values()):
            assert torch.allclose(mine, other, equal_nan=True)


def test_parts_are_weighed_where_somebody_asks() -> None:
    """On ranks of the last stage, and where the model itself is given the labels."""

    class Given(nn.Module):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return x

    class Hidden(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    def asked(model: nn.Module, last: bool, source: str = "labels", stale: bool = False) -> bool:
        pipeline = SimpleNamespace(
            stages={0: SimpleNamespace(model=model, last=last)},
            timeline=SimpleNamespace(stale=stale),
        )
        weight = SimpleNamespace(rule=SimpleNamespace(source=source))
        made: Any = SimpleNamespace(pipeline=pipeline, weight=weight)
        return not vars(Assembly)["needs_no_weights"].func(made)

    assert not asked(Hidden(), last=False)
    assert asked(Hidden(), last=True) and asked(Hidden(), last=False, stale=True)
    assert asked(Given(), last=False) and asked(Hidden(), last=False, source="x.labels")
