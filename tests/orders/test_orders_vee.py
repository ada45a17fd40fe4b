"""Orders in a V that are written out: what is left under a barrier, and cells that overlap."""

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
Place = tuple[bool, int, int]  # a backward or not, stage, microbatch


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8, 16])
def test_zb_v_waits_for_the_barrier(p: int) -> None:
    """At equal times no rank of ZB-V idles; under a barrier (p-1) (F+I-W) / 2 is left."""
    m = 2 * p + 1
    times = simulate_timeline(make_order("ZB-V", p, m), Cost())
    assert times.rank_span == 3 * m
    assert times.makespan - 3 * m == Fraction(p - 1, 2)


@pytest.mark.parametrize("name", ["ZB-V", "DualPipeV"])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8])
def test_few_microbatches(name: str, p: int) -> None:
    """Fewer microbatches than torch takes run too, on every rank the same number held."""
    for m in range(1, 2 * p + 2):
        t = make_order(name, p, m)
        check_timeline(with_transfers(t))
        most = Fraction(2 * p + 1, 2) if name == "DualPipeV" else p
        assert max(peak_activations(t)) == min(m, most)
        if m >= 2 * p > 2:
            assert set(peak_activations(t)) == {most}


def cells(t: Timeline, rank: int) -> list[Cell]:
    """A rank's operations, F and the B after it as one, except where DualPipeV keeps them apart."""
    found: list[Cell] = []
    apart = rank == t.ranks - 1
    for op in t.rows(rank):
        if op.kind == Kind.B and found and found[-1][-1].kind == Kind.F:
            if not apart:
                found[-1] = (*found[-1], op)
                continue
            apart = False
        found.append((op,))
    return found


def needs(op: Op, stages: int) -> list[Place]:
    """What must have ended before an operation."""
    if op.kind == Kind.F:
        return [(False, op.stage - 1, op.microbatch)] if op.stage else []
    own = [(op.kind == Kind.W, op.stage, op.microbatch)]
    last = op.kind == Kind.W or op.stage == stages - 1
    return own if last else [*own, (True, op.stage + 1, op.microbatch)]


def idle(t: Timeline, cost: dict[Kind, int], both: int) -> int:
    """The longest idle time of a rank, where the two halves of a cell begin and end together."""
    rows = [cells(t, rank) for rank in range(t.ranks)]
    ends: dict[Place, int] = {}
    free, idles, at = [0] * t.ranks, [0] * t.ranks, [0] * t.ranks
    while any(at[r] < len(rows[r]) for r in range(t.ranks)):
        for r in range(t.ranks):
            if at[r] == len(rows[r]):
                continue
            cell = rows[r][at[r]]
            wanted = [place for op in cell for place in needs(op, t.stages)]
            if not all(place in ends for place in wanted):
                continue
            start = max([free[r], *(ends[place] for place in wanted)])
            idles[r] += start - free[r] if at[r] else 0
            free[r] = start + (both if len(cell) == 2 else cost[cell[0].kind])
            ends |= {
                (op.kind != Kind.F, op.stage, op.microbatch): free[r]
                for op in cell
                if op.kind != Kind.W
            }
            at[r] += 1
    return max(idles)


@pytest.mark.parametrize("p", [2, 3, 4, 6])
@pytest.mark.parametrize(("f", "w"), [(1, 1), (3, 2), (4, 3), (5, 1)])
def test_dualpipe_v_as_published(p: int, f: int, w: int) -> None:
    """With F = I, cells run as one take (PP/2 - 1) (F&B + B - 3W) of idle time, PP = 2p stages."""
    cost = {Kind.F: f, Kind.I: f, Kind.W: w, Kind.B: f + w}
    both = 2 * f + w
    assert idle(make_order("DualPipeV", p, 3 * p), cost, both) == (p - 1) * (both + f + w - 3 * w)
