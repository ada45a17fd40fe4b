"""V-shaped orders (ZB-V, DualPipeV): idle time under a barrier, and overlapped cells."""

from __future__ import annotations

from fractions import Fraction

import pytest

from schedlang.pipeline.cost import Cost
from schedlang.pipeline.schedules import make_order
from schedlang.pipeline.timeline.memory import peak_activations
from schedlang.pipeline.timeline.proof import check_timeline, with_transfers
from schedlang.pipeline.timeline.simulation import simulate_timeline
from schedlang.pipeline.timeline.table import Kind, Op, Timeline

Cell = tuple[Op, ...]
OpKey = tuple[bool, int, int]  # backward or not, stage, microbatch


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8, 16])
def test_zb_v_waits_for_the_barrier(p: int) -> None:
    """At equal times no rank of ZB-V idles; a barrier adds (p-1) (F+I-W) / 2."""
    m = 2 * p + 1
    times = simulate_timeline(make_order("ZB-V", p, m), Cost())
    assert times.rank_span == 3 * m
    assert times.makespan - 3 * m == Fraction(p - 1, 2)


@pytest.mark.parametrize("name", ["ZB-V", "DualPipeV"])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8])
def test_few_microbatches(name: str, p: int) -> None:
    """Fewer microbatches than torch allows run too; all ranks have the same peak."""
    for m in range(1, 2 * p + 2):
        t = make_order(name, p, m)
        check_timeline(with_transfers(t))
        limit = Fraction(2 * p + 1, 2) if name == "DualPipeV" else p
        assert max(peak_activations(t)) == min(m, limit)
        if m >= 2 * p > 2:
            assert set(peak_activations(t)) == {limit}


def overlapped_cells(t: Timeline, rank: int) -> list[Cell]:
    """A rank's operations; F and the next B are one cell, except where DualPipeV separates them."""
    result: list[Cell] = []
    keep_apart = rank == t.ranks - 1
    for op in t.rows(rank):
        if op.kind == Kind.B and result and result[-1][-1].kind == Kind.F:
            if not keep_apart:
                result[-1] = (*result[-1], op)
                continue
            keep_apart = False
        result.append((op,))
    return result


def dependencies(op: Op, stages: int) -> list[OpKey]:
    """What must have ended before an operation."""
    if op.kind == Kind.F:
        return [(False, op.stage - 1, op.microbatch)] if op.stage else []
    same_stage = [(op.kind == Kind.W, op.stage, op.microbatch)]
    last = op.kind == Kind.W or op.stage == stages - 1
    return same_stage if last else [*same_stage, (True, op.stage + 1, op.microbatch)]


def longest_idle(t: Timeline, cost: dict[Kind, int], cell_cost: int) -> int:
    """The longest idle time of a rank if both operations of a cell run together."""
    rows = [overlapped_cells(t, rank) for rank in range(t.ranks)]
    ends: dict[OpKey, int] = {}
    free_at, idles, next_cell = [0] * t.ranks, [0] * t.ranks, [0] * t.ranks
    while any(next_cell[r] < len(rows[r]) for r in range(t.ranks)):
        for r in range(t.ranks):
            if next_cell[r] == len(rows[r]):
                continue
            cell = rows[r][next_cell[r]]
            dependency_keys = [key for op in cell for key in dependencies(op, t.stages)]
            if not all(key in ends for key in dependency_keys):
                continue
            start = max([free_at[r], *(ends[key] for key in dependency_keys)])
            idles[r] += start - free_at[r] if next_cell[r] else 0
            free_at[r] = start + (cell_cost if len(cell) == 2 else cost[cell[0].kind])
            ends |= {
                (op.kind != Kind.F, op.stage, op.microbatch): free_at[r]
                for op in cell
                if op.kind != Kind.W
            }
            next_cell[r] += 1
    return max(idles)


@pytest.mark.parametrize("p", [2, 3, 4, 6])
@pytest.mark.parametrize(("f", "w"), [(1, 1), (3, 2), (4, 3), (5, 1)])
def test_dualpipe_v_as_published(p: int, f: int, w: int) -> None:
    """With F = I, cells run as one take (PP/2 - 1) (F&B + B - 3W) of idle time, PP = 2p stages."""
    cost = {Kind.F: f, Kind.I: f, Kind.W: w, Kind.B: f + w}
    cell_cost = 2 * f + w
    assert longest_idle(make_order("DualPipeV", p, 3 * p), cost, cell_cost) == (p - 1) * (
        cell_cost + f + w - 3 * w
    )
