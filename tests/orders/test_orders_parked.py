"""BPipe and Varuna: activations parked on a partner rank, and recomputed activations."""

from __future__ import annotations

import pytest

from schedlang.pipeline.cost import Cost
from schedlang.pipeline.schedules import OrderError, checked_size, find_order, make_order
from schedlang.pipeline.timeline.memory import peak_activations
from schedlang.pipeline.timeline.proof import check_timeline, with_transfers
from schedlang.pipeline.timeline.simulation import simulate_timeline
from schedlang.pipeline.timeline.table import Kind, Timeline

PARKING = (Kind.EVICT, Kind.LOAD)


def _peak_and_parked(t: Timeline, rank: int) -> tuple[int, int]:
    """A rank's peak of activations, and its peak of activations parked elsewhere."""
    local: set[int] = set()
    away: set[int] = set()
    most_local = most_parked = 0
    for op in t.rows(rank):
        if op.kind is Kind.F:
            local.add(op.microbatch)
        elif op.kind is Kind.B:
            local.remove(op.microbatch)  # fails unless it is on this rank
        elif op.kind is Kind.EVICT:
            local.remove(op.microbatch)
            away.add(op.microbatch)
        elif op.kind is Kind.LOAD:
            away.remove(op.microbatch)
            local.add(op.microbatch)
        assert op.kind not in PARKING or op.peer == t.ranks - 1 - rank
        most_local, most_parked = max(most_local, len(local)), max(most_parked, len(away))
    assert not local and not away
    return most_local, most_parked


@pytest.mark.parametrize("ranks", range(1, 12))
def test_bpipe(ranks: int) -> None:
    """BPipe is 1F1B, and no rank holds more than ceil((p+2)/2), with its partner's parked ones."""
    for micro in (1, 2, 3, 5, 8, 16, 30):
        t, bound = make_order("BPipe", ranks, micro), -(-(ranks + 2) // 2)
        check_timeline(with_transfers(t))
        without_parking = t.pick((t.kind != Kind.EVICT) & (t.kind != Kind.LOAD))
        assert without_parking == make_order("1F1B", ranks, micro)
        walks = [_peak_and_parked(t, rank) for rank in range(ranks)]
        for rank in range(ranks):
            assert walks[rank][0] + walks[-1 - rank][1] <= bound
        assert max(most_local for most_local, _ in walks) == min(ranks, micro, bound)
        assert peak_activations(t).max() == find_order("BPipe").peak(
            checked_size(find_order("BPipe"), ranks, micro)
        )


def test_bpipe_bubble() -> None:
    """BPipe has the bubble of 1F1B."""
    for ranks, micro in ((4, 8), (7, 9), (8, 32)):
        size = checked_size(find_order("bpipe"), ranks, micro)
        idle = simulate_timeline(find_order("bpipe").make(size), Cost()).makespan - 3 * micro
        assert idle == find_order("bpipe").bubble(size) == 3 * (ranks - 1)


@pytest.mark.parametrize("ranks", [1, 2, 4, 5, 8, 9])
@pytest.mark.parametrize("memory", range(1, 8))
def test_memory_of_bpipe(ranks: int, memory: int) -> None:
    """A memory limit is kept, or refused with the smallest legal one."""
    try:
        t = make_order("bpipe", ranks, 12, memory=memory)
    except OrderError as error:
        smallest = int(error.legal.removeprefix("memory="))
        assert smallest > memory and (ranks > 4 or smallest == (ranks + 2) // 2)
        t, memory = make_order("bpipe", ranks, 12, memory=smallest), smallest
    walks = [_peak_and_parked(t, rank) for rank in range(ranks)]
    assert all(walks[r][0] + walks[-1 - r][1] <= memory for r in range(ranks))
    assert peak_activations(t).max() <= memory


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_varuna(ranks: int) -> None:
    """The last rank recomputes nothing, the others recompute right before each backward."""
    for micro in (1, 2, 5, 8, 20):
        t = make_order("Varuna", ranks, micro)
        check_timeline(with_transfers(t))
        for rank in range(ranks):
            rows = t.rows(rank)
            recomputed = [op for op in rows if op.kind is Kind.RECOMPUTE]
            assert len(recomputed) == (0 if rank == ranks - 1 else micro)
            for op, after in zip(rows, rows[1:]):
                if op.kind is Kind.RECOMPUTE or rank == ranks - 1 and op.kind is Kind.F:
                    assert after == op._replace(kind=Kind.B)


def test_varuna_is_its_generator() -> None:
    """The order for 4 ranks and 5 microbatches equals the published generator's."""
    assert make_order("varuna", 4, 5).text() == (
        "rank 0: F0 F1 F2 F3 F4 RECOMPUTE0 B0 RECOMPUTE1 B1 RECOMPUTE2 B2 RECOMPUTE3 B3 "
        "RECOMPUTE4 B4\n"
        "rank 1: F0 F1 F2 F3 F4 RECOMPUTE0 B0 RECOMPUTE1 B1 RECOMPUTE2 B2 RECOMPUTE3 B3 "
        "RECOMPUTE4 B4\n"
        "rank 2: F0 F1 F2 RECOMPUTE0 B0 RECOMPUTE1 B1 RECOMPUTE2 B2 F3 F4 RECOMPUTE3 B3 "
        "RECOMPUTE4 B4\n"
        "rank 3: F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"
    )
