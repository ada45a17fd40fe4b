"""Bidirectional orders (Chimera, GEMS, DualPipe), against the claims of their papers."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import pytest

from schedlang.pipeline.cost import Cost
from schedlang.pipeline.schedules import OrderError, checked_size, find_order, make_order
from schedlang.pipeline.timeline.memory import peak_activations
from schedlang.pipeline.timeline.proof import check_timeline, with_transfers
from schedlang.pipeline.timeline.simulation import simulate_timeline
from schedlang.pipeline.timeline.table import Kind, Op, Timeline

# (F, I, W) as integers, so that all times are exact
COSTS = [(1, 1, 1), (2, 1, 1), (3, 2, 1), (2, 2, 1), (7, 5, 3), (3, 1, 1), (8, 1, 1), (1, 2, 1)]


def _idle_times(t: Timeline, cost: Cost) -> tuple[Any, Any]:
    """Idle time of a rank within the makespan, and within the longest span of a rank."""
    times = simulate_timeline(t, cost)
    busy = t.microbatches * (cost.f + cost.i + cost.w)
    return times.makespan - busy, times.rank_span - busy


@pytest.mark.parametrize("name", ["Chimera", "GEMS", "DualPipe"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
def test_two_directions(name: str, ranks: int) -> None:
    """Replicas have opposite placements, and each microbatch passes all stages of one replica."""
    checked = 0
    for micro in (2, 3, 4, 6, 8, 10, 16, 18, 20):
        try:
            t = make_order(name, ranks, micro)
        except OrderError:
            continue
        checked += 1
        check_timeline(with_transfers(t))
        assert t.replica_ranks.tolist() == [list(range(ranks)), list(reversed(range(ranks)))]
        assert set(zip(t.microbatch.tolist(), t.replica.tolist())) == {
            (m, m % 2) for m in range(micro)
        }
        counts = Counter(zip(t.kind.tolist(), t.stage.tolist(), t.microbatch.tolist()))
        unsplit = {k for k in counts if k[0] in (Kind.F, Kind.B, Kind.I)}
        assert len(unsplit) == 2 * ranks * micro and set(counts.values()) == {1}
        loads = Counter(zip(t.rank.tolist(), t.replica.tolist()))
        assert name == "DualPipe" or micro % 2 or len(set(loads.values())) == 1
    assert checked >= 2 or (ranks % 2 and name != "GEMS")


@pytest.mark.parametrize("ranks", [2, 4, 6, 8, 16])
def test_chimera_rates(ranks: int) -> None:
    """The bubble rates of the paper's Table 2, at F = B and at B = 2F, and its activations."""
    for micro in (ranks, 2 * ranks, 5 * ranks):
        equal_costs = simulate_timeline(make_order("chimera", ranks, micro), Cost(2, 1, 1))
        assert equal_costs.bubble == Fraction(ranks - 2, 2 * micro + ranks - 2)
    timeline = make_order("chimera", ranks, ranks)
    double_costs = simulate_timeline(timeline, Cost(1, 1, 1))
    assert double_costs.bubble == Fraction(ranks - 2) / (Fraction(3, 2) * ranks + ranks - 2)
    peaks = peak_activations(timeline)
    assert (peaks.min(), peaks.max()) == (ranks // 2 + 1, ranks)


@pytest.mark.parametrize("name", ["Chimera", "GEMS"])
@pytest.mark.parametrize("costs", COSTS)
def test_closed_forms_of_directions(name: str, costs: tuple[int, int, int]) -> None:
    """Idle time and activations are the closed forms for every legal size, exactly."""
    cost, tried = Cost(*costs), 0
    for ranks in (2, 3, 4, 6, 8):
        for micro in range(2, 4 * ranks + 3):
            try:
                size = checked_size(find_order(name), ranks, micro, cost=cost)
            except OrderError:
                continue
            t = find_order(name).make(size)
            makespan_idle, rank_idle = _idle_times(t, cost)
            assert makespan_idle == find_order(name).bubble(size)
            assert rank_idle == makespan_idle or (name == "GEMS" and micro % 2 == 0)
            assert peak_activations(t).max() == find_order(name).peak(size)
            tried += 1
    assert tried > 30


def test_gems_rate() -> None:
    """With B = 2F and many microbatches the rate tends to (p-1) / (p + 1/2)."""
    for ranks in (2, 4, 8):
        rate = simulate_timeline(make_order("gems", ranks, 400), Cost()).bubble
        assert abs(rate - Fraction(ranks - 1) / (ranks + Fraction(1, 2))) < Fraction(1, 200)


@pytest.mark.parametrize("ranks", [2, 4, 6, 8, 16])
@pytest.mark.parametrize("more", [0, 2, 8])
def test_dualpipe_closed_form(ranks: int, more: int) -> None:
    """Idle time is the closed form where I <= F, and p + 1 microbatches are live."""
    t = make_order("dualpipe", ranks, 2 * ranks + more)
    for costs in COSTS[:-1]:
        size = checked_size(find_order("dualpipe"), ranks, 2 * ranks + more, cost=Cost(*costs))
        assert _idle_times(t, size.cost) == (find_order("dualpipe").bubble(size),) * 2
    assert peak_activations(t).max() == find_order("dualpipe").peak(size) == ranks + 1


@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
@pytest.mark.parametrize("costs", [(1, 1, 1), (2, 2, 1), (1, 2, 1), (3, 4, 2)])
def test_dualpipe_as_published(ranks: int, costs: tuple[int, int, int]) -> None:
    """With F&B as one cell, (p/2 - 1)(F&B + B - 3W): Table 2 of the DeepSeek-V3 report."""
    f, i, w = costs
    for micro in (2 * ranks, 4 * ranks):
        idle = _idle_by_rank(make_order("dualpipe", ranks, micro), f, i, w)
        assert max(idle) == (ranks // 2 - 1) * ((f + i + w) + (i + w) - 3 * w)


def _idle_by_rank(t: Timeline, f: int, i: int, w: int) -> list[int]:
    """The idle time of every rank if a forward and the next backward are one operation."""
    duration = {Kind.F: f, Kind.B: i + w, Kind.I: i, Kind.W: w}
    rows = []
    for rank in range(t.ranks):
        cells: list[list[Op]] = []
        for op in t.rows(rank):
            joins = op.kind is Kind.B and cells and [o.kind for o in cells[-1]] == [Kind.F]
            cells[-1].append(op) if joins else cells.append([op])
        rows.append(cells)
    end: dict[tuple[str, int, int], int] = {}
    free_at, next_cell = [0] * t.ranks, [0] * t.ranks
    for _ in range(len(t) * t.ranks):
        for rank, cells in enumerate(rows):
            if next_cell[rank] == len(cells):
                continue
            cell = cells[next_cell[rank]]
            dependencies = [dependency for op in cell for dependency in _dependencies(op, t.stages)]
            if all(dependency in end for dependency in dependencies):
                free_at[rank] = max(
                    [free_at[rank], *(end[dependency] for dependency in dependencies)]
                )
                free_at[rank] += sum(duration[op.kind] for op in cell)
                end |= {(_kind_name(op), op.stage, op.microbatch): free_at[rank] for op in cell}
                next_cell[rank] += 1
    assert all(next_cell[rank] == len(cells) for rank, cells in enumerate(rows))
    return [end - sum(duration[op.kind] for op in t.rows(rank)) for rank, end in enumerate(free_at)]


def _kind_name(op: Op) -> str:
    return "B" if op.kind is Kind.I else op.kind.name


def _dependencies(op: Op, stages: int) -> list[tuple[str, int, int]]:
    if op.kind is Kind.F:
        return [("F", op.stage - 1, op.microbatch)] if op.stage else []
    if op.kind is Kind.W:
        return [("B", op.stage, op.microbatch)]
    later_stage = [("B", op.stage + 1, op.microbatch)] if op.stage + 1 < stages else []
    return [("F", op.stage, op.microbatch), *later_stage]


@pytest.mark.parametrize("name", ["Chimera", "GEMS", "DualPipe"])
def test_proposed_sizes_of_directions(name: str) -> None:
    """Every size that a refusal proposes is accepted."""
    refused = 0
    for ranks in range(1, 10):
        for micro in range(1, 26):
            try:
                make_order(name, ranks, micro)
            except OrderError as error:
                refused += 1
                for proposal in error.legal.split(" or "):
                    size = {"ranks": ranks, "micro": micro}
                    for part in proposal.split(" with "):
                        if part.endswith(" ranks"):
                            size["ranks"] = int(part.removesuffix(" ranks"))
                        else:
                            size["micro"] = int(part.removeprefix("micro="))
                    make_order(name, size["ranks"], size["micro"])
    assert refused > 20
