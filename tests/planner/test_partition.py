"""Stages cut by one programme equal brute force under every objective."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlang.passes.partition.stage_partition import (
    OBJECTIVES,
    PHASES,
    PIVOT,
    ROUNDS,
    SLOWEST,
    SUM,
    Menu,
    Objective,
    PartitionProblem,
    StageOption,
    StagePartition,
    find_by_ceilings,
    find_partition,
)
from schedlang.pipeline.schedules import make_order
from schedlang.pipeline.timeline.simulation import simulate_timeline
from schedlang.pipeline.timeline.table import Kind

TIMES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8)


def partition_units(
    times: Sequence[tuple[float, float]],
    stages: int,
    micro: int,
    objective: Objective = PIVOT,
    *,
    kept: Sequence[float] = (),
    memory: float = math.inf,
) -> tuple[int, ...] | None:
    """The number of units of each stage of a chain, where each stage has one device and one way;
    `kept` are the bytes of activations of each unit."""
    forward, backward = ([0.0, *accumulate(side)] for side in zip(*times, strict=True))
    saved = [0.0, *accumulate(kept or [0.0] * len(times))]

    def menu(first: int, last: int, devices: range, after: int) -> Iterator[StageOption]:
        sides = (side[last] - side[first] for side in (forward, backward))
        yield StageOption(*sides, kept=saved[last] - saved[first])

    problem = PartitionProblem(
        len(times), menu, micro, devices=stages, stages=stages, memory=memory
    )
    found = find_partition(problem, objective)
    return found.units if found else None


def parts(total: int, count: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a sum of so many, each of one at least."""
    for bars in combinations(range(1, total), count - 1):
        yield tuple(b - a for a, b in zip((0, *bars), (*bars, total), strict=True))


def value(
    problem: PartitionProblem,
    objective: Objective,
    units: tuple[int, ...],
    devices: tuple[int, ...],
) -> float:
    """The least value of these stages, over all ways of each."""
    ends, at = [0], [0]
    for size, count in zip(units, devices, strict=True):
        ends.append(ends[-1] + size)
        at.append(at[-1] + count)
    stages = len(units)
    menus = [
        list(problem.fitting_options(ends[s], ends[s + 1], range(at[s], at[s + 1]), stages - 1 - s))
        for s in range(stages)
    ]
    best = math.inf
    for ways in product(*menus):
        known = objective.empty
        for stage in reversed(range(stages)):
            if stage + 1 < stages:
                send = problem.send(ends[stage + 1], at[stage + 1])
                known = objective.link(known, send, problem.micro)
            known = objective.stage(known, ways[stage], problem.micro, stages - 1 - stage)
        best = min(best, objective.total(known, problem.micro))
    return best


def forced(problem: PartitionProblem, objective: Objective) -> float:
    """The least value of all stages, one after the other."""
    most = min(problem.units, problem.devices)
    counts = (problem.stages,) if problem.stages else range(1, most + 1)
    return min(
        value(problem, objective, units, devices)
        for count in counts
        for units in parts(problem.units, count)
        for devices in parts(problem.devices, count)
        if set(devices) <= set(problem.sizes)
    )


@st.composite
def problems(draw: st.DrawFn) -> PartitionProblem:
    """Chains whose stages may take several devices, and may be computed again."""
    times = draw(TIMES)
    count = len(times)
    devices = draw(st.integers(1, 4))
    held, kept = (draw(st.lists(st.integers(0, 4), min_size=count, max_size=count)) for _ in "hk")
    handed = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    memory = draw(st.sampled_from([math.inf, 40, 20, 10]))
    menus = draw(st.booleans())

    def menu(first: int, last: int, some: range, after: int) -> Iterator[StageOption]:
        ahead, back = (sum(side[first:last]) for side in zip(*times, strict=True))
        state, acts, size = sum(held[first:last]), sum(kept[first:last]), len(some)
        sync = state * (size - 1) / size
        yield StageOption(ahead / size, back / size, sync, state, acts / size)
        if menus:
            yield StageOption(ahead / size, (ahead + back) / size, sync, state, kept[first] / size)

    sizes = draw(st.sampled_from([(1,), (1, 2), (1, 2, 3, 4)]))
    return PartitionProblem(
        count,
        menu,
        draw(st.integers(1, 6)),
        devices,
        sizes,
        send=lambda unit, device: handed[unit - 1],
        memory=memory,
    )


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=lambda one: one.name)
@given(problem=problems())
@settings(max_examples=60)
def test_least_value_is_that_of_brute_force(
    objective: Objective, problem: PartitionProblem
) -> None:
    """Every objective, with several devices, choices, links and memory: equal to enumeration."""
    try:
        best = forced(problem, objective)
    except ValueError:
        best = math.inf  # the devices cannot be dealt to the units
    found = find_partition(problem, objective)
    if not math.isfinite(best):
        assert found is None
        return
    assert found is not None
    assert found.value == pytest.approx(best)
    assert sum(found.units) == problem.units and sum(found.devices) == problem.devices
    assert value(problem, objective, found.units, found.devices) == pytest.approx(best)


@given(problem=problems())
@settings(max_examples=40)
def test_ceilings_on_the_slowest_stage_find_what_one_pass_finds(problem: PartitionProblem) -> None:
    """Alpa's enumeration of the slowest stage equals the programme on sum and maximum."""
    links = PartitionProblem(**{**vars(problem), "send": lambda unit, device: 0.0})
    one, other = find_partition(links, SUM), find_by_ceilings(links)
    assert (one and pytest.approx(one.value)) == (other and other.value)


@given(times=TIMES, stages=st.integers(1, 4), micro=st.integers(1, 5))
@settings(max_examples=60)
def test_a_pivot_is_below_the_timeline_and_at_it_for_even_stages(
    times: list[tuple[int, int]], stages: int, micro: int
) -> None:
    """A pivot is a way through 1F1B: never longer than what is played."""
    stages = min(stages, len(times))
    units = partition_units(times, stages, micro)
    assert units is not None
    took = _played("1F1B", times, units, micro)
    assert _of(PIVOT, times, units, micro) <= _of(ROUNDS, times, units, micro) <= took + 1e-9
    even = [(1, 2)] * stages
    assert _of(PIVOT, even, (1,) * stages, micro) == _played("1F1B", even, (1,) * stages, micro)


def _of(
    objective: Objective, times: list[tuple[int, int]], units: tuple[int, ...], micro: int
) -> float:
    known, at = objective.empty, len(times)
    for after, size in enumerate(reversed(units)):
        some = times[at - size : at]
        known = objective.stage(
            known, StageOption(*map(sum, zip(*some, strict=True))), micro, after
        )
        at -= size
    return objective.total(known, micro)


def _played(
    name: str, times: list[tuple[int, int]], units: tuple[int, ...], micro: int, chunks: int = 1
) -> float:
    line = make_order(name, len(units) // chunks, micro, chunks)
    at, rows = 0, []
    for size in units:
        rows.append([sum(s) for s in zip(*times[at : at + size], strict=True)])
        at += size
    share = {Kind.F: (1, 0), Kind.B: (0, 1), Kind.I: (0, 0.5), Kind.W: (0, 0.5)}
    took = [
        float(sum(a * b for a, b in zip(share[Kind(k)], rows[s], strict=True)))
        for k, s in zip(line.kind.tolist(), line.stage.tolist(), strict=True)
    ]
    return float(simulate_timeline(line, np.array(took)).makespan)


def test_phases_by_hand() -> None:
    """Even stages take (m + p - 1) (f + b); a slow first stage begins with all its forwards."""
    assert _value(PHASES, [(1.0, 2.0)] * 4, 8) == (8 + 4 - 1) * 3.0
    # begin 5 + 2 * 5, end 1 + 2 * 1 beside 1 + 1 + 1, steady 6
    assert _value(PHASES, [(5.0, 1.0), (1.0, 1.0), (1.0, 1.0)], 4) == 15 + 3 + 3 * 6


def _value(objective: Objective, stages: list[tuple[float, float]], micro: int) -> float:
    known = objective.empty
    for after, (forward, backward) in enumerate(reversed(stages)):
        known = objective.stage(known, StageOption(forward, backward), micro, after)
    return objective.total(known, micro)


def _table(costs: dict[tuple[int, int, int], float]) -> Menu:
    """A menu of first unit, last unit and number of devices; all else is dear."""

    def menu(first: int, last: int, some: range, after: int) -> list[StageOption]:
        return [StageOption(costs.get((first, last, len(some)), 100.0), 0.0)]

    return menu


def test_ends_that_are_neither_shortest_nor_slowest_are_kept() -> None:
    """Of three ends, the one in between is best: less in sum than one, less slow than another."""
    costs = {(0, 1, 1): 6.5, (1, 2, 1): 0.5, (2, 4, 2): 7.5, (1, 3, 2): 2.5, (3, 4, 1): 6.5}
    costs |= {(1, 2, 2): 5.0, (2, 4, 1): 5.0}
    found = find_partition(PartitionProblem(4, _table(costs), 5, 4, (1, 2), 3), SUM)
    assert found is not None and found.value == 15.5 + 4 * 6.5
    assert found.units == (1, 2, 1) and found.devices == (1, 2, 1)


def test_ceilings_go_on_after_the_first_that_can_be_kept() -> None:
    """One stage on two devices takes longer than each of two, and less than both."""
    menu = _table({(0, 1, 1): 5.0, (1, 2, 1): 5.0, (0, 2, 2): 8.0})
    for micro, best in ((1, 8.0), (2, 15.0)):
        found = find_by_ceilings(PartitionProblem(2, menu, micro, 2, (1, 2)))
        assert found is not None and found.value == best


def test_first_stages_keep_more_microbatches_and_get_fewer_units() -> None:
    """Memory of a stage counts the microbatches in flight at its place."""
    times = [(1.0, 2.0)] * 8
    even = partition_units(times, 4, 8, SLOWEST, kept=[1.0] * 8, memory=8)
    assert even == (2, 2, 2, 2)
    uneven = partition_units(times, 4, 8, SLOWEST, kept=[1.0] * 8, memory=6)
    assert uneven is not None and uneven[0] == 1
    assert all(u * (4 - at) <= 6 for at, u in enumerate(uneven))
    assert partition_units(times, 4, 8, SLOWEST, kept=[1.0] * 8, memory=3) is None


def test_a_result_tells_units_devices_and_ways() -> None:
    """A cut tells units, devices and the ways of its stages."""

    def menu(first: int, last: int, some: range, after: int) -> Iterator[StageOption]:
        yield StageOption(float(last - first) / len(some), 0.0, name=(first, last))

    found = find_partition(PartitionProblem(6, menu, devices=3, sizes=(1, 2)), SLOWEST)
    assert isinstance(found, StagePartition)
    assert found.value == 2.0
    assert sorted(zip(found.devices, found.units, strict=True)) in ([(1, 2)] * 3, [(1, 2), (2, 4)])
    assert found.options[0].name == (0, found.units[0])
