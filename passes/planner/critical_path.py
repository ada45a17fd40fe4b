"""Critical path of a pipeline step: how often the longest path passes each stage.

`price` multiplies these counts with seconds of operations.  1F1B and GPipe have closed forms; any
other order is evaluated from its operations, level by level.  Many microbatches are extrapolated
from few.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

from schedlang.pipeline.schedules import OrderError, make_order
from schedlang.pipeline.timeline.table import Kind, Timeline, dependencies

Array = NDArray[np.float64]
Rows = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class CriticalPath:
    """A path from the first operation to the last: how often it passes each stage.

    forward, inputs, weights  counts of forwards, and of both halves of backwards [stages]; of an
                              order that slices sequences [stages * slices]
    sends                     transfers between ranks
    """

    forward: Array
    inputs: Array
    weights: Array
    sends: float

    def seconds(self, forward: Array, inputs: Array, weights: Array, send: float) -> float:
        """Return the seconds of the path, for operations that take so long."""
        total = self.forward @ forward.ravel() + self.inputs @ inputs.ravel()
        return float(total + self.weights @ weights.ravel() + self.sends * send)

    def extrapolate(self, fewer: CriticalPath, factor: float) -> CriticalPath:
        """Extrapolate: add `factor` times the difference between this path and the other."""
        counts = (
            getattr(self, n) + factor * (getattr(self, n) - getattr(fewer, n)) for n in PATH_FIELDS
        )
        return CriticalPath(*counts)


PATH_FIELDS = ("forward", "inputs", "weights", "sends")
# microbatches that are evaluated before extrapolation: for each rank, and at least
FEW, LEAST = 2, 16


def find_critical_path(
    order: str,
    ranks: int,
    chunks: int,
    micro: int,
    forward: Array,
    inputs: Array,
    weights: Array,
    send: float,
) -> CriticalPath:
    """Find the critical path of a step of `micro` microbatches.

    `forward`, `inputs` and `weights` are seconds of one microbatch at each stage, or of its slices
    [stages, slices].  Raises OrderError for sizes that the order does not have, and for orders that
    cannot be priced.
    """
    times = (np.asarray(part, dtype=float).tobytes() for part in (forward, inputs, weights))
    return _find_path(order, ranks, chunks, micro, *times, send)


@lru_cache(2048)  # settings that differ in ZeRO or in the optimizer's place have equal times
def _find_path(
    order: str,
    ranks: int,
    chunks: int,
    micro: int,
    forward_bytes: bytes,
    inputs_bytes: bytes,
    weights_bytes: bytes,
    send: float,
) -> CriticalPath:
    forward, inputs, weights = map(np.frombuffer, (forward_bytes, inputs_bytes, weights_bytes))
    backward, slices = inputs + weights, len(forward) // (ranks * chunks)
    if ranks * chunks == 1:
        counts = np.full(slices, float(micro))
        return CriticalPath(counts, counts, counts, 0.0)
    if chunks == slices == 1 and order in CLOSED_FORMS and micro > ranks:
        return CLOSED_FORMS[order](forward, backward, micro, send)
    fewer, more, factor = _evaluated_counts(ranks, micro, slices)

    def path(count: int) -> CriticalPath:
        network = _network(order, ranks, count, chunks, slices)
        return network.longest(forward, inputs, weights, send)

    longer = path(more)
    shorter = path(fewer) if factor else longer
    _found_paths(order, ranks, chunks, slices, more).append(longer)
    return longer.extrapolate(shorter, factor) if factor else longer


def _evaluated_counts(ranks: int, micro: int, slices: int) -> tuple[int, int, float]:
    """Return the two numbers of microbatches that are evaluated, and how often their difference
    is added for `micro`; 0 where that many are evaluated."""
    period = -(-ranks // slices)
    few = max(FEW, -(-LEAST // ranks)) * period + micro % period
    if micro <= few + period:
        return micro, micro, 0.0
    return few, few + period, (micro - few - period) / period


# -- paths that are known --------------------------------------------------------------------------


KEPT_PATHS = 16  # of an order and its sizes: the last ones


@cache
def _found_paths(
    order: str, ranks: int, chunks: int, slices: int, micro: int
) -> deque[CriticalPath]:
    """Return the paths of `micro` microbatches that were critical so far."""
    return deque(maxlen=KEPT_PATHS)


def known_paths_floor(
    order: str, ranks: int, chunks: int, micro: int, forward: Array, backward: Array, send: float
) -> float:
    """Lower bound of the seconds of the critical path, where backwards are not split.

    A path that was critical for some times exists for all others: it is no longer than the
    critical one.  0 where none is known, and where a price is extrapolated from fewer microbatches:
    it may be less than any path of so many.
    """
    if _evaluated_counts(ranks, micro, 1)[2]:
        return 0.0
    return max(
        (
            float(path.forward @ forward + path.inputs @ backward + path.sends * send)
            for path in _found_paths(order, ranks, chunks, 1, micro)
        ),
        default=0.0,
    )


# -- closed forms ----------------------------------------------------------------------------------


def path_of_1f1b(forward: Array, backward: Array, micro: int, send: float) -> CriticalPath:
    """Critical path of 1F1B: down all stages and up again, with rounds in between.

    A rank runs one forward for each backward.  So a round goes down and up some consecutive stages,
    and takes as many microbatches as there are such stages; microbatches that do not fill a round
    pass the slowest of these stages.  Rounds begin after the first backward has come up from the
    last stage, after a round of the stages below, or after the forwards that a rank starts with.
    All of these paths exist, so the result is a lower bound; it is close to a simulated step.
    """
    times = forward + backward
    count = len(times)
    stage, length = _windows(count)
    total = np.concatenate([[0.0], np.cumsum(times)])
    slowest = np.maximum.accumulate(np.where(length > 0, times, 0.0), 1)  # [first, last]
    around = total[None, 1:] - total[:-1, None] + 2 * send * (length - 1)
    first_round = np.where(stage < count - 1, count - stage, 0)  # microbatches of the first round
    first = np.where(first_round > 0, total[-1] - total[:-1] + 2 * send * (count - 1 - stage), 0.0)
    round_trip = total[-1] + 2 * send * (count - 1)
    warm_seconds = total[1:] + 2 * send * stage + (count - 1 - stage) * times

    def ends(start: Array, remaining: Array) -> Array:
        rounds, remainder = np.divmod(remaining, np.maximum(length, 1))
        end_times = start + rounds * around + remainder * slowest
        return np.where((length > 0) & (remaining >= 0), end_times, -1.0)

    deep_ends = ends(round_trip + first, micro - 1 - first_round)
    flat_ends = ends(warm_seconds, micro - count + stage)
    stay_ends = total[1:] + 2 * send * stage + (micro - 1) * times
    best = [int(end_times.argmax()) for end_times in (deep_ends, flat_ends, stay_ends)]
    top = max(range(3), key=lambda k: (deep_ends, flat_ends, stay_ends)[k].flat[best[k]])
    low, high = (best[2], best[2]) if top == 2 else divmod(best[top], count)
    passes = np.ones(count)
    passes[high + 1 :] = top == 0
    left, sends = micro - 1, 2.0 * (count - 1 if top == 0 else high)
    if top == 0 and high < count - 1:
        passes[high:] += 1
        left, sends = left - (count - high), sends + 2.0 * (count - 1 - high)
    if top == 1:
        passes[high] += count - 1 - high
        left -= count - 1 - high
    rounds, rest = divmod(left, high - low + 1)
    passes[low : high + 1] += rounds
    passes[low + int(times[low : high + 1].argmax())] += rest
    return CriticalPath(passes, passes, passes, float(sends + 2 * rounds * (high - low)))


@cache
def _windows(count: int) -> tuple[Array, Array]:
    """First stages, and the numbers of consecutive stages from a first to a last [first, last]."""
    stage = np.arange(count)
    return stage.astype(float), (stage[None, :] - stage[:, None] + 1).astype(float)


def path_of_gpipe(forward: Array, backward: Array, micro: int, send: float) -> CriticalPath:
    """Critical path of GPipe: all forwards, then all backwards, each limited by its slowest
    stage."""
    count = len(forward)
    down, up = np.ones(count), np.ones(count)
    down[forward.argmax()] += micro - 1
    up[backward.argmax()] += micro - 1
    return CriticalPath(down, up, up, 2.0 * (count - 1))


CLOSED_FORMS: dict[str, Callable[[Array, Array, int, float], CriticalPath]] = {
    "1F1B": path_of_1f1b,
    "GPipe": path_of_gpipe,
}


KNOWN_IN_FLIGHT = (
    *CLOSED_FORMS,
    "Seq1F1B",
    "TeraPipe",
)  # orders with a closed form for what is in flight


# -- any order -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Network:
    """Operations of an order by level: each depends only on operations of earlier levels.

    levels       end of each level
    kind, stage  of each operation; slices of a stage one after the other
    before       dependencies, padded with an operation that ends at zero [operations, needs]
    apart        whether a dependency comes from another rank
    """

    levels: tuple[int, ...]
    kind: Rows
    stage: Rows
    before: Rows
    apart: Array

    def longest(self, forward: Array, inputs: Array, weights: Array, send: float) -> CriticalPath:
        """Find the critical path, with every operation as early as possible."""
        times = np.zeros((len(Kind), len(forward)))
        times[Kind.F] = times[Kind.RECOMPUTE] = forward
        times[Kind.B], times[Kind.I], times[Kind.W] = inputs + weights, inputs, weights
        seconds, lag = times[self.kind, self.stage], send * self.apart
        end, begin = np.zeros(len(seconds) + 1), 0
        for level_end in self.levels:
            ready = (end[self.before[begin:level_end]] + lag[begin:level_end]).max(1)
            np.add(ready, seconds[begin:level_end], out=end[begin:level_end])
            begin = level_end
        passed, sends, row = np.zeros(times.shape), 0.0, int(end[:-1].argmax())
        while row < len(seconds):
            passed[self.kind[row], self.stage[row]] += 1
            column = int((end[self.before[row]] + lag[row]).argmax())
            sends += self.apart[row, column]
            row = int(self.before[row, column])
        fwd, bwd = passed[Kind.F] + passed[Kind.RECOMPUTE], passed[Kind.B]
        return CriticalPath(fwd, bwd + passed[Kind.I], bwd + passed[Kind.W], float(sends))


@lru_cache(256)
def _network(order: str, ranks: int, micro: int, chunks: int, slices: int) -> _Network:
    """Sort the operations of an order by level."""
    line = order_timeline(order, ranks, micro, chunks, slices)
    count = len(line)
    sources, targets = dependencies(line)
    earlier = np.flatnonzero(line.rank[1:] == line.rank[:-1])
    sources, targets = np.concatenate([sources, earlier]), np.concatenate([targets, earlier + 1])
    levels = _levels(count, sources, targets)
    rows = np.concatenate(levels)
    position = np.empty(count + 1, dtype=np.int64)
    position[rows], position[-1] = np.arange(count), count
    sources, targets = position[sources], position[targets]
    sort = np.argsort(targets, kind="stable")
    sources, targets = sources[sort], targets[sort]
    counts = np.bincount(targets, minlength=count)
    column = np.arange(len(targets)) - (np.cumsum(counts) - counts)[targets]
    before = np.full((count, max(1, int(counts.max()))), count)
    before[targets, column] = sources
    apart = np.zeros(before.shape)
    apart[targets, column] = line.rank[rows[sources]] != line.rank[rows[targets]]
    ends = np.cumsum([len(level) for level in levels]).tolist()
    stage_slice = line.stage.astype(np.int64) * slices + line.slice
    kind, stage = line.kind[rows].astype(np.int64), stage_slice[rows]
    return _Network(tuple(ends), kind, stage, before, apart)


def _levels(count: int, sources: Rows, targets: Rows) -> list[Rows]:
    """Rows without dependencies, then rows that depend only on these, and so on (Kahn 1962)."""
    sort = np.argsort(sources, kind="stable")
    users, starts = targets[sort], np.searchsorted(sources[sort], np.arange(count + 1))
    pending = np.bincount(targets, minlength=count)
    levels, level = list[Rows](), np.flatnonzero(pending == 0)
    while len(level):
        levels.append(level)
        begin, counts = starts[level], starts[level + 1] - starts[level]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        freed = users[np.repeat(begin, counts) + within]
        np.subtract.at(pending, freed, 1)
        level = np.unique(freed[pending[freed] == 0])
    return levels


@lru_cache(256)
def order_timeline(order: str, ranks: int, micro: int, chunks: int, slices: int = 1) -> Timeline:
    """Return the timeline of an order: forwards and backwards of stages without copies."""
    line = make_order(order, ranks, micro, chunks, slices=slices)
    if line.replicas > 1 or not np.isin(line.kind, PRICED_KINDS).all():
        reason = f"{order} has copies of its stages, moves activations, or updates inside a step"
        raise OrderError(reason, "a planner prices orders that do not, as 1F1B and ZB-V")
    return line


PRICED_KINDS = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.RECOMPUTE)


def count_in_flight(
    order: str,
    ranks: int,
    micro: int,
    chunks: int,
    kept: Array | None = None,
    waiting: Array | None = None,
    slices: int = 1,
    apart: Flags | None = None,
    grown: Array | None = None,
) -> Array:
    """Count what each stage holds at the moment when its rank holds most [3, stages].

    The three rows: microbatches (or slices of them) whose activations are saved; of these the ones
    that wait for the second half of their backward; and whether gradients of the stage's weights
    exist by then.

    `kept` are bytes of one microbatch at each stage, `waiting` bytes of gradients of outputs that
    are held between the halves, `grown` bytes of gradients of weights; without these arguments the
    moment with most microbatches counts.  The first stage has no inputs that need gradients: its
    first half does nothing.  The first half of a stage that is not `apart` is its full backward
    (default: all are `apart`).  In closed forms gradients count as existing.  `kept`, `waiting` and
    `apart` may be those of several cases [..., stages]: then the result is [3, ..., stages].
    """
    if chunks == 1 and order in KNOWN_IN_FLIGHT:
        early = order in ("1F1B", "Seq1F1B")
        counts = ranks - np.arange(ranks) + slices - 1 if early else np.full(ranks, micro * slices)
        in_flight = np.minimum(counts, micro * slices)
        return np.array([in_flight, np.zeros(ranks), np.ones(ranks)], dtype=float)
    stages = ranks * chunks
    sizes = np.stack(
        np.broadcast_arrays(
            np.ones(stages) if kept is None else kept,
            np.full(stages, 1 / stages / micro) if waiting is None else waiting,
            np.zeros(stages) if grown is None else grown,
        ),
        -2,
    )
    line = order, ranks, min(micro, 2 * FEW * ranks), chunks
    cases = sizes.reshape(-1, 3, stages)
    split = np.ones((len(cases), stages), dtype=bool)
    if apart is not None and _has_halves(*line):
        split[:] = apart.reshape(-1, stages)
    held = np.zeros((3, len(cases), stages))
    for halves in np.unique(split, axis=0):
        rows = np.flatnonzero((split == halves).all(1))
        held[:, rows] = _held_at_most(line, tuple(halves.tolist()), cases[rows])
    return held.reshape(3, *sizes.shape[:-2], stages)


def _held_at_most(line: tuple[str, int, int, int], apart: tuple[bool, ...], cases: Array) -> Array:
    """Count what each stage holds at its rank's fullest moment [3, cases, stages], for bytes
    [cases, 3, stages]."""
    rank_stages, moments = _moments_of_ranks(*line, apart)
    rank_sizes = cases[:, :, rank_stages].swapaxes(1, 2)  # [cases, ranks, 3, chunks]
    fullest = (moments * rank_sizes[:, :, None]).sum((3, 4)).argmax(2)
    held = np.zeros(cases.shape)
    held[:, :, rank_stages] = moments[np.arange(line[1]), fullest].swapaxes(1, 2)
    return held.swapaxes(0, 1)


@lru_cache(256)
def _has_halves(order: str, ranks: int, micro: int, chunks: int) -> bool:
    """Whether some backward of an order runs in two halves."""
    return bool((order_timeline(order, ranks, micro, chunks).kind == Kind.W).any())


@lru_cache(1024)
def _moments_of_ranks(
    order: str, ranks: int, micro: int, chunks: int, apart: tuple[bool, ...]
) -> tuple[Rows, Rows]:
    """Stages of each rank [ranks, chunks], and the moments of `_moments` [ranks, moments, 3,
    chunks]; ranks with fewer moments repeat their first."""
    rank_stages = stages_on_ranks(order, ranks, chunks)
    split = np.array(apart)[rank_stages].tolist()
    moments = [
        _moments(order, ranks, micro, chunks, rank, tuple(halves))
        for rank, halves in enumerate(split)
    ]
    padded = np.stack([rows[:1].repeat(max(map(len, moments)), 0) for rows in moments])
    for padded_rows, rows in zip(padded, moments):
        padded_rows[: len(rows)] = rows
    return rank_stages, padded


@lru_cache(4096)
def _moments(
    order: str, ranks: int, micro: int, chunks: int, rank: int, apart: tuple[bool, ...]
) -> Rows:
    """Counts of each stage of a rank after its operations [moments, 3, stages], as of
    `count_in_flight`.

    Moments that hold no more of anything than another moment are left out.
    """
    line = order_timeline(order, ranks, micro, chunks)
    rows = slice(line.starts[rank], line.starts[rank + 1])
    stages, stage = np.unique(line.stage[rows], return_inverse=True)
    kind, unsplit = line.kind[rows], ~np.array(apart)[stage]
    first, second = kind == Kind.I, kind == Kind.W
    ends = (kind == Kind.B) | np.where(unsplit, first, second)
    changes = np.zeros((len(kind), 3, len(stages)), dtype=np.int64)
    moments = np.arange(len(kind))
    changes[moments, 0, stage] = (kind == Kind.F).astype(int) - ends
    changes[moments, 1, stage] = (first.astype(int) - second) * (~unsplit & (stages > 0)[stage])
    changes[moments, 2, stage] = ends
    levels, maximal = changes.cumsum(0), list[Rows]()
    levels[:, 2] = levels[:, 2] > 0
    flat = levels.reshape(len(kind), -1)
    while len(flat):  # no other moment dominates the one with the largest sum
        maximal.append(flat[flat.sum(1).argmax()])
        flat = flat[(flat > maximal[-1]).any(1)]
    return np.array(maximal).reshape(-1, 3, len(stages))


@lru_cache(512)
def stage_ranks(order: str, ranks: int, chunks: int) -> Rows:
    """Return the rank of each stage."""
    if chunks == 1:
        return np.arange(ranks)
    return order_timeline(order, ranks, FEW * ranks, chunks).stage_rank.astype(np.int64)


@lru_cache(512)
def stages_on_ranks(order: str, ranks: int, chunks: int) -> Rows:
    """Return the stages of each rank, the first stage first [ranks, chunks]."""
    return np.argsort(stage_ranks(order, ranks, chunks), kind="stable").reshape(ranks, chunks)
