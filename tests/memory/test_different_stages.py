"""Stages and units that compute the same are simulated once, different ones separately."""

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
from tests.proofs import make_plan

ROWS = """
blocks  pipeline_split(over=pp)
pipeline(order="1F1B", micro=4)
"""


class Block(nn.Module):
    """Runs its layer several times; `hidden` has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.times, self.hidden = nn.Linear(8, 8), 1, nn.Identity()

    def forward(self, x: Tensor, number: Tensor | None = None) -> Tensor:
        """Run the layer `times` times."""
        for _ in range(self.times):
            x = x + torch.tanh(self.hidden(self.up(x)))
        return x


class Stack(nn.Module):
    """A block for each stage; after block 2 the model's own code may compute too."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.between, self.cut, self.numbers = 0, -1, False

    def forward(self, x: Tensor) -> Tensor:
        """Run all blocks."""
        for index, block in enumerate(self.blocks):
            extra = (torch.tensor([index]),) if self.numbers else ()
            x = block(x.detach() if index == self.cut else x, *extra)
            for _ in range(self.between if index == 2 else 0):
                x = torch.sin(x)
        return x.square().mean()


def unchanged(model: Stack) -> None:
    """Leave all blocks equal."""


def repeated_layer(model: Stack) -> None:
    """Let one block run its layer three times."""
    model.blocks[2].times = 3  # type: ignore[assignment]


def zero_dropout(model: Stack) -> None:
    """Give each block a dropout, one of them with rate 0."""
    for block in model.blocks:
        block.hidden = nn.Dropout(0.5)
    model.get_submodule("blocks.2.hidden").p = 0.0  # type: ignore[assignment]


def frozen_bias(model: Stack) -> None:
    """Freeze one bias."""
    model.get_parameter("blocks.2.up.bias").requires_grad_(False)


def extra_code(model: Stack) -> None:
    """Let the code between two blocks compute."""
    model.between = 5


@pytest.mark.parametrize(
    "change", [unchanged, repeated_layer, zero_dropout, frozen_bias, extra_code]
)
def test_a_stage_that_computes_otherwise_is_played(
    change: Callable[[Stack], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank's bytes equal those of simulating every stage."""
    model = Stack()
    change(model)
    plan = make_plan(model, ROWS, "pp=4")
    batch = {"x": torch.zeros(4, 8)}
    prepared = prepare(plan, {"x": torch.zeros(1, 8)})
    kinds = representative_places(plan, prepared)

    def peaks() -> list[int]:
        estimates = simulated_ranks.estimate_memory(plan, batch, None, prepared)
        return [rank_memory.peak for rank_memory in estimates]

    shared = peaks()
    monkeypatch.setattr(
        simulated_ranks, "representative_places", lambda *_: {place: place for place in kinds}
    )
    assert shared == peaks()
    assert len(set(kinds.values())) == (3 if change is unchanged else 4)


def own_number(model: Stack) -> None:
    """Give one block a number of its own, of unknown meaning."""
    model.blocks[5].number = 1  # type: ignore[assignment]


def detached_input(model: Stack) -> None:
    """Detach one block's input: backward ends there."""
    model.cut = 5


def numbered_blocks(model: Stack) -> None:
    """Pass each block its index as a tensor, whose value may matter."""
    model.numbers = True


SENDING = """
blocks.*.up  shard(col, over=tp, output=R)
blocks.*     checkpoint()
"""


@pytest.mark.parametrize(
    ("change", "passed"),
    [
        (unchanged, 5),
        (repeated_layer, 4),
        (zero_dropout, 4),
        (frozen_bias, 4),
        (extra_code, 5),
        (own_number, 4),
        (detached_input, 4),
        (numbered_blocks, 0),
    ],
)
def test_a_unit_that_sends_otherwise_is_heard(
    change: Callable[[Stack], None], passed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded communication equals that of running all units; of equal units two run."""
    model, sample = Stack(8), {"x": torch.zeros(1, 8)}
    change(model)
    plan = make_plan(model, SENDING + ROWS, "pp=2, tp=2")
    prepared = prepare(plan, sample)
    collectives = list_collectives(plan, prepared, sample)
    context = TrafficContext(plan, prepared)
    kinds = unit_kinds(plan, prepared)
    try:
        recorded, _ = _run_and_record(context, sample, None, kinds)
    except DifferentUnits:
        recorded = []
    assert sum(not record.kind and not record.backward for record in recorded) == passed
    monkeypatch.setattr(traffic, "unit_kinds", lambda *_: {})
    assert collectives == list_collectives(plan, prepared, sample)
