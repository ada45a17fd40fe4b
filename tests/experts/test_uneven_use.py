"""Parameters that only some of the ranks use in a step: experts that no token there chose."""

from __future__ import annotations

from typing import Any

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


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_units_that_not_every_rank_calls(threads: Threads, stage: int) -> None:
    """What values choose among is no unit of its own: ranks would gather different ones."""
    plan = planned(Parallel().double(), f"  zero(stage={stage}, over=dp)", "dp=2")
    proven(threads, plan, chosen())


class Turned(nn.Module):
    """Layers of one size, which a number in each row sends it through one way or the other.

    `strict`: no other kind than that of the batch is taken, so that a look with other values shows
    nothing.
    """

    def __init__(self, strict: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.strict = strict
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        """The mean of what the layers give."""
        if self.strict and int(kind[0]) != 7:
            raise ValueError("another kind")
        layers, out = list(self.layers), []
        for row in x:
            for layer in layers if row[0] > 0 else layers[::-1]:
                row = layer(row).tanh()
            out.append(row)
        return torch.stack(out).square().mean()


def turned() -> list[dict[str, Tensor]]:
    """Batches whose halves go two ways, or all rows one."""
    return [{"x": batch["x"].sort(0).values, "kind": torch.full((4,), 7)} for batch in chosen()]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_units_that_ranks_call_in_other_orders(threads: Threads, stage: int) -> None:
    """Each rank calls the layers in an order of its own, and sums each with itself."""
    plan = planned(Turned().double(), f"  zero(stage={stage}, over=dp)", "dp=2")
    seen = threads.run(steps, 2, plan, tuple(turned()), sgd, None, {})[0]
    assert_near(seen, sequential(Turned().double(), turned()))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_orders_that_nobody_could_see_before(threads: Threads, stage: int) -> None:
    """Modules of one size that ranks summed with others are found out before a step (S663)."""
    plan = planned(Turned(strict=True).double(), f"  zero(stage={stage}, over=dp)", "dp=2")
    with pytest.raises(Exception, match="S663"):
        threads.run(steps, 2, plan, tuple(turned()), sgd, None, {})


class Spoken(nn.Module):
    """Blocks, each with an adapter for every language; a number of the row chooses."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.inside = inside
        adapters = [
            nn.ModuleDict({name: nn.Linear(4, 4) for name in ("de", "en", "fr")})
            for _ in self.blocks
        ]
        if inside:
            for block, own in zip(self.blocks, adapters):
                block.adapters = own
        else:
            self.adapters = nn.ModuleList(adapters)

    def forward(self, x: Tensor, languages: Tensor) -> Tensor:
        """The mean of what the rows give."""
        for number, block in enumerate(self.blocks):
            x = block(x).tanh()
            own: Any = block.adapters if self.inside else self.adapters[number]
            names = list(own)
            x = x + torch.stack([own[names[int(k)]](one) for one, k in zip(x, languages)])
        return x.square().mean()


def spoken() -> list[dict[str, Tensor]]:
    """Batches of one language, then of others for each half of the rows."""
    torch.manual_seed(1)
    languages = [[0, 0, 0, 0], [0, 0, 1, 1], [2, 1, 1, 2], [2, 2, 0, 0]]
    return [{"x": torch.randn(4, 4).double(), "languages": torch.tensor(k)} for k in languages]


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_adapters_that_numbers_of_the_batch_choose(
    threads: Threads, stage: int, inside: bool
) -> None:
    """Each adapter is summed with itself, also one that the batch of `build` did not choose."""
    plan = planned(Spoken(inside).double(), f"  zero(stage={stage}, over=dp)", "dp=2")
    seen = threads.run(steps, 2, plan, tuple(spoken()), sgd, None, {})[0]
    assert_near(seen, sequential(Spoken(inside).double(), spoken()))
