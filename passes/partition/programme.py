"""Stages cut from a chain of units: one dynamic programme, whose objective is a value.

Planners that cut models differ in what they take a step to last, and in what a stage may choose
from.  The first is an `Objective` here, the second a menu: a function from units and devices to the
ways in which a stage may run them.  The programme goes from the last unit to the first, and keeps
for each (first unit, first device, number of stages) those ends of a pipeline that no other beats
in all that the objective still reads of it.  What it finds is optimal for the objective, since
every objective grows with each of these numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

Vector = tuple[float, ...]


@dataclass(frozen=True)
class Way:
    """One way to run the units of a stage: seconds of a microbatch, and bytes of one device.

    sync  seconds in which gradients meet, once a step
    held  bytes without activations; `kept` bytes of the activations of each microbatch in flight
    name  what was chosen, for whoever reads the result
    """

    forward: float
    backward: float
    sync: float = 0.0
    held: float = 0.0
    kept: float = 0.0
    name: Any = None

    @property
    def both(self) -> float:
        """Seconds of forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Objective:
    """Measure of a step, told from the last stage to the first.

    empty  what is known of a pipeline without stages
    stage  (known, way, micro, after) with one stage more in front of `after` others
    link   (known, seconds, micro) with a link in front, which takes so long each way
    total  (known, micro) the value that is to be least
    All three grow, or stay, with each number of `known`, else what is found need not be the least.
    """

    name: str
    empty: Vector
    stage: Callable[[Vector, Way, int, int], Vector]
    link: Callable[[Vector, float, int], Vector]
    total: Callable[[Vector, int], float]


def _as_stage(stage: Callable[[Vector, Way, int, int], Vector]) -> Callable[..., Vector]:
    """A link that works as a stage does: messages of other microbatches pass meanwhile."""

    def link(known: Vector, seconds: float, micro: int) -> Vector:
        return stage(known, Way(seconds, seconds), micro, 0) if seconds else known

    return link


def _sent_both_ways(known: Vector, seconds: float, micro: int) -> Vector:
    first, ended, below = known
    return 2 * seconds + first, seconds + ended, 2 * seconds + below


def _slowest(known: Vector, way: Way, micro: int, after: int) -> Vector:
    return (max(known[0], way.both),)


def _added(known: Vector, way: Way, micro: int, after: int) -> Vector:
    return known[0] + way.both, max(known[1], way.both)


def _added_and_synced(known: Vector, way: Way, micro: int, after: int) -> Vector:
    return (*_added(known[:2], way, micro, after), max(known[2], way.sync))


def _fullest(known: Vector, way: Way, micro: int, after: int) -> Vector:
    return (max(known[0], way.held + min(after + 1, micro) * way.kept),)


def _through(known: Vector, way: Way, micro: int, after: int) -> Vector:
    """Longest ways through the pipeline, that turn in one stage and stay there for the rest."""
    first = max(micro * way.both, way.both + known[0])
    return first, max(way.forward + known[1], first + way.sync)


def _rounds(known: Vector, way: Way, micro: int, after: int) -> Vector:
    """The same, and ways that go down and up all stages, then once more from one that stays."""
    first, ended, below = known
    below += way.both
    stays = micro - 2 - after
    again = 2 * below + stays * way.both if stays >= 0 else 0.0
    first = max(micro * way.both, way.both + first, again)
    return first, max(way.forward + ended, first + way.sync), below


def _phases(known: Vector, way: Way, micro: int, after: int) -> Vector:
    """AdaPipe's phases of 1F1B: begin, end, and a microbatch of the steady phase."""
    begin, end, steady = known
    return (
        way.forward + max(begin, after * way.forward),
        way.backward + max(end, after * way.backward),
        max(steady, way.both),
    )


# The slowest stage, or link: seconds of one microbatch in an endless run.  PipeDream (Narayanan et
# al., SOSP 2019), and Piper (Tarnawski et al., NeurIPS 2021), whose menus differ.
SLOWEST = Objective(
    "slowest",
    (0.0,),
    _slowest,
    _as_stage(_slowest),
    lambda known, micro: known[0],
)

# All stages once, and the slowest for each further microbatch.  Alpa (Zheng et al., OSDI 2022),
# AMP (Li et al., NeurIPS 2022) with links in the first sum and the second maximum.
SUM = Objective(
    "sum",
    (0.0, 0.0),
    _added,
    _as_stage(_added),
    lambda known, micro: known[0] + (micro - 1) * known[1],
)

# The same, and the longest sum of gradients behind it.
SUM_AND_SYNC = Objective(
    "sum and sync",
    (0.0, 0.0, 0.0),
    _added_and_synced,
    lambda known, seconds, micro: (*SUM.link(known[:2], seconds, micro), known[2]),
    lambda known, micro: SUM.total(known[:2], micro) + known[2],
)

# Bytes of the fullest device under 1F1B: mCAP, which cares for nothing else.
PEAK = Objective(
    "peak",
    (0.0,),
    _fullest,
    lambda known, seconds, micro: known,
    lambda known, micro: known[0],
)

# Warm-up, steady phase and ending about a pivot, then the sum of gradients.  DAPPLE (Fan et al.,
# PPoPP 2021) picks the pivot by a rule; here it is the one that makes the step longest.
PIVOT = Objective(
    "pivot",
    (0.0, 0.0),
    _through,
    _as_stage(_through),
    lambda known, micro: known[1],
)

# The same with the rounds of 1F1B: a rank takes a forward for each backward, so that the second
# microbatch of a stage waits for the first to come back from all stages below.  No paper's; ways
# that are in 1F1B, hence below its timeline, and nearer to it than a pivot alone.
ROUNDS = Objective(
    "rounds",
    (0.0, 0.0, 0.0),
    _rounds,
    _sent_both_ways,
    lambda known, micro: known[1],
)

# AdaPipe (Sun et al., ASPLOS 2024).
PHASES = Objective(
    "phases",
    (0.0, 0.0, 0.0),
    _phases,
    lambda known, seconds, micro: (known[0] + seconds, known[1] + seconds, known[2]),
    lambda known, micro: known[0] + known[1] + max(0, micro - 1) * known[2],
)

OBJECTIVES = {each.name: each for each in (SLOWEST, SUM, SUM_AND_SYNC, PIVOT, ROUNDS, PHASES, PEAK)}

# (first unit, unit behind the last, devices, stages behind it) -> ways
Menu = Callable[[int, int, range, int], Iterable[Way]]


@dataclass(frozen=True)
class Problem:
    """Chain that is cut into stages.

    units    of the chain; `menu` the ways of a stage of them
    micro    microbatches of a step
    devices  in a row, of which each stage takes the next; `sizes` how many a stage may take
    stages   how many (None: any number); `long`: of equal ends that whose first is longest
    send     (unit, device) seconds of a message to the stage that begins there
    memory   bytes of a device; `flight` microbatches whose activations a stage keeps, with so many
             stages behind it
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
    long: bool = False

    def flying(self, after: int) -> float:
        """Microbatches whose activations a stage keeps, with so many stages behind it."""
        return self.flight(after) if self.flight else min(after + 1, self.micro)

    def ways(self, first: int, last: int, devices: range, after: int) -> Iterator[Way]:
        """The ways of a stage that fit in the memory of its devices."""
        flight = self.flying(after)
        for way in self.menu(first, last, devices, after):
            if way.held + flight * way.kept <= self.memory:
                yield way


@dataclass(frozen=True)
class Cut:
    """Stages as found, first to last: units and devices of each, and how it runs them."""

    value: float
    units: tuple[int, ...]
    devices: tuple[int, ...]
    ways: tuple[Way, ...]


@dataclass(frozen=True, slots=True)
class _End:
    """The last stages of a pipeline."""

    known: Vector
    units: int = 0
    devices: int = 0
    way: Way | None = None
    rest: _End | None = None


Ends = dict[tuple[int, int], list[_End]]  # by first unit and first device


def cut(problem: Problem, objective: Objective) -> Cut | None:
    """The stages whose value is least; None where none fit in memory.

    All devices are used.  Takes a pass that keeps one end of each kind for a first value, which
    bounds the pass that keeps all.
    """
    quick = _least(problem, objective, _even(problem, objective), 1)
    if len(objective.empty) == 1:
        return quick
    return _least(problem, objective, quick.value if quick else math.inf, None) or quick


def _even(problem: Problem, objective: Objective) -> float:
    """Value of stages of as many units each, as a first bound; infinite where there is none."""
    stages, micro = problem.stages, problem.micro
    if stages is None or stages != problem.devices or 1 not in problem.sizes:
        return math.inf
    ends = [at * problem.units // stages for at in range(stages + 1)]
    known = objective.empty
    for after in range(stages):
        first, last = ends[stages - after - 1], ends[stages - after]
        at = stages - after - 1
        way = next(problem.ways(first, last, range(at, at + 1), after), None)
        if way is None or first == last:
            return math.inf
        seconds = problem.send(last, at + 1) if after else 0.0
        known = objective.stage(objective.link(known, seconds, micro), way, micro, after)
    return objective.total(known, micro) * (1 + 1e-12)


def _least(problem: Problem, objective: Objective, limit: float, width: int | None) -> Cut | None:
    most = problem.stages or min(problem.units, problem.devices)
    ends: Ends = {(problem.units, problem.devices): [_End(objective.empty)]}
    best: _End | None = None

    def total(end: _End) -> float:
        return objective.total(end.known, problem.micro)

    for after in range(most):
        ends = _longer(problem, objective, ends, after, limit, width)
        whole = ends.pop((0, 0), [])
        if whole and problem.stages in (None, after + 1):
            best = min(whole + ([best] if best else []), key=total)
            limit = min(limit, total(best))
    return _told(total(best), best) if best else None


def _longer(
    problem: Problem, objective: Objective, ends: Ends, after: int, limit: float, width: int | None
) -> Ends:
    """Ends with one stage more, those alone that another one of the same kind does not beat."""
    found: Ends = {}
    micro = problem.micro
    left = problem.stages - after - 1 if problem.stages else None  # stages still to come
    for (last, behind), tails in ends.items():
        seconds = problem.send(last, behind) if after else 0.0
        known = [objective.link(tail.known, seconds, micro) for tail in tails]
        if min(objective.total(before, micro) for before in known) > limit:
            continue
        for first, at in _places(problem, last, behind, left):
            for way in problem.ways(first, last, range(at, behind), after):
                for tail, before in zip(tails, known, strict=True):
                    vector = objective.stage(before, way, micro, after)
                    if objective.total(vector, micro) <= limit:
                        end = _End(vector, last - first, behind - at, way, tail)
                        found.setdefault((first, at), []).append(end)
    if problem.long:
        found = {key: sorted(ends, key=lambda end: -end.units) for key, ends in found.items()}
    return {key: _unbeaten(ends, objective, micro, width) for key, ends in found.items()}


def _places(
    problem: Problem, last: int, behind: int, left: int | None
) -> Iterator[tuple[int, int]]:
    """First unit and first device of a stage, with so many stages still to come (None: any)."""
    for size in problem.sizes:
        at = behind - size
        if left == 0:
            if at == 0:
                yield 0, 0
        elif at >= (left or 0):
            # a first stage has all that is left, both of units and of devices
            lowest = left if left else 1
            yield from ((first, at) for first in range(lowest, last) if at)
            if left is None and at == 0:
                yield 0, 0


def _unbeaten(ends: list[_End], objective: Objective, micro: int, width: int | None) -> list[_End]:
    if width:
        return sorted(ends, key=lambda end: objective.total(end.known, micro))[:width]
    front: list[_End] = []
    for end in sorted(ends, key=lambda end: end.known):
        if not any(all(a <= b for a, b in zip(f.known, end.known, strict=True)) for f in front):
            front.append(end)
    return front


def _told(value: float, end: _End) -> Cut:
    stages: list[_End] = []
    at: _End | None = end
    while at is not None and at.way is not None:
        stages.append(at)
        at = at.rest
    ways = tuple(each.way for each in stages if each.way is not None)
    return Cut(value, tuple(s.units for s in stages), tuple(s.devices for s in stages), ways)


def ceilings(problem: Problem) -> Cut | None:
    """The stages of least `SUM`, as Alpa finds them: by a ceiling on the slowest stage.

    For each time that a stage can take, from the least, a programme on the sum alone; no further
    once the ceiling by itself costs more than the best step.
    """
    added = Objective(
        "added",
        (0.0,),
        lambda known, way, micro, after: (known[0] + way.both,),
        lambda known, seconds, micro: (known[0] + seconds,),
        lambda known, micro: known[0],
    )
    best: Cut | None = None
    for ceiling in sorted(set(_times(problem))):
        if best and (problem.micro - 1) * ceiling >= best.value:
            break

        def below(first: int, last: int, devices: range, after: int, most: float = ceiling) -> Any:
            ways = problem.menu(first, last, devices, after)
            return (way for way in ways if way.both <= most)

        found = _least(replace(problem, menu=below), added, math.inf, 1)
        if found:
            slowest = max(way.both for way in found.ways)
            value = found.value + (problem.micro - 1) * slowest
            best = replace(found, value=value) if not best or value < best.value else best
    return best


def _times(problem: Problem) -> Iterator[float]:
    most = problem.stages or min(problem.units, problem.devices)
    for last in range(1, problem.units + 1):
        for first in range(last):
            for size in problem.sizes:
                for at in range(problem.devices - size + 1):
                    for after in range(most):
                        ways = problem.menu(first, last, range(at, at + size), after)
                        yield from (way.both for way in ways)


def partition(
    times: Sequence[tuple[float, float]],
    stages: int,
    micro: int = 1,
    objective: Objective | str = PIVOT,
    *,
    sends: Sequence[float] = (),
    held: Sequence[float] = (),
    kept: Sequence[float] = (),
    memory: float = math.inf,
    flight: Callable[[int], float] | None = None,
) -> tuple[int, ...] | None:
    """Units of each stage, first to last; None where no partition fits in memory.

    times  (forward, backward) seconds of each unit, for one microbatch; as long as the chain
    sends  seconds of the message behind each unit (none: 0); `held` and `kept` bytes of each unit,
           of which a stage of 1F1B keeps `kept` min(stages behind it + 1, micro) times
    Raises ValueError where there are fewer units than stages.
    """
    count = len(times)
    if not 1 <= stages <= count:
        raise ValueError(f"{count} units do not make {stages} stages, each of one at least")
    forward, backward = ([0.0, *accumulate(side)] for side in zip(*times, strict=True))
    bytes_held = [0.0, *accumulate(held or [0.0] * count)]
    bytes_kept = [0.0, *accumulate(kept or [0.0] * count)]

    def menu(first: int, last: int, devices: range, after: int) -> Iterator[Way]:
        yield Way(
            forward[last] - forward[first],
            backward[last] - backward[first],
            held=bytes_held[last] - bytes_held[first],
            kept=bytes_kept[last] - bytes_kept[first],
        )

    problem = Problem(
        count,
        menu,
        micro,
        devices=stages,
        stages=stages,
        send=lambda unit, device: sends[unit - 1] if sends else 0.0,
        memory=memory,
        flight=flight,
    )
    found = cut(problem, OBJECTIVES[objective] if isinstance(objective, str) else objective)
    return found.units if found else None
