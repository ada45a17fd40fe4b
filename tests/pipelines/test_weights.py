"""Balanced cuts: weights of stages, counted, and no other cut with a lighter heaviest stage."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedlang.ir.plan import Plan
from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.partition import stage_assignment as cuts
from schedlang.passes.partition.stage_assignment import max_in_flight, state_bytes, weight_of
from schedlang.pipeline.schedules import make_order
from schedlang.runtime.tracing.recording import record_forward
from schedlang.runtime.tracing.units import units_of
from tests.models import Stack
from tests.proofs import make_plan, refusal_text

ROWS, WIDTH = 6, 8


class Wide(nn.Module):
    """A linear map to `hidden` and back; with one weight at both ends if `tied`."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def uneven_blocks() -> nn.Module:
    """Blocks of unequal width; the last two share the weights of their first maps."""
    model: Any = Stack(Wide(h) for h in (4, 4, 40, 4, 12, 12))
    model.blocks[5].up.weight = model.blocks[4].up.weight
    return model


BATCH = {"x": torch.rand(ROWS, WIDTH)}


def test_operations_are_counted() -> None:
    """FLOPs: 2 · rows · inputs · outputs for each of two products."""
    model = uneven_blocks()
    graph = record_forward(model, units_of(model, BATCH), BATCH)
    assert graph.flops == tuple(2 * 2 * ROWS * WIDTH * h for h in (4, 4, 40, 4, 12, 12))


def test_kept_bytes_are_counted() -> None:
    """A block keeps its input and the result of tanh, once each, and no parameter."""
    model = uneven_blocks()
    graph = record_forward(model, units_of(model, BATCH), BATCH)
    hidden = (4, 4, 40, 4, 12, 12)
    # the first input needs no gradient, but the product does keep it for that of the weight
    assert graph.saved_bytes == tuple(4 * ROWS * (WIDTH + h) for h in hidden)
    assert graph.argument_bytes == (0, *(4 * ROWS * WIDTH for _ in hidden[1:]))


@pytest.mark.parametrize(("name", "expected"), [("GPipe", (6, 6, 6)), ("1F1B", (3, 2, 1))])
def test_microbatches_in_flight(name: str, expected: tuple[int, ...]) -> None:
    """Microbatches in flight: all under GPipe, number of stages minus stage under 1F1B."""
    assert max_in_flight(make_order(name, 3, 6)) == expected


def _plan(balance: str, *rows: str, mesh: str = "pp=3") -> Plan:
    text = f"blocks  pipeline_split(over=pp, balance={balance})"
    return make_plan(uneven_blocks(), "\n".join([*rows[:1], text, *rows[1:]]), mesh)


@pytest.mark.parametrize("balance", ["params", "time", "memory"])
def test_no_other_cut_is_lighter(balance: str) -> None:
    """No other cut has a lighter heaviest stage, by trying all."""
    plan = _plan(balance)
    graph = record_forward(plan.model.model, units_of(plan.model.model, BATCH), BATCH)
    timeline = make_order("1F1B", 3, 6)
    weight = weight_of(balance, plan, graph, timeline)
    units = [cuts.ChainUnit(name, plan.model.numel(name)) for name in graph.units]

    def heaviest(stage_of: tuple[int, ...]) -> float:
        stage_runs = [
            (s, stage_of.index(s), stage_of.index(s) + stage_of.count(s)) for s in range(3)
        ]
        return max(weight(*stage_run) for stage_run in stage_runs)

    all_cuts = [
        cuts.stages_starting_at(units, starts) for starts in combinations(graph.units[1:], 2)
    ]
    balanced = heaviest(cuts.balanced_stages(units, 3, weight))
    assert balanced == min(map(heaviest, all_cuts)) < max(map(heaviest, all_cuts))


def test_a_shared_parameter_counts_once() -> None:
    """A shared weight counts once in a stage with both of its users, and in each of two stages."""
    plan = _plan("params")
    graph = record_forward(plan.model.model, units_of(plan.model.model, BATCH), BATCH)
    weight = weight_of("params", plan, graph, make_order("GPipe", 3, 1))
    both_blocks, first_block, second_block = weight(0, 4, 6), weight(0, 4, 5), weight(0, 5, 6)
    assert first_block == second_block and both_blocks == first_block + second_block - 12 * WIDTH


def test_memory_follows_the_order() -> None:
    """Under 1F1B the first stage keeps more microbatches alive, and gets fewer blocks."""
    plan = _plan("memory")
    model: Any = nn.Module()
    model = uneven_blocks()
    model.blocks = nn.ModuleList(Wide(4) for _ in range(12))
    batch = {"x": torch.rand(512, WIDTH)}  # activations weigh more than parameters
    graph = record_forward(model, units_of(model, batch), batch)
    plan = make_plan(model, "blocks  pipeline_split(over=pp, balance=memory)", "pp=3")
    units = [cuts.ChainUnit(name, 1) for name in graph.units]
    counts = {}
    for name in ("GPipe", "1F1B"):
        weight = weight_of("memory", plan, graph, make_order(name, 3, 6))
        stage_of = cuts.balanced_stages(units, 3, weight)
        counts[name] = [stage_of.count(stage) for stage in range(3)]
    assert counts["GPipe"] == [4, 4, 4]
    assert counts["1F1B"] == [2, 3, 7] or counts["1F1B"][0] < counts["1F1B"][2]


def test_state_is_what_a_rank_holds() -> None:
    """Parameter, gradient and two moments; each kind divided from its stage of ZeRO on."""
    sizes = {}
    for stage in (0, 1, 2, 3):
        plan = make_plan(uneven_blocks(), f"zero(stage={stage}, over=dp)", "dp=2")
        sizes[stage] = state_bytes(plan, "blocks.0.up.weight") / (4 * 4 * WIDTH)
    assert sizes == {0: 4, 1: 3, 2: 2.5, 3: 2}


def test_a_recomputed_unit_keeps_its_arguments() -> None:
    """With `checkpoint` on all blocks the stages weigh less, by what the blocks kept."""
    kept, recomputed = _plan("memory"), _plan("memory", "blocks.*  checkpoint()")
    graph = record_forward(kept.model.model, units_of(kept.model.model, BATCH), BATCH)
    timeline = make_order("GPipe", 3, 2)
    heavy = weight_of("memory", kept, graph, timeline)(0, 1, 4)
    light = weight_of("memory", recomputed, graph, timeline)(0, 1, 4)
    assert heavy - light == 2 * (sum(graph.saved_bytes[1:4]) - sum(graph.argument_bytes[1:4]))


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ("blocks[2, 4]  pipeline_split(over=pp, balance=time)", "S409"),
        ("blocks  pipeline_split(over=pp)\nblocks.2  pipeline_split(over=pp)", "S509"),
        ("blocks.2  pipeline_split(over=pp)\nblocks  pipeline_split(over=pp)", "S509"),
    ],
)
def test_rows_refused(rows: str, code: str) -> None:
    """Named starts together with a balance, or with a list, are refused."""
    assert code in refusal_text(uneven_blocks(), rows, "pp=3")


@pytest.mark.parametrize(
    ("balance", "expected"), [("even", (0, 0, 1, 1, 2, 2)), ("time", (0, 0, 1, 2, 2, 2))]
)
def test_a_schedule_is_cut_so(balance: str, expected: tuple[int, ...]) -> None:
    """The `balance` of the row determines the stages."""
    assert prepare(_plan(balance), BATCH).staged.cut.stage_of == expected
