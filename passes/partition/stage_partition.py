"""Partition of a chain of units into stages: one dynamic program for all objectives.

Published planners differ in their model of step time, and in the options of a stage. The first is
an `Objective` here, the second a menu: a function from units and devices to the options of a stage.
The program goes from the last unit to the first. For each (first unit, first device, number of
stages) it stores the Pareto front of the last stages of a pipeline, in the numbers that the
objective still reads. The result is optimal, since an objective never decreases when one of these
numbers grows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

Vector = tuple[float, ...]


@dataclass(frozen=True)
class StageOption:
    """An option to run the units of a stage: seconds of a microbatch, and bytes of one device.

    sync  seconds of the gradient reduction, once a step
    held  bytes without activations
    kept  bytes of activations of each microbatch in flight
    name  the choice, for readers of the result
    """

    forward: float
    backward: float
    sync: float = 0.0
    held: float = 0.0
    kept: float = 0.0
    name: Any = None

    @property
    def seconds(self) -> float:
        """Return the seconds of forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Objective:
    """A measure of a step that is minimized, computed from the last stage to the first.

    empty  the vector `known` of a pipeline without stages
    stage  (known, way, micro, after) -> `known` with one more stage in front of `after` stages
    link   (known, seconds, micro) -> `known` with a link in front; seconds in each direction
    total  (known, micro) -> the value to be minimized
    All three functions must not decrease when a number of `known` grows; otherwise the result may
    not be optimal.
    """

    name: str
    empty: Vector
    stage: Callable[[Vector, StageOption, int, int], Vector]
    link: Callable[[Vector, float, int], Vector]
    total: Callable[[Vector, int], float]


def _link_as_stage(
    stage: Callable[[Vector, StageOption, int, int], Vector],
) -> Callable[..., Vector]:
    """Return the function of a link that behaves like a stage: transfers overlap."""

    def link(known: Vector, seconds: float, micro: int) -> Vector:
        return stage(known, StageOption(seconds, seconds), micro, 0) if seconds else known

    return link


def _link_both_directions(known: Vector, seconds: float, micro: int) -> Vector:
    first, ended, below = known
    return 2 * seconds + first, seconds + ended, 2 * seconds + below


def _stage_slowest(known: Vector, way: StageOption, micro: int, after: int) -> Vector:
    return (max(known[0], way.seconds),)


def _stage_sum(known: Vector, way: StageOption, micro: int, after: int) -> Vector:
    return known[0] + way.seconds, max(known[1], way.seconds)


def _stage_sum_and_sync(known: Vector, way: StageOption, micro: int, after: int) -> Vector:
    return (*_stage_sum(known[:2], way, micro, after), max(known[2], way.sync))


def _stage_peak(known: Vector, way: StageOption, micro: int, after: int) -> Vector:
    return (max(known[0], way.held + min(after + 1, micro) * way.kept),)


def _stage_pivot(known: Vector, way: StageOption, micro: int, after: int) -> Vector:
    """Return the longest paths that turn in one stage and stay there for the other microbatches."""
    first = max(micro * way.seconds, way.seconds + known[0])
    return first, max(way.forward + known[1], first + way.sync)


def _stage_rounds(known: Vector, way: StageOption, micro: int, after: int) -> Vector:
    """Extend `_stage_pivot` by paths that go down and up all stages, then again from one stage."""
    first, ended, below = known
    below += way.seconds
    stays = micro - 2 - after
    again = 2 * below + stays * way.seconds if stays >= 0 else 0.0
    first = max(micro * way.seconds, way.seconds + first, again)
    return first, max(way.forward + ended, first + way.sync), below


def _stage_phases(known: Vector, way: StageOption, micro: int, after: int) -> Vector:
    """AdaPipe's phases of 1F1B: begin, end, and a microbatch of the steady phase."""
    begin, end, steady = known
    return (
        way.forward + max(begin, after * way.forward),
        way.backward + max(end, after * way.backward),
        max(steady, way.seconds),
    )


# The slowest stage, or link: seconds of one microbatch in an endless run.  PipeDream (Narayanan et
# al., SOSP 2019), and Piper (Tarnawski et al., NeurIPS 2021), whose menus differ.
SLOWEST = Objective(
    "slowest",
    (0.0,),
    _stage_slowest,
    _link_as_stage(_stage_slowest),
    lambda known, micro: known[0],
)

# All stages once, and the slowest for each further microbatch.  Alpa (Zheng et al., OSDI 2022),
# AMP (Li et al., NeurIPS 2022) with links in the first sum and the second maximum.
SUM = Objective(
    "sum",
    (0.0, 0.0),
    _stage_sum,
    _link_as_stage(_stage_sum),
    lambda known, micro: known[0] + (micro - 1) * known[1],
)

# The same, and the longest gradient reduction after it.
SUM_AND_SYNC = Objective(
    "sum and sync",
    (0.0, 0.0, 0.0),
    _stage_sum_and_sync,
    lambda known, seconds, micro: (*SUM.link(known[:2], seconds, micro), known[2]),
    lambda known, micro: SUM.total(known[:2], micro) + known[2],
)

# Bytes of the fullest device under 1F1B: the only objective of mCAP.
PEAK = Objective(
    "peak",
    (0.0,),
    _stage_peak,
    lambda known, seconds, micro: known,
    lambda known, micro: known[0],
)

# Warm-up, steady phase and ending around a pivot stage, then the gradient reduction. DAPPLE (Fan et
# al., PPoPP 2021) chooses the pivot by a rule; here it is the stage that makes the step longest.
PIVOT = Objective(
    "pivot",
    (0.0, 0.0),
    _stage_pivot,
    _link_as_stage(_stage_pivot),
    lambda known, micro: known[1],
)

# The same with the rounds of 1F1B: a rank runs one forward for each backward, so that the second
# microbatch of a stage waits until the first returns from all later stages. From no paper. These
# are paths of 1F1B: a lower bound of its timeline, closer than PIVOT alone.
ROUNDS = Objective(
    "rounds",
    (0.0, 0.0, 0.0),
    _stage_rounds,
    _link_both_directions,
    lambda known, micro: known[1],
)

# AdaPipe (Sun et al., ASPLOS 2024).
PHASES = Objective(
    "phases",
    (0.0, 0.0, 0.0),
    _stage_phases,
    lambda known, seconds, micro: (known[0] + seconds, known[1] + seconds, known[2]),
    lambda known, micro: known[0] + known[1] + max(0, micro - 1) * known[2],
)

OBJECTIVES = {each.name: each for each in (SLOWEST, SUM, SUM_AND_SYNC, PIVOT, ROUNDS, PHASES, PEAK)}

# (first unit, unit after the last, devices, number of later stages) -> options
Menu = Callable[[int, int, range, int], Iterable[StageOption]]


@dataclass(frozen=True)
class PartitionProblem:
    """A chain of units to be split into stages.

    units              number of units of the chain
    menu               the options of a stage, see `Menu`
    micro              microbatches of a step
    devices            number of devices in a row; each stage gets the next ones
    sizes              numbers of devices that a stage may have
    stages             number of stages; None: any number
    prefer_long_first  of equal results, prefer the one whose first stage has the most units
    send               (unit, device) -> seconds of a message to the stage that begins there
    memory             bytes of a device
    flight             number of later stages -> microbatches in flight in a stage
    """

    units: int
    menu: Menu
    micro: int = 1
    devices: int = 1
    sizes: Sequence[int] = (1,)
    stages: int | None = None
    send: Callable[[int, int], float] = lambda unit, device: 0.0
    memory: float = math.inf
    flight: Callable[[int], float] | None = None
    prefer_long_first: bool = False

    def in_flight_at(self, after: int) -> float:
        """Return the microbatches in flight in a stage with `after` later stages."""
        return self.flight(after) if self.flight else min(after + 1, self.micro)

    def fitting_options(
        self, first: int, last: int, devices: range, after: int
    ) -> Iterator[StageOption]:
        """Yield the options of a stage that fit in the memory of its devices."""
        flight = self.in_flight_at(after)
        for way in self.menu(first, last, devices, after):
            if way.held + flight * way.kept <= self.memory:
                yield way


@dataclass(frozen=True)
class StagePartition:
    """The stages found, first to last: numbers of units and devices, and options."""

    value: float
    units: tuple[int, ...]
    devices: tuple[int, ...]
    options: tuple[StageOption, ...]


@dataclass(frozen=True, slots=True)
class _End:
    """The last stages of a pipeline: a stage of `units` and the stages after it (`rest`)."""

    known: Vector
    units: int = 0
    devices: int = 0
    way: StageOption | None = None
    rest: _End | None = None


Ends = dict[tuple[int, int], list[_End]]  # by first unit and first device


def find_partition(problem: PartitionProblem, objective: Objective) -> StagePartition | None:
    """Return the stages with the smallest value; None where no stages fit in memory.

    All devices are used. A first pass, which stores one end per state, gives a bound for the pass
    that stores the full fronts.
    """
    quick = _minimize(problem, objective, _even_value(problem, objective), 1)
    if len(objective.empty) == 1:
        return quick
    return _minimize(problem, objective, quick.value if quick else math.inf, None) or quick


def _even_value(problem: PartitionProblem, objective: Objective) -> float:
    """Return the value of stages with equal numbers of units, a bound; infinite if impossible."""
    stages, micro = problem.stages, problem.micro
    if stages is None or stages != problem.devices or 1 not in problem.sizes:
        return math.inf
    ends = [at * problem.units // stages for at in range(stages + 1)]
    known = objective.empty
    for after in range(stages):
        first, last = ends[stages - after - 1], ends[stages - after]
        at = stages - after - 1
        way = next(problem.fitting_options(first, last, range(at, at + 1), after), None)
        if way is None or first == last:
            return math.inf
        seconds = problem.send(last, at + 1) if after else 0.0
        known = objective.stage(objective.link(known, seconds, micro), way, micro, after)
    return objective.total(known, micro) * (1 + 1e-12)


def _minimize(
    problem: PartitionProblem, objective: Objective, limit: float, width: int | None
) -> StagePartition | None:
    most = problem.stages or min(problem.units, problem.devices)
    ends: Ends = {(problem.units, problem.devices): [_End(objective.empty)]}
    best: _End | None = None

    def total(end: _End) -> float:
        return objective.total(end.known, problem.micro)

    for after in range(most):
        ends = _add_stage(problem, objective, ends, after, limit, width)
        whole = ends.pop((0, 0), [])
        if whole and problem.stages in (None, after + 1):
            best = min(whole + ([best] if best else []), key=total)
            limit = min(limit, total(best))
    return _cut_of(total(best), best) if best else None


def _add_stage(
    problem: PartitionProblem,
    objective: Objective,
    ends: Ends,
    after: int,
    limit: float,
    width: int | None,
) -> Ends:
    """Return the ends with one more stage, without ends that another end dominates."""
    found: Ends = {}
    micro = problem.micro
    remaining = problem.stages - after - 1 if problem.stages else None  # stages still to add
    for (last, behind), tails in ends.items():
        seconds = problem.send(last, behind) if after else 0.0
        known = [objective.link(tail.known, seconds, micro) for tail in tails]
        if min(objective.total(before, micro) for before in known) > limit:
            continue
        for first, at in _first_places(problem, last, behind, remaining):
            for way in problem.fitting_options(first, last, range(at, behind), after):
                for tail, before in zip(tails, known, strict=True):
                    vector = objective.stage(before, way, micro, after)
                    if objective.total(vector, micro) <= limit:
                        end = _End(vector, last - first, behind - at, way, tail)
                        found.setdefault((first, at), []).append(end)
    if problem.prefer_long_first:
        found = {key: sorted(ends, key=lambda end: -end.units) for key, ends in found.items()}
    return {key: _pareto_front(ends, objective, micro, width) for key, ends in found.items()}


def _first_places(
    problem: PartitionProblem, last: int, behind: int, remaining: int | None
) -> Iterator[tuple[int, int]]:
    """Yield (first unit, first device) of a stage, with `remaining` stages to add (None: any)."""
    for size in problem.sizes:
        at = behind - size
        if remaining == 0:
            if at == 0:
                yield 0, 0
        elif at >= (remaining or 0):
            # the first stage has all remaining units and devices
            lowest = remaining if remaining else 1
            yield from ((first, at) for first in range(lowest, last) if at)
            if remaining is None and at == 0:
                yield 0, 0


def _pareto_front(
    ends: list[_End], objective: Objective, micro: int, width: int | None
) -> list[_End]:
    if width:
        return sorted(ends, key=lambda end: objective.total(end.known, micro))[:width]
    front: list[_End] = []
    for end in sorted(ends, key=lambda end: end.known):
        if not any(all(a <= b for a, b in zip(f.known, end.known, strict=True)) for f in front):
            front.append(end)
    return front


def _cut_of(value: float, end: _End) -> StagePartition:
    stages: list[_End] = []
    at: _End | None = end
    while at is not None and at.way is not None:
        stages.append(at)
        at = at.rest
    ways = tuple(each.way for each in stages if each.way is not None)
    return StagePartition(
        value, tuple(s.units for s in stages), tuple(s.devices for s in stages), ways
    )


def find_by_ceilings(problem: PartitionProblem) -> StagePartition | None:
    """Return the stages with the smallest `SUM` by Alpa's algorithm.

    Each possible time of a stage, in increasing order, is a ceiling for the slowest stage, under
    which the sum alone is minimized. Stops when the ceiling alone costs more than the best step.
    """
    added = Objective(
        "added",
        (0.0,),
        lambda known, way, micro, after: (known[0] + way.seconds,),
        lambda known, seconds, micro: (known[0] + seconds,),
        lambda known, micro: known[0],
    )
    best: StagePartition | None = None
    for ceiling in sorted(set(_stage_times(problem))):
        if best and (problem.micro - 1) * ceiling >= best.value:
            break

        def below(first: int, last: int, devices: range, after: int, most: float = ceiling) -> Any:
            ways = problem.menu(first, last, devices, after)
            return (way for way in ways if way.seconds <= most)

        found = _minimize(replace(problem, menu=below), added, math.inf, 1)
        if found:
            slowest = max(way.seconds for way in found.options)
            value = found.value + (problem.micro - 1) * slowest
            best = replace(found, value=value) if not best or value < best.value else best
    return best


def _stage_times(problem: PartitionProblem) -> Iterator[float]:
    most = problem.stages or min(problem.units, problem.devices)
    for last in range(1, problem.units + 1):
        for first in range(last):
            for size in problem.sizes:
                for at in range(problem.devices - size + 1):
                    for after in range(most):
                        ways = problem.menu(first, last, range(at, at + size), after)
                        yield from (way.seconds for way in ways)
