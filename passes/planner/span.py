"""The longest way through an order's operations: how often it passes which stage.

* Ways as counts, linear in what operations take.
* 1F1B and GPipe in closed form.
* Any other order by its operations, level by level; many microbatches by few and what more take.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

from schedlang.pipeline.schedules import OrderError
from schedlang.pipeline.schedules import order as named
from schedlang.pipeline.timeline.table import Kind, Timeline, dependencies

Array = NDArray[np.float64]
Rows = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Way:
    """A way from the first operation to the last: how often it passes each stage.

    forward, inputs, weights  its forwards, and both halves of its backwards [stages]; of an order
                              that cuts sequences [stages * slices]
    sends                     transfers between ranks
    """

    forward: Array
    inputs: Array
    weights: Array
    sends: float

    def seconds(self, forward: Array, inputs: Array, weights: Array, send: float) -> float:
        """Add up a way, of operations that take so long."""
        took = self.forward @ forward.ravel() + self.inputs @ inputs.ravel()
        return float(took + self.weights @ weights.ravel() + self.sends * send)

    def further(self, other: Way, often: float) -> Way:
        """Go on `often` times by what this way has more than the other."""
        more = (getattr(self, n) + often * (getattr(self, n) - getattr(other, n)) for n in NAMES)
        return Way(*more)


NAMES = ("forward", "inputs", "weights", "sends")
FEW, LEAST = 2, 16  # times the ranks, and at the least: so many microbatches are played, then more


def longest(
    order: str,
    ranks: int,
    chunks: int,
    micro: int,
    forward: Array,
    inputs: Array,
    weights: Array,
    send: float,
) -> Way:
    """The longest way through a step of so many microbatches.

    `forward`, `inputs` and `weights` are seconds of one microbatch at each stage, or of its slices
    [stages, slices].  Raises OrderError for sizes that the order does not have, and for orders that
    are not priced.
    """
    forward, inputs, weights = forward.ravel(), inputs.ravel(), weights.ravel()
    backward, slices = inputs + weights, len(forward) // (ranks * chunks)
    if ranks * chunks == 1:
        each = np.full(slices, float(micro))
        return Way(each, each, each, 0.0)
    if chunks == slices == 1 and order in CLOSED and micro > ranks:
        return CLOSED[order](forward, backward, micro, send)
    period = -(-ranks // slices)
    few = max(FEW, -(-LEAST // ranks)) * period + micro % period

    def played(count: int) -> Way:
        network = _network(order, ranks, count, chunks, slices)
        return network.longest(forward, inputs, weights, send)

    if micro <= few + period:
        return played(micro)
    more = played(few + period)
    return more.further(played(few), (micro - few - period) / period)


# -- closed forms ----------------------------------------------------------------------------------


def one_by_one(forward: Array, backward: Array, micro: int, send: float) -> Way:
    """1F1B: down all stages and up again, and rounds in between.

    A rank takes a forward for each backward, so a round goes down and up some stages that follow
    one another, and takes as many microbatches as these are; what no whole round is left for goes
    round their slowest.  Rounds begin after the first backward has come up from the last stage, a
    round of the stages below, or after the forwards that a rank starts with.  All of these are ways
    that there are: so this is a lower bound, and near what is played.
    """
    times = forward + backward
    count = len(times)
    place, length = _windows(count)
    total = np.concatenate([[0.0], np.cumsum(times)])
    slowest = np.maximum.accumulate(np.where(length > 0, times, 0.0), 1)  # [first, last]
    around = total[None, 1:] - total[:-1, None] + 2 * send * (length - 1)
    below = np.where(place < count - 1, count - place, 0)  # microbatches of the first round
    first = np.where(below > 0, total[-1] - total[:-1] + 2 * send * (count - 1 - place), 0.0)
    every = total[-1] + 2 * send * (count - 1)
    own = total[1:] + 2 * send * place + (count - 1 - place) * times

    def ends(start: Array, left: Array) -> Array:
        rounds, rest = np.divmod(left, np.maximum(length, 1))
        found = start + rounds * around + rest * slowest
        return np.where((length > 0) & (left >= 0), found, -1.0)

    deep = ends(every + first, micro - 1 - below)
    flat = ends(own, micro - count + place)
    sits = total[1:] + 2 * send * place + (micro - 1) * times
    best = [int(found.argmax()) for found in (deep, flat, sits)]
    top = max(range(3), key=lambda at: (deep, flat, sits)[at].flat[best[at]])
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
    return Way(passes, passes, passes, float(sends + 2 * rounds * (high - low)))


@cache
def _windows(count: int) -> tuple[Array, Array]:
    """Places, and how many stages follow one another from a first to a last [first, last]."""
    place = np.arange(count)
    return place.astype(float), (place[None, :] - place[:, None] + 1).astype(float)


def all_forward(forward: Array, backward: Array, micro: int, send: float) -> Way:
    """GPipe: all forwards, then all backwards, each at the pace of its slowest stage."""
    count = len(forward)
    down, up = np.ones(count), np.ones(count)
    down[forward.argmax()] += micro - 1
    up[backward.argmax()] += micro - 1
    return Way(down, up, up, 2.0 * (count - 1))


CLOSED: dict[str, Callable[[Array, Array, int, float], Way]] = {
    "1F1B": one_by_one,
    "GPipe": all_forward,
}


FLYING = (*CLOSED, "Seq1F1B", "TeraPipe")  # what is in flight is known


# -- any order -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Network:
    """Operations of an order by level: each needs only what is on levels before its own.

    levels       where each ends
    kind, stage  of each operation; slices of a stage one after the other
    before       what it needs, filled up with a last one that is over at zero [operations, needs]
    apart        where that comes from another rank
    """

    levels: tuple[int, ...]
    kind: Rows
    stage: Rows
    before: Rows
    apart: Array

    def longest(self, forward: Array, inputs: Array, weights: Array, send: float) -> Way:
        """Find the longest way, every operation as early as can be."""
        took = np.zeros((len(Kind), len(forward)))
        took[Kind.F] = took[Kind.RECOMPUTE] = forward
        took[Kind.B], took[Kind.I], took[Kind.W] = inputs + weights, inputs, weights
        each, lag = took[self.kind, self.stage], send * self.apart
        end, low = np.zeros(len(each) + 1), 0
        for high in self.levels:
            ready = (end[self.before[low:high]] + lag[low:high]).max(1)
            np.add(ready, each[low:high], out=end[low:high])
            low = high
        passed, sends, at = np.zeros(took.shape), 0.0, int(end[:-1].argmax())
        while at < len(each):
            passed[self.kind[at], self.stage[at]] += 1
            which = int((end[self.before[at]] + lag[at]).argmax())
            sends += self.apart[at, which]
            at = int(self.before[at, which])
        ahead, whole = passed[Kind.F] + passed[Kind.RECOMPUTE], passed[Kind.B]
        return Way(ahead, whole + passed[Kind.I], whole + passed[Kind.W], float(sends))


@lru_cache(256)
def _network(order: str, ranks: int, micro: int, chunks: int, slices: int) -> _Network:
    """Sort the operations of an order by level."""
    line = played(order, ranks, micro, chunks, slices)
    count = len(line)
    made, used = dependencies(line)
    ahead = np.flatnonzero(line.rank[1:] == line.rank[:-1])
    made, used = np.concatenate([made, ahead]), np.concatenate([used, ahead + 1])
    levels = _levels(count, made, used)
    rows = np.concatenate(levels)
    place = np.empty(count + 1, dtype=np.int64)
    place[rows], place[-1] = np.arange(count), count
    made, used = place[made], place[used]
    sort = np.argsort(used, kind="stable")
    made, used = made[sort], used[sort]
    needs = np.bincount(used, minlength=count)
    column = np.arange(len(used)) - (np.cumsum(needs) - needs)[used]
    before = np.full((count, max(1, int(needs.max()))), count)
    before[used, column] = made
    apart = np.zeros(before.shape)
    apart[used, column] = line.rank[rows[made]] != line.rank[rows[used]]
    ends = np.cumsum([len(level) for level in levels]).tolist()
    each = line.stage.astype(np.int64) * slices + line.slice
    kind, stage = line.kind[rows].astype(np.int64), each[rows]
    return _Network(tuple(ends), kind, stage, before, apart)


def _levels(count: int, made: Rows, used: Rows) -> list[Rows]:
    """Rows that need nothing, then those that need only these, and so on (Kahn 1962)."""
    sort = np.argsort(made, kind="stable")
    users, first = used[sort], np.searchsorted(made[sort], np.arange(count + 1))
    open_ = np.bincount(used, minlength=count)
    found, level = list[Rows](), np.flatnonzero(open_ == 0)
    while len(level):
        found.append(level)
        low, many = first[level], first[level + 1] - first[level]
        within = np.arange(many.sum()) - np.repeat(np.cumsum(many) - many, many)
        freed = users[np.repeat(low, many) + within]
        np.subtract.at(open_, freed, 1)
        level = np.unique(freed[open_[freed] == 0])
    return found


@lru_cache(256)
def played(order: str, ranks: int, micro: int, chunks: int, slices: int = 1) -> Timeline:
    """The operations of an order: forwards and backwards of stages of which there is one each."""
    line = named(order, ranks, micro, chunks, slices=slices)
    if line.replicas > 1 or not np.isin(line.kind, PLAIN).all():
        reason = f"{order} has copies of its stages, moves activations, or updates inside a step"
        raise OrderError(reason, "a planner prices orders that do not, as 1F1B and ZB-V")
    return line


PLAIN = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.RECOMPUTE)


def in_flight(
    order: str,
    ranks: int,
    micro: int,
    chunks: int,
    kept: Array | None = None,
    waiting: Array | None = None,
    slices: int = 1,
    apart: tuple[bool, ...] = (),
    grown: Array | None = None,
) -> Array:
    """Microbatches, or slices of them, whose activations each stage holds when its rank holds most,
    those of them that wait then for the second half of their backward, and whether gradients of
    the stage's weights are there by then [3, stages].

    `kept` are bytes of one of each stage, `waiting` those of gradients of outputs that lie there
    between the halves, `grown` those of gradients of weights; without them most microbatches count.
    The first stage has no inputs to give gradients to: its first half does nothing.  Of stages that
    are not `apart` (all are where nothing is said) the first halves do all of it.  Of closed forms
    gradients count as there.
    """
    if chunks == 1 and order in FLYING:
        early = order in ("1F1B", "Seq1F1B")
        most = ranks - np.arange(ranks) + slices - 1 if early else np.full(ranks, micro * slices)
        flying = np.minimum(most, micro * slices)
        return np.array([flying, np.zeros(ranks), np.ones(ranks)], dtype=float)
    stages = ranks * chunks
    sizes = np.stack(
        [
            np.ones(stages) if kept is None else kept,
            np.full(stages, 1 / stages / micro) if waiting is None else waiting,
            np.zeros(stages) if grown is None else grown,
        ]
    )
    found = np.zeros((3, stages))
    line = order, ranks, min(micro, 2 * FEW * ranks), chunks
    rank = homes(order, ranks, chunks)
    split = np.array(apart or (True,) * stages)
    for one in range(ranks):
        mine = np.flatnonzero(rank == one)
        moments = _moments(*line, one, tuple(split[mine].tolist()))
        best = moments[(moments * sizes[:, mine]).sum((1, 2)).argmax()]
        found[:, mine] = best
    return found


@lru_cache(4096)
def _moments(
    order: str, ranks: int, micro: int, chunks: int, rank: int, apart: tuple[bool, ...]
) -> Rows:
    """Microbatches of each stage of a rank in flight, of these those that wait, and whether one has
    given its weights gradients, after operations [moments, 3, stages]; of moments one of which
    holds no less of anything the other one."""
    line = played(order, ranks, micro, chunks)
    rows = slice(line.starts[rank], line.starts[rank + 1])
    mine, stage = np.unique(line.stage[rows], return_inverse=True)
    kind, whole = line.kind[rows], ~np.array(apart)[stage]
    first, second = kind == Kind.I, kind == Kind.W
    ends = (kind == Kind.B) | np.where(whole, first, second)
    changes = np.zeros((len(kind), 3, len(mine)), dtype=np.int64)
    at = np.arange(len(kind))
    changes[at, 0, stage] = (kind == Kind.F).astype(int) - ends
    changes[at, 1, stage] = (first.astype(int) - second) * (~whole & (mine > 0)[stage])
    changes[at, 2, stage] = ends
    levels, found = changes.cumsum(0), list[Rows]()
    levels[:, 2] = levels[:, 2] > 0
    flat = levels.reshape(len(kind), -1)
    while len(flat):  # no other one can hold more than the one whose sum is the largest
        found.append(flat[flat.sum(1).argmax()])
        flat = flat[(flat > found[-1]).any(1)]
    return np.array(found).reshape(-1, 3, len(mine))


@lru_cache(512)
def homes(order: str, ranks: int, chunks: int) -> Rows:
    """The rank of each stage."""
    if chunks == 1:
        return np.arange(ranks)
    return played(order, ranks, FEW * ranks, chunks).stage_rank.astype(np.int64)
