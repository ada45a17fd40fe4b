"""Parameters that only some of the ranks use in a step: experts that no token there chose."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.engine import Threads
from tests.proofs import assert_near, planned, proven, sequential, sgd, steps


class Block(nn.Module):
    """Rows go through the layer that a number in them chooses; a third layer is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.idle = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """What the chosen layers give."""
        out = x
        for number, expert in enumerate(self.experts):
            rows = ((x[:, 0] > 0) == bool(number)).nonzero()[:, 0]
            if rows.numel():
                out = out.index_add(0, rows, expert(x[rows]))
        return out.tanh()


class Chosen(nn.Module):
    """Two such blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The mean of what the rows give."""
        for block in self.blocks:
            x = block(x)
        loss: Tensor = self.head(x).square().mean()
        return loss


def chosen() -> list[dict[str, Tensor]]:
    """Batches in which each half of the rows chooses otherwise."""
    signs = torch.tensor([[-3.0, -2, 3, 2], [-3, 2, -2, 3], [3, 2, -2, -3]], dtype=torch.float64)
    torch.manual_seed(1)
    batches = [{"x": torch.randn(4, 4).double()} for _ in signs]
    for batch, first in zip(batches, signs):
        batch["x"][:, 0] = first
    return batches


class Nested(nn.Module):
    """Layers in lists within a list, which nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.groups = nn.ModuleList(
            nn.ModuleList(nn.Linear(4, 4) for _ in range(2)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        """The mean of what the rows give."""
        for group in self.groups:
            for layer in group:  # type: ignore[attr-defined]
                x = layer(x).tanh()
        return x.square().mean()


def test_lists_in_lists_are_sliced_by_what_is_called(threads: Threads) -> None:
    """ZeRO gathers the layers of nested lists, as lists themselves are never called."""
    batches = [{"x": torch.randn(4, 4, dtype=torch.float64)} for _ in range(3)]
    plan = planned(Nested().double(), "  zero(stage=3, over=dp)", "dp=2")
    proven(threads, plan, batches)


@pytest.mark.parametrize("stage", [1, 3])
def test_what_nobody_uses_in_a_later_stage(threads: Threads, stage: int) -> None:
    """It lies with the unit that it stands in, sliced or not, and is saved with the rest."""
    rows = f"""  blocks  pipeline_split(over=pp)
  zero(stage={stage}, over=dp)
  pipeline(order="GPipe", micro=2)"""
    proven(threads, planned(Chosen().double(), rows, "dp=2, pp=2"), chosen())


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_what_one_rank_alone_uses(threads: Threads, stage: int) -> None:
    """Its gradient is whole on all, and what nobody uses has none, at every stage of ZeRO."""
    plan = planned(Chosen().double(), f"  zero(stage={stage}, over=dp)", "dp=2")
    proven(threads, plan, chosen())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_nobody_uses_in_one_step(threads: Threads, stage: int) -> None:
    """A layer that no row of a step chooses has no gradient in it, as in the plain loop.

    Momentum and weight decay would move it otherwise: it is used in the steps before and after.
    """
    batches = chosen()
    batches[1]["x"][:, 0] = torch.tensor([3.0, 2, 2, 3])  # all rows choose the second layer
    plan = planned(Chosen().double(), f"  zero(stage={stage}, over=dp)", "dp=2")
    seen = threads.run(steps, 2, plan, tuple(batches), sgd, None, {})[0]
    assert_near(seen, sequential(Chosen().double(), batches))


class Parallel(nn.Module):
    """Layers side by side in the outermost list, of which values choose one for each row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        """The mean of what the rows give."""
        out = x
        for number, expert in enumerate(self.experts):
            rows = ((x[:, 0] > 0) == bool(number)).nonzero()[:, 0]
            if rows.numel():
                out = out.index_add(0, rows, expert(x[rows]))
        return out.square().mean()


def test_units_that_not_every_rank_calls(threads: Threads) -> None:
    """Ranks that gather different modules of one size are found out, whatever was mixed (S663)."""
    plan = planned(Parallel().double(), "  zero(stage=3, over=dp)", "dp=2")
    with pytest.raises(Exception, match="S663"):
        threads.run(steps, 2, plan, tuple(chosen()), sgd, None, {})
