"""Backward functions that are not linear in their gradient: named if wrong, else accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.prove import Case, prove
from schedlang.passes.static_checks.static import static
from tests.engine import Threads
from tests.proofs import assert_proven, make_plan

TP = "up  shard(col, over=tp)\ndown  shard(row, over=tp)"
DP = "zero(stage=0, over=dp)"
MICRO = 'pipeline(order="1F1B", micro=2)'


class Clipped(torch.autograd.Function):
    """Clips each element of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].clamp(-1e-3, 1e-3)


class Normed(torch.autograd.Function):
    """Scales its gradient to a norm of one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] / grads[0].norm()


def norm_by_hook(x: Tensor) -> Tensor:
    """Scale the gradient to a norm of one by a hook."""
    x = x.view_as(x)
    x.register_hook(lambda grad: grad / grad.norm())
    return x


Transform = Callable[[Tensor], Tensor]


class Net(nn.Module):
    """Two layers; `transform` is applied to the activations between them, or to a weight."""

    def __init__(self, transform: Transform, *, weight: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.way, self.weight = (
            nn.Linear(6, 8),
            nn.Linear(8, 6),
            transform,
            weight,
        )
        self.out = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x))
        y = self.down(hidden if self.weight else self.way(hidden))
        weight = self.way(self.out.weight) if self.weight else self.out.weight
        loss: Tensor = (x + nn.functional.linear(y, weight)).square().mean()
        return loss


def make_batch(seed: int) -> dict[str, Tensor]:
    """Return a batch of four rows."""
    return {"x": torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))}


BATCHES = [make_batch(seed) for seed in range(2)]


@pytest.mark.parametrize("rows, mesh", [(TP, "tp=2"), (DP, "dp=2"), (MICRO, "dp=1")])
def test_what_is_clipped_by_element_is_right(rows: str, mesh: str, threads: Threads) -> None:
    """Clipping by element is right: each element of a hidden gradient is complete on its rank."""
    assert_proven(threads, make_plan(Net(Clipped.apply), rows, mesh), BATCHES)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows, mesh", [(DP, "dp=2"), (MICRO, "dp=1")])
@pytest.mark.parametrize(
    "model, what",
    [
        (Net(Normed.apply), "the backward of `Normed`, at test_nonlinear.py:"),
        (Net(Clipped.apply, weight=True), "the backward of `Clipped`, at test_nonlinear.py:"),
        (Net(norm_by_hook), "a hook on the result of `"),
    ],
)
def test_parts_of_a_gradient_are_not_changed_apart(
    model: nn.Module, what: str, rows: str, mesh: str, threads: Threads
) -> None:
    """The refusal names the function or hook, and does not mention batch statistics."""
    with pytest.raises(Refusal) as caught:
        prove(Case(make_plan(model, rows, mesh), tuple(BATCHES)), pool=threads)  # type: ignore[arg-type]
    text = caught.value.diagnostic
    assert text.code == "S703" and "gradients of this model, not its loss" in text.title
    assert what in text.notes[0] and not any("statistics" in note for note in text.notes)


def test_a_norm_of_shards_is_suspected(threads: Threads) -> None:
    """The proof fails under `shard`, and names the function; `check` assumes linearity."""
    plan = make_plan(Net(Normed.apply), TP, "tp=2")
    report = prove(Case(plan, tuple(BATCHES), dtype="none"), pool=threads)  # type: ignore[arg-type]
    assert not report.ok
    assert any("backward of `Normed`, at" in text for _, text in report.localised), report
    unseen = [text_ for claim in static(plan, make_batch(0), None).claims for text_ in claim.unseen]
    assert "the backward of `Normed`: assumed to be linear" in unseen
