"""Stages that hold alike modules are played once; what they run otherwise is told of each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.simulate import simulated_ranks, traffic
from schedlang.passes.simulate.equal_units import unit_kinds
from schedlang.passes.simulate.one_rank_step import representative_places
from schedlang.passes.simulate.traffic import TrafficContext, _run_and_record, list_collectives
from schedlang.runtime.tracing.equal_units import DifferentUnits
from tests.proofs import planned

ROWS = """
blocks  pipeline_split(over=pp)
pipeline(order="1F1B", micro=4)
"""


class Block(nn.Module):
    """Runs its layer again and again; `hidden` has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.times, self.hidden = nn.Linear(8, 8), 1, nn.Identity()

    def forward(self, x: Tensor, place: Tensor | None = None) -> Tensor:
        """As often as said."""
        for _ in range(self.times):
            x = x + torch.tanh(self.hidden(self.up(x)))
        return x


class Stack(nn.Module):
    """A block for each stage; behind block 2 the model itself may compute, too."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.between, self.cut, self.numbers = 0, -1, False

    def forward(self, x: Tensor) -> Tensor:
        """All blocks in turn."""
        for place, block in enumerate(self.blocks):
            more = (torch.tensor([place]),) if self.numbers else ()
            x = block(x.detach() if place == self.cut else x, *more)
            for _ in range(self.between if place == 2 else 0):
                x = torch.sin(x)
        return x.square().mean()


def alike(model: Stack) -> None:
    """Every block as the others."""


def longer(model: Stack) -> None:
    """One block runs its layer three times."""
    model.blocks[2].times = 3  # type: ignore[assignment]


def off(model: Stack) -> None:
    """Every block has a dropout, and that of one drops nothing."""
    for block in model.blocks:
        block.hidden = nn.Dropout(0.5)
    model.get_submodule("blocks.2.hidden").p = 0.0  # type: ignore[assignment]


def frozen(model: Stack) -> None:
    """One bias is not trained."""
    model.get_parameter("blocks.2.up.bias").requires_grad_(False)


def between(model: Stack) -> None:
    """The code between two blocks computes."""
    model.between = 5


@pytest.mark.parametrize("change", [alike, longer, off, frozen, between])
def test_a_stage_that_computes_otherwise_is_played(
    change: Callable[[Stack], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of each rank are those of playing every place of the pipeline for itself."""
    model = Stack()
    change(model)
    plan = planned(model, ROWS, "pp=4")
    batch = {"x": torch.zeros(4, 8)}
    prepared = prepare(plan, {"x": torch.zeros(1, 8)})
    kinds = representative_places(plan, prepared)

    def peaks() -> list[int]:
        found = simulated_ranks.estimate_memory(plan, batch, None, prepared)
        return [one.peak for one in found]

    shared = peaks()
    monkeypatch.setattr(
        simulated_ranks, "representative_places", lambda *_: {place: place for place in kinds}
    )
    assert shared == peaks()
    assert len(set(kinds.values())) == (3 if change is alike else 4)


def told(model: Stack) -> None:
    """One block holds a number of its own; nobody knows what for."""
    model.blocks[5].number = 1  # type: ignore[assignment]


def cut(model: Stack) -> None:
    """What one block is given does not learn: backward sends nothing there, and ends."""
    model.cut = 5


def numbered(model: Stack) -> None:
    """Each block is told its place by a tensor, whose values may decide what it does."""
    model.numbers = True


SENDING = """
blocks.*.up  shard(col, over=tp, output=R)
blocks.*     checkpoint()
"""


@pytest.mark.parametrize(
    ("change", "passed"),
    [
        (alike, 5),
        (longer, 4),
        (off, 4),
        (frozen, 4),
        (between, 5),
        (told, 4),
        (cut, 4),
        (numbered, 0),
    ],
)
def test_a_unit_that_sends_otherwise_is_heard(
    change: Callable[[Stack], None], passed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is sent is what a run of all units sends, in its order; of equal ones two run."""
    model, sample = Stack(8), {"x": torch.zeros(1, 8)}
    change(model)
    plan = planned(model, SENDING + ROWS, "pp=2, tp=2")
    prepared = prepare(plan, sample)
    found = list_collectives(plan, prepared, sample)
    context = TrafficContext(plan, prepared)
    kinds = unit_kinds(plan, prepared)
    try:
        heard, _ = _run_and_record(context, sample, None, kinds)
    except DifferentUnits:
        heard = []
    assert sum(not one.kind and not one.backward for one in heard) == passed
    monkeypatch.setattr(traffic, "unit_kinds", lambda *_: {})
    assert found == list_collectives(plan, prepared, sample)
