"""Search of orders: optimal where the optimum is known, and never over the memory limit."""

from __future__ import annotations

from fractions import Fraction

import pytest

from schedlang.pipeline.cost import Cost
from schedlang.pipeline.schedules import ORDERS, OrderError, Size, find_order, make_order
from schedlang.pipeline.schedules.list_scheduling import StageChain, fill_gaps
from schedlang.pipeline.schedules.search import (
    find_repetends,
    search_order,
    stage_chains,
    warmup_timelines,
)
from schedlang.pipeline.timeline.memory import peak_activations
from schedlang.pipeline.timeline.proof import check_timeline, with_transfers
from schedlang.pipeline.timeline.simulation import simulate_timeline
from schedlang.pipeline.timeline.table import Kind, Op, Timeline, timeline_from_rows
from tests.pipeline_optimum import Problem, has_faster

COSTS = [(1, 1, 1), (2, 3, 1), (3, 2, 2)]
SMALL_SIZES = [(2, 4, 1), (2, 6, 2), (3, 4, 1), (3, 4, 2), (3, 4, 3), (3, 8, 2), (4, 4, 2)]


def _makespan(ranks: int, micro: int, memory: float | None, cost: Cost, chunks: int = 1) -> int:
    t = make_order("search", ranks, micro, chunks, memory=memory, cost=cost)
    check_timeline(with_transfers(t))
    assert memory is None or peak_activations(t, cost).max() <= memory
    return int(simulate_timeline(t, cost).makespan)


def _makespan_unparked(ranks: int, micro: int, memory: int, cost: Cost) -> int:
    """The makespan without parked activations, which the oracle does not model."""
    orders = tuple(order for order in ORDERS if order.name not in ("Search", "BPipe"))
    t = search_order(Size(ranks, micro, memory=Fraction(memory), cost=cost), orders)
    check_timeline(with_transfers(t))
    assert peak_activations(t, cost).max() <= memory and (t.kind <= Kind.W).all()
    return int(simulate_timeline(t, cost).makespan)


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize(("ranks", "micro", "memory"), SMALL_SIZES)
def test_optimal(ranks: int, micro: int, memory: int, costs: tuple[int, int, int]) -> None:
    """Branch and bound over all orders finds none that is faster."""
    makespan = _makespan_unparked(ranks, micro, memory, Cost(*costs))
    problem = Problem(ranks, micro, costs, memory)
    assert not has_faster(problem, makespan) and has_faster(problem, makespan + 1)


@pytest.mark.deep
@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize(("ranks", "micro", "memory"), [(4, 4, 3), (4, 6, 3), (4, 8, 3)])
def test_near_optimal(ranks: int, micro: int, memory: int, costs: tuple[int, int, int]) -> None:
    """Within 5 % of the optimum where the memory binds hardest."""
    makespan = _makespan_unparked(ranks, micro, memory, Cost(*costs))
    problem = Problem(ranks, micro, costs, memory)
    assert not has_faster(problem, -(-makespan * 95 // 100)) and has_faster(problem, makespan + 1)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("costs", COSTS)
def test_reaches_the_bound(ranks: int, costs: tuple[int, int, int]) -> None:
    """With enough memory the makespan is near its lower bound, and equal to it at unit costs."""
    f, i, w = costs
    makespan = _makespan(ranks, 3 * ranks, 2 * ranks, Cost(*costs))
    bound = (ranks - 1) * f + 3 * ranks * (f + i + w)
    assert bound <= makespan <= bound * 1.06
    if costs == (1, 1, 1):
        assert makespan == bound == _makespan(ranks, 3 * ranks, ranks, Cost())


def _short_1f1b(ranks: int, micro: int, memory: int) -> Timeline:
    """1F1B with warm-ups as long as the memory allows."""
    rows = []
    for rank in range(ranks):
        warmup = min(ranks - 1 - rank, memory - 1, micro)
        row = [Op(Kind.F, rank, m) for m in range(warmup)]
        for m in range(micro):
            row += [Op(Kind.F, rank, warmup + m)] if warmup + m < micro else []
            row.append(Op(Kind.B, rank, m))
        rows.append(row)
    return timeline_from_rows(rows)


@pytest.mark.parametrize("cost", [Cost(), Cost(5, 3, 4, 1), Cost(Fraction(3, 2), 1, 2, 0, 0)])
def test_never_worse_than_1f1b(cost: Cost) -> None:
    """Under any limit the search is at least as fast as 1F1B and other orders under it."""
    for ranks, micro in ((2, 3), (4, 6)):
        for memory in range(1, ranks + 1):
            t = make_order("search", ranks, micro, memory=memory, cost=cost)
            time = simulate_timeline(t, cost).makespan
            assert time <= simulate_timeline(_short_1f1b(ranks, micro, memory), cost).makespan
            for order in ORDERS:
                if order.replicas == 1 and not order.relaxed and order.chunks == (1,):
                    timeline = order.make(Size(ranks, micro)) if order.name != "Varuna" else t
                    fits = peak_activations(timeline, cost).max() <= memory
                    assert not fits or time <= simulate_timeline(timeline, cost).makespan


@pytest.mark.parametrize("chunks", [2, 3])
def test_several_chunks(chunks: int) -> None:
    """Several stages on each rank are not slower under the same memory."""
    for memory in (1, 2):
        one_chunk = _makespan(2, 4, memory, Cost(6, 6, 6))
        assert _makespan(2, 4, memory, Cost(6, 6, 6), chunks) <= one_chunk


def test_rank_span() -> None:
    """Without a barrier the search shortens the longest span of a rank to its work."""
    t = make_order("search", 4, 12, memory=8, barrier=False)
    assert simulate_timeline(t).rank_span == simulate_timeline(t).busy.max()
    assert (
        simulate_timeline(make_order("search", 4, 12, memory=8)).makespan
        <= simulate_timeline(t).makespan
    )


@pytest.mark.parametrize("memory", [0.25, 0.99])
@pytest.mark.parametrize(("ranks", "chunks"), [(2, 1), (4, 1), (2, 2)])
def test_too_little_memory(memory: float, ranks: int, chunks: int) -> None:
    """Too little memory is refused with the smallest legal one."""
    with pytest.raises(OrderError) as caught:
        make_order("search", ranks, 4, chunks, memory=memory)
    assert caught.value.legal == "memory=1"
    make_order("search", ranks, 4, chunks, memory=1)


def test_deterministic() -> None:
    """The same sizes give the same order."""
    size = Size(3, 6, memory=Fraction(2), cost=Cost(5, 3, 4))
    orders = tuple(order for order in ORDERS if order.name != "Search")
    assert (
        search_order(size, orders) == search_order(size, orders) == find_order("Search").make(size)
    )


def test_uneven_stages() -> None:
    """Uneven stages are searched with their own costs and activations."""
    cost = Cost(4, 4, 4, 1, 1, shares=[1, 2, 3, 2])
    t = make_order("search", 4, 6, memory=4, cost=cost)
    check_timeline(with_transfers(t))
    assert peak_activations(t, cost).max() <= 4
    assert (
        simulate_timeline(t, cost).makespan
        <= simulate_timeline(make_order("1f1b", 4, 6), cost).makespan
    )


@pytest.mark.parametrize(("ranks", "micro"), [(2, 4), (4, 8), (8, 16)])
def test_filled(ranks: int, micro: int) -> None:
    """1F1B with weight gradients in its gaps, under its own memory, is as fast as ZB-H1."""
    chain = next(c for c in stage_chains(Size(ranks, micro)) if len(c.times) == 3)
    for whole_gaps in (True, False):
        t = fill_gaps(chain, make_order("1F1B", ranks, micro), ranks, whole_gaps=whole_gaps)
        assert t is not None and peak_activations(t).max() == ranks
        check_timeline(with_transfers(t))
        assert (
            simulate_timeline(t, Cost()).makespan
            == simulate_timeline(make_order("ZB-H1", ranks, micro), Cost()).makespan
        )
    assert fill_gaps(chain, make_order("1F1B", ranks, micro), 0, whole_gaps=True) is None


@pytest.mark.parametrize("memory", [1, 2, 3, 5])
def test_warmups_fit(memory: int) -> None:
    """Warm-ups use all the memory that they may, and no more."""
    warmups = list(warmup_timelines(Size(4, 8, memory=Fraction(memory))))
    assert [peak_activations(t).max() for t in warmups] == [min(memory, 4), memory]


@pytest.mark.parametrize("times", [(2, 5, 3), (5, 2, 3), (4, 1, 5)])
def test_repetends_of_uneven_operations(times: tuple[int, int, int]) -> None:
    """No two operations overlap modulo the period where they take different times."""
    rows = tuple((time,) * 3 for time in times)
    chain = StageChain(3, (0, 1, 2), rows, ((1,) * 3, (0,) * 3, (-1,) * 3))
    for period in (10, 11, 13):
        for repetend in find_repetends(chain, period, None, 16):
            for rank in range(3):
                busy = [
                    (repetend.start(kind, rank, 0) + k) % period
                    for kind in range(3)
                    for k in range(times[kind])
                ]
                assert len(set(busy)) == len(busy) == 10


@pytest.mark.parametrize("period", [3, 4, 6])
def test_repetends_repeat(period: int) -> None:
    """No two operations of a rank overlap modulo the period, and each waits for its inputs."""
    chain = StageChain(3, (0, 1, 2), ((1,) * 3,) * 3, ((1,) * 3, (0,) * 3, (-1,) * 3), 1)
    repetends = find_repetends(chain, period, None, 16)
    assert len(repetends) > 3
    for repetend in repetends:
        for rank in range(3):
            phases = [repetend.start(kind, rank, 0) % period for kind in range(3)]
            assert len(set(phases)) == 3
        for stage in range(2):
            assert repetend.start(0, stage + 1, 0) >= repetend.start(0, stage, 0) + 2
            assert repetend.start(1, stage, 0) >= repetend.start(1, stage + 1, 0) + 2
        assert repetend.start(1, 2, 0) > repetend.start(0, 2, 0)
        assert all(repetend.start(2, s, 0) > repetend.start(1, s, 0) for s in range(3))
    assert not find_repetends(chain, 2, None, 16)
