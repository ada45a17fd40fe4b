"""Losses of parts without any counted label, whether the weight is a number or a tensor."""

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

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.1},
    "weighted": {"weight": torch.tensor([1.0, 2.0, 0.5])},
    "both": {"weight": torch.tensor([1.0, 2.0, 0.5]), "label_smoothing": 0.1},
    "another": {"ignore_index": 2},
}


def loss_and_grads(
    labels: Tensor, way: dict[str, Any], weight: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a loss with a learned factor, weighed, and its gradients."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 3, generator=draw).requires_grad_()
    sure = torch.tensor(0.5, requires_grad=True)
    with zero_unlabelled_loss(weight):
        loss = F.cross_entropy(logits, labels, **way) * sure
    loss.backward(torch.as_tensor(weight, dtype=loss.dtype))
    assert logits.grad is not None and sure.grad is not None
    return loss.detach(), logits.grad, sure.grad


@pytest.mark.parametrize("way", OPTIONS)
@pytest.mark.parametrize("known", [True, False])
def test_no_gradient_that_is_no_number(way: str, known: bool) -> None:
    """A part without labels has zero loss and gradients; other parts have those of torch."""
    options = OPTIONS[way]
    ignored = options.get("ignore_index", -100)
    number = float if known else torch.tensor
    for tensor in loss_and_grads(torch.full((4,), ignored), options, number(0.0)):
        assert not tensor.any()
    labels = torch.tensor([0, 1, ignored, 1])
    for tensor_weighed, expected in zip(
        loss_and_grads(labels, options, number(2.0)), loss_and_grads(labels, options, 2.0)
    ):
        assert torch.equal(tensor_weighed, expected) and tensor_weighed.isfinite().all()


def test_nothing_in_the_whole_batch() -> None:
    """Then a part still has a weight, and its loss is what the model gives for no labels."""
    assert loss_and_grads(torch.full((4,), -100), {}, torch.tensor(1.0))[0].isnan()


class OwnLoss(nn.Module):
    """A model with its own loss, of labels that may all be ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(8, 6), nn.Linear(6, 8), nn.Linear(8, 6)
        self.head = nn.Linear(6, 8)

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        """Return the loss and the logits."""
        logits = self.head(self.down(self.up(self.table(ids)).relu()))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


ROWS = {
    "dp": "zero(stage=0, over=dp)",
    "zero": "zero(stage=3, over=dp)",
    "tp": "up  shard(col, over=tp)\ndown  shard(row, over=tp)",
}


def train_on_rank(rows: str, labels: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Train a step on this rank: return its loss, and the weights after it."""
    torch.manual_seed(0)
    axis = "tp" if "tp" in rows else "dp"
    text = f'schedule 1\nmesh({axis}=2)\nstep "s" {{\n{rows}\n}}\n'
    sch = Schedule(OwnLoss().double(), parse(Source("a.sched", text)), Settings())
    batch = {"ids": torch.arange(24).view(4, 6) % 8, "labels": labels}
    program = sch.build(batch=batch, loss=lambda out, _: out[0], optimizer=sgd)
    value = program.train_step(batch)
    return value, list(program.state_dict().values())


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("ignored", ["all", "of one rank"])
def test_a_step_without_labels(rows: str, ignored: str, threads: Any) -> None:
    """Every layout gives the original's loss: NaN without any label, else a number."""
    labels = torch.arange(24).view(4, 6) % 7
    labels[: 4 if ignored == "all" else 2] = -100
    torch.manual_seed(0)
    original = OwnLoss().double()
    loss = original(torch.arange(24).view(4, 6) % 8, labels)[0]
    loss.backward()
    sgd(original.named_parameters()).step()
    for value, state in threads.run(train_on_rank, 2, ROWS[rows], labels):
        assert torch.allclose(value.double(), loss.detach(), equal_nan=True), (value, loss)
        for actual, expected in zip(state, original.state_dict().values()):
            assert torch.allclose(actual, expected, equal_nan=True)


def test_parts_are_weighed_where_somebody_asks() -> None:
    """On ranks of the last stage, and where the model itself receives the labels."""

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
        assembly: Any = SimpleNamespace(pipeline=pipeline, weight=weight)
        return not vars(Assembly)["needs_no_weights"].func(assembly)

    assert not asked(Hidden(), last=False)
    assert asked(Hidden(), last=True) and asked(Hidden(), last=False, stale=True)
    assert asked(Given(), last=False) and asked(Hidden(), last=False, source="x.labels")
