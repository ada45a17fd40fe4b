"""Pipeline partition by dynamic programming: equal to brute force under every objective."""

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
    """Return the number of units per stage of a chain, with one device and one option per stage;
    `kept` are the activation bytes of each unit."""
    forward, backward = ([0.0, *accumulate(side)] for side in zip(*times, strict=True))
    saved = [0.0, *accumulate(kept or [0.0] * len(times))]

    def menu(begin: int, end: int, devices: range, after: int) -> Iterator[StageOption]:
        sides = (side[end] - side[begin] for side in (forward, backward))
        yield StageOption(*sides, kept=saved[end] - saved[begin])

    problem = PartitionProblem(
        len(times), menu, micro, devices=stages, stages=stages, memory=memory
    )
    partition = find_partition(problem, objective)
    return partition.units if partition else None


def compositions(total: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to write `total` as an ordered sum of `count` positive integers."""
    for bars in combinations(range(1, total), count - 1):
        yield tuple(b - a for a, b in zip((0, *bars), (*bars, total), strict=True))


def least_value(
    problem: PartitionProblem,
    objective: Objective,
    units: tuple[int, ...],
    devices: tuple[int, ...],
) -> float:
    """Return the least value of given stages over all of their options."""
    ends, device_ends = [0], [0]
    for size, count in zip(units, devices, strict=True):
        ends.append(ends[-1] + size)
        device_ends.append(device_ends[-1] + count)
    stages = len(units)
    menus = [
        list(
            problem.fitting_options(
                ends[s], ends[s + 1], range(device_ends[s], device_ends[s + 1]), stages - 1 - s
            )
        )
        for s in range(stages)
    ]
    best = math.inf
    for ways in product(*menus):
        state = objective.empty
        for stage in reversed(range(stages)):
            if stage + 1 < stages:
                send = problem.send(ends[stage + 1], device_ends[stage + 1])
                state = objective.link(state, send, problem.micro)
            state = objective.stage(state, ways[stage], problem.micro, stages - 1 - stage)
        best = min(best, objective.total(state, problem.micro))
    return best


def brute_force(problem: PartitionProblem, objective: Objective) -> float:
    """Return the least value over all partitions, by enumeration."""
    max_stages = min(problem.units, problem.devices)
    counts = (problem.stages,) if problem.stages else range(1, max_stages + 1)
    return min(
        least_value(problem, objective, units, devices)
        for count in counts
        for units in compositions(problem.units, count)
        for devices in compositions(problem.devices, count)
        if set(devices) <= set(problem.sizes)
    )


@st.composite
def problems(draw: st.DrawFn) -> PartitionProblem:
    """Random chains whose stages may take several devices and may be recomputed."""
    times = draw(TIMES)
    count = len(times)
    devices = draw(st.integers(1, 4))
    state_sizes, act_sizes = (
        draw(st.lists(st.integers(0, 4), min_size=count, max_size=count)) for _ in "hk"
    )
    sent_sizes = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    memory = draw(st.sampled_from([math.inf, 40, 20, 10]))
    menus = draw(st.booleans())

    def menu(begin: int, end: int, device_range: range, after: int) -> Iterator[StageOption]:
        forward, backward = (sum(side[begin:end]) for side in zip(*times, strict=True))
        state, acts, size = (
            sum(state_sizes[begin:end]),
            sum(act_sizes[begin:end]),
            len(device_range),
        )
        sync = state * (size - 1) / size
        yield StageOption(forward / size, backward / size, sync, state, acts / size)
        if menus:
            yield StageOption(
                forward / size, (forward + backward) / size, sync, state, act_sizes[begin] / size
            )

    sizes = draw(st.sampled_from([(1,), (1, 2), (1, 2, 3, 4)]))
    return PartitionProblem(
        count,
        menu,
        draw(st.integers(1, 6)),
        devices,
        sizes,
        send=lambda unit, device: sent_sizes[unit - 1],
        memory=memory,
    )


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=lambda one: one.name)
@given(problem=problems())
@settings(max_examples=60)
def test_least_value_is_that_of_brute_force(
    objective: Objective, problem: PartitionProblem
) -> None:
    """Each objective equals enumeration, with devices, options, links and memory."""
    try:
        best = brute_force(problem, objective)
    except ValueError:
        best = math.inf  # the devices cannot be assigned to the units
    partition = find_partition(problem, objective)
    if not math.isfinite(best):
        assert partition is None
        return
    assert partition is not None
    assert partition.value == pytest.approx(best)
    assert sum(partition.units) == problem.units and sum(partition.devices) == problem.devices
    assert least_value(problem, objective, partition.units, partition.devices) == pytest.approx(
        best
    )


@given(problem=problems())
@settings(max_examples=40)
def test_ceilings_on_the_slowest_stage_find_what_one_pass_finds(problem: PartitionProblem) -> None:
    """Alpa's enumeration of the slowest stage equals the programme on sum and maximum."""
    links = PartitionProblem(**{**vars(problem), "send": lambda unit, device: 0.0})
    one_pass, by_ceilings = find_partition(links, SUM), find_by_ceilings(links)
    assert (one_pass and pytest.approx(one_pass.value)) == (by_ceilings and by_ceilings.value)


@given(times=TIMES, stages=st.integers(1, 4), micro=st.integers(1, 5))
@settings(max_examples=60)
def test_a_pivot_is_below_the_timeline_and_at_it_for_even_stages(
    times: list[tuple[int, int]], stages: int, micro: int
) -> None:
    """A pivot is a path through 1F1B: never longer than the simulated step."""
    stages = min(stages, len(times))
    units = partition_units(times, stages, micro)
    assert units is not None
    makespan = _simulated_time("1F1B", times, units, micro)
    assert (
        _objective_value(PIVOT, times, units, micro)
        <= _objective_value(ROUNDS, times, units, micro)
        <= makespan + 1e-9
    )
    even = [(1, 2)] * stages
    assert _objective_value(PIVOT, even, (1,) * stages, micro) == _simulated_time(
        "1F1B", even, (1,) * stages, micro
    )


def _objective_value(
    objective: Objective, times: list[tuple[int, int]], units: tuple[int, ...], micro: int
) -> float:
    state, end = objective.empty, len(times)
    for after, size in enumerate(reversed(units)):
        stage_times = times[end - size : end]
        state = objective.stage(
            state, StageOption(*map(sum, zip(*stage_times, strict=True))), micro, after
        )
        end -= size
    return objective.total(state, micro)


def _simulated_time(
    name: str, times: list[tuple[int, int]], units: tuple[int, ...], micro: int, chunks: int = 1
) -> float:
    line = make_order(name, len(units) // chunks, micro, chunks)
    begin, rows = 0, []
    for size in units:
        rows.append([sum(s) for s in zip(*times[begin : begin + size], strict=True)])
        begin += size
    share = {Kind.F: (1, 0), Kind.B: (0, 1), Kind.I: (0, 0.5), Kind.W: (0, 0.5)}
    durations = [
        float(sum(a * b for a, b in zip(share[Kind(k)], rows[s], strict=True)))
        for k, s in zip(line.kind.tolist(), line.stage.tolist(), strict=True)
    ]
    return float(simulate_timeline(line, np.array(durations)).makespan)


def test_phases_by_hand() -> None:
    """Even stages take (m + p - 1) (f + b); a slow first stage starts with all its forwards."""
    assert _stages_value(PHASES, [(1.0, 2.0)] * 4, 8) == (8 + 4 - 1) * 3.0
    # begin 5 + 2 * 5, end 1 + 2 * 1 beside 1 + 1 + 1, steady 6
    assert _stages_value(PHASES, [(5.0, 1.0), (1.0, 1.0), (1.0, 1.0)], 4) == 15 + 3 + 3 * 6


def _stages_value(objective: Objective, stages: list[tuple[float, float]], micro: int) -> float:
    state = objective.empty
    for after, (forward, backward) in enumerate(reversed(stages)):
        state = objective.stage(state, StageOption(forward, backward), micro, after)
    return objective.total(state, micro)


def _menu_of(costs: dict[tuple[int, int, int], float]) -> Menu:
    """Return a menu with given costs by (first unit, end, devices); all others are expensive."""

    def menu(begin: int, end: int, device_range: range, after: int) -> list[StageOption]:
        return [StageOption(costs.get((begin, end, len(device_range)), 100.0), 0.0)]

    return menu


def test_ends_that_are_neither_shortest_nor_slowest_are_kept() -> None:
    """The middle of three options is best: smaller sum than one, smaller maximum than another."""
    costs = {(0, 1, 1): 6.5, (1, 2, 1): 0.5, (2, 4, 2): 7.5, (1, 3, 2): 2.5, (3, 4, 1): 6.5}
    costs |= {(1, 2, 2): 5.0, (2, 4, 1): 5.0}
    partition = find_partition(PartitionProblem(4, _menu_of(costs), 5, 4, (1, 2), 3), SUM)
    assert partition is not None and partition.value == 15.5 + 4 * 6.5
    assert partition.units == (1, 2, 1) and partition.devices == (1, 2, 1)


def test_ceilings_go_on_after_the_first_that_can_be_kept() -> None:
    """One stage on two devices takes longer than either of two stages, and less than their sum."""
    menu = _menu_of({(0, 1, 1): 5.0, (1, 2, 1): 5.0, (0, 2, 2): 8.0})
    for micro, best in ((1, 8.0), (2, 15.0)):
        partition = find_by_ceilings(PartitionProblem(2, menu, micro, 2, (1, 2)))
        assert partition is not None and partition.value == best


def test_first_stages_keep_more_microbatches_and_get_fewer_units() -> None:
    """Memory of a stage counts the microbatches in flight there."""
    times = [(1.0, 2.0)] * 8
    even = partition_units(times, 4, 8, SLOWEST, kept=[1.0] * 8, memory=8)
    assert even == (2, 2, 2, 2)
    uneven = partition_units(times, 4, 8, SLOWEST, kept=[1.0] * 8, memory=6)
    assert uneven is not None and uneven[0] == 1
    assert all(u * (4 - stage) <= 6 for stage, u in enumerate(uneven))
    assert partition_units(times, 4, 8, SLOWEST, kept=[1.0] * 8, memory=3) is None


def test_a_result_tells_units_devices_and_ways() -> None:
    """A partition has units, devices and options of its stages."""

    def menu(begin: int, end: int, device_range: range, after: int) -> Iterator[StageOption]:
        yield StageOption(float(end - begin) / len(device_range), 0.0, name=(begin, end))

    partition = find_partition(PartitionProblem(6, menu, devices=3, sizes=(1, 2)), SLOWEST)
    assert isinstance(partition, StagePartition)
    assert partition.value == 2.0
    assert sorted(zip(partition.devices, partition.units, strict=True)) in (
        [(1, 2)] * 3,
        [(1, 2), (2, 4)],
    )
    assert partition.options[0].name == (0, partition.units[0])
