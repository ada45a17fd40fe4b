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

    def link(vector: Vector, seconds: float, micro: int) -> Vector:
        return stage(vector, StageOption(seconds, seconds), micro, 0) if seconds else vector

    return link


def _link_both_directions(vector: Vector, seconds: float, micro: int) -> Vector:
    first, ended, round_trip = vector
    return 2 * seconds + first, seconds + ended, 2 * seconds + round_trip


def _stage_slowest(vector: Vector, option: StageOption, micro: int, after: int) -> Vector:
    return (max(vector[0], option.seconds),)


def _stage_sum(vector: Vector, option: StageOption, micro: int, after: int) -> Vector:
    return vector[0] + option.seconds, max(vector[1], option.seconds)


def _stage_sum_and_sync(vector: Vector, option: StageOption, micro: int, after: int) -> Vector:
    return (*_stage_sum(vector[:2], option, micro, after), max(vector[2], option.sync))


def _stage_peak(vector: Vector, option: StageOption, micro: int, after: int) -> Vector:
    return (max(vector[0], option.held + min(after + 1, micro) * option.kept),)


def _stage_pivot(vector: Vector, option: StageOption, micro: int, after: int) -> Vector:
    """Return the longest paths that turn in one stage and stay there for the other microbatches."""
    first = max(micro * option.seconds, option.seconds + vector[0])
    return first, max(option.forward + vector[1], first + option.sync)


def _stage_rounds(vector: Vector, option: StageOption, micro: int, after: int) -> Vector:
    """Extend `_stage_pivot` by paths that go down and up all stages, then again from one stage."""
    first, ended, round_trip = vector
    round_trip += option.seconds
    stages_left = micro - 2 - after
    repeated = 2 * round_trip + stages_left * option.seconds if stages_left >= 0 else 0.0
    first = max(micro * option.seconds, option.seconds + first, repeated)
    return first, max(option.forward + ended, first + option.sync), round_trip


def _stage_phases(vector: Vector, option: StageOption, micro: int, after: int) -> Vector:
    """AdaPipe's phases of 1F1B: begin, end, and a microbatch of the steady phase."""
    begin, end, steady = vector
    return (
        option.forward + max(begin, after * option.forward),
        option.backward + max(end, after * option.backward),
        max(steady, option.seconds),
    )


# The slowest stage, or link: seconds of one microbatch in an endless run.  PipeDream (Narayanan et
# al., SOSP 2019), and Piper (Tarnawski et al., NeurIPS 2021), whose menus differ.
SLOWEST = Objective(
    "slowest", (0.0,), _stage_slowest, _link_as_stage(_stage_slowest), lambda known, micro: known[0]
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
    "peak", (0.0,), _stage_peak, lambda known, seconds, micro: known, lambda known, micro: known[0]
)

# Warm-up, steady phase and ending around a pivot stage, then the gradient reduction. DAPPLE (Fan et
# al., PPoPP 2021) chooses the pivot by a rule; here it is the stage that makes the step longest.
PIVOT = Objective(
    "pivot", (0.0, 0.0), _stage_pivot, _link_as_stage(_stage_pivot), lambda known, micro: known[1]
)

# The same with the rounds of 1F1B: a rank runs one forward for each backward, so that the second
# microbatch of a stage waits until the first returns from all later stages. From no paper. These
# are paths of 1F1B: a lower bound of its timeline, closer than PIVOT alone.
ROUNDS = Objective(
    "rounds", (0.0, 0.0, 0.0), _stage_rounds, _link_both_directions, lambda known, micro: known[1]
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
        """Return the options of a stage that fit in the memory of its devices."""
        options = self.menu(first, last, devices, after)
        if self.memory == math.inf:
            return iter(options)
        flight = self.in_flight_at(after)
        return (o for o in options if o.held + flight * o.kept <= self.memory)


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
    ends = [device * problem.units // stages for device in range(stages + 1)]
    vector = objective.empty
    for after in range(stages):
        first, last = ends[stages - after - 1], ends[stages - after]
        device = stages - after - 1
        option = next(problem.fitting_options(first, last, range(device, device + 1), after), None)
        if option is None or first == last:
            return math.inf
        seconds = problem.send(last, device + 1) if after else 0.0
        vector = objective.stage(objective.link(vector, seconds, micro), option, micro, after)
    return objective.total(vector, micro) * (1 + 1e-12)


def _minimize(
    problem: PartitionProblem, objective: Objective, limit: float, width: int | None
) -> StagePartition | None:
    max_stages = problem.stages or min(problem.units, problem.devices)
    ends: Ends = {(problem.units, problem.devices): [_End(objective.empty)]}
    best: _End | None = None

    def total(end: _End) -> float:
        return objective.total(end.known, problem.micro)

    for after in range(max_stages):
        ends = _add_stage(problem, objective, ends, after, limit, width)
        complete = ends.pop((0, 0), [])
        if complete and problem.stages in (None, after + 1):
            best = min(complete + ([best] if best else []), key=total)
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
    new_ends: Ends = {}
    micro = problem.micro
    remaining = problem.stages - after - 1 if problem.stages else None  # stages still to add
    for (last, end_at), tails in ends.items():
        seconds = problem.send(last, end_at) if after else 0.0
        vectors = [objective.link(tail.known, seconds, micro) for tail in tails]
        if min(objective.total(tail_vector, micro) for tail_vector in vectors) > limit:
            continue
        for first, device in _first_places(problem, last, end_at, remaining):
            for option in problem.fitting_options(first, last, range(device, end_at), after):
                for tail, tail_vector in zip(tails, vectors, strict=True):
                    vector = objective.stage(tail_vector, option, micro, after)
                    if objective.total(vector, micro) <= limit:
                        end = _End(vector, last - first, end_at - device, option, tail)
                        new_ends.setdefault((first, device), []).append(end)
    if problem.prefer_long_first:
        new_ends = {key: sorted(ends, key=lambda end: -end.units) for key, ends in new_ends.items()}
    return {key: _pareto_front(ends, objective, micro, width) for key, ends in new_ends.items()}


def _first_places(
    problem: PartitionProblem, last: int, end_device: int, remaining: int | None
) -> Iterator[tuple[int, int]]:
    """Yield (first unit, first device) of a stage, with `remaining` stages to add (None: any)."""
    for size in problem.sizes:
        first_device = end_device - size
        if remaining == 0:
            if first_device == 0:
                yield 0, 0
        elif first_device >= (remaining or 0):
            # the first stage has all remaining units and devices
            lowest = remaining if remaining else 1
            yield from ((first, first_device) for first in range(lowest, last) if first_device)
            if remaining is None and first_device == 0:
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
    current: _End | None = end
    while current is not None and current.way is not None:
        stages.append(current)
        current = current.rest
    options = tuple(stage.way for stage in stages if stage.way is not None)
    return StagePartition(
        value, tuple(s.units for s in stages), tuple(s.devices for s in stages), options
    )


def find_by_ceilings(problem: PartitionProblem) -> StagePartition | None:
    """Return the stages with the smallest `SUM` by Alpa's algorithm.

    Each possible time of a stage, in increasing order, is a ceiling for the slowest stage, under
    which the sum alone is minimized. Stops when the ceiling alone costs more than the best step.
    """
    added = Objective(
        "added",
        (0.0,),
        lambda known, option, micro, after: (known[0] + option.seconds,),
        lambda known, seconds, micro: (known[0] + seconds,),
        lambda known, micro: known[0],
    )
    best: StagePartition | None = None
    for ceiling in sorted(set(_stage_times(problem))):
        if best and (problem.micro - 1) * ceiling >= best.value:
            break

        def below(first: int, last: int, devices: range, after: int, limit: float = ceiling) -> Any:
            options = problem.menu(first, last, devices, after)
            return (option for option in options if option.seconds <= limit)

        partition = _minimize(replace(problem, menu=below), added, math.inf, 1)
        if partition:
            slowest = max(option.seconds for option in partition.options)
            value = partition.value + (problem.micro - 1) * slowest
            best = replace(partition, value=value) if not best or value < best.value else best
    return best


def _stage_times(problem: PartitionProblem) -> Iterator[float]:
    max_stages = problem.stages or min(problem.units, problem.devices)
    for last in range(1, problem.units + 1):
        for first in range(last):
            for size in problem.sizes:
                for device in range(problem.devices - size + 1):
                    for after in range(max_stages):
                        options = problem.menu(first, last, range(device, device + size), after)
                        yield from (option.seconds for option in options)
