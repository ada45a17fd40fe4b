"""Bounds from below of what ways cost: no cuts, and no recomputation, make one cheaper.

* Of every way of a placement, by columns: before anything is cut.
* Of one way whose cuts are known: before its order is played.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from schedlang.passes.planner.price import collective, composition, stride, unit_times, updating
from schedlang.passes.planner.space import Floats, Ints, Job, Ways
from schedlang.passes.planner.span import homes
from schedlang.passes.planner.values import Chain, Setting, Unit
from schedlang.passes.simulate.machine import Cluster

FLUSHED = ("1F1B", "GPipe", "Eager1F1B")  # a backward is whole, and one stage is on a rank
WHOLE = (*FLUSHED, "Interleaved1F1B", "BFS", "Seq1F1B", "TeraPipe")  # a backward is whole


# -- of all ways of a placement --------------------------------------------------------------------


@dataclass(frozen=True)
class Clock:
    """Seconds of a chain's units, by runs: forward, backward, forward again.

    They depend on the ranks of a pipeline only where experts lie apart, beyond them.
    """

    chain: Chain
    job: Job
    _known: dict[int, Floats] = field(default_factory=dict)

    def times(self, pp: int) -> Floats:
        """Return [3, runs]."""
        key = pp if self.chain.placement.ep > 1 else 0
        if key not in self._known:
            setting = Setting(self.chain.placement, pp=pp)
            cluster = self.job.cluster
            each = [unit_times(run.unit, setting, cluster) for run in self.chain.runs]
            self._known[key] = np.array(each).T
        return self._known[key]


def seconds_floor(ways: Ways, clock: Clock) -> Floats:
    """Seconds that a step of each way takes at least, however it is cut.

    A rank computes its share of a step, the fullest at least the mean of them.  With one stage on
    each rank more can be said: how long some rank waits before and after, for any cut.
    """
    ahead, back, longest = _units(ways, clock)
    busy = ways.passes * np.maximum((ahead + back) / ways.pp / clock.job.worth, longest)
    alone = (ways.chunks == 1) & (ways.pp > 1)
    waits = _waiting(ahead + back, ways.pp, ways.passes)
    first = ahead * _first(ways.chain.placement.slices)
    last = _last(first, ahead + back - first, ways.pp, ways.passes)
    waits = np.where(_of(ways, FLUSHED), waits, last)
    return np.where(alone, np.maximum(busy, waits), busy)


def seconds_hoped(ways: Ways, clock: Clock) -> Floats:
    """Seconds that a step of each way may take: no bound, but the order in which to look at them.

    Stages alike, idle as orders are by their closed forms: a whole share of a microbatch for each
    rank but one, less by the stages on a rank, a third of it where backwards are halved.
    """
    ahead, back, _ = _units(ways, clock)
    idle = np.where(_of(ways, WHOLE), 1.0, 1 / 3) * (ways.pp - 1) / ways.chunks
    found: Floats = (ahead + back) / ways.pp / clock.job.worth * (ways.passes + idle)
    return found


def _units(ways: Ways, clock: Clock) -> tuple[Floats, Floats, Floats]:
    """Seconds of all units forward and backward, and of the longest of them, for each way."""
    counts = np.array([run.count for run in ways.chain.runs])
    ahead, back, longest = (np.zeros(len(ways)) for _ in "fbm")
    for pp in np.unique(ways.pp):
        times, mine = clock.times(int(pp)), ways.pp == pp
        ahead[mine], back[mine] = times[:2] @ counts
        longest[mine] = times[:2].sum(0).max()
    return ahead, back, longest


def _of(ways: Ways, orders: Sequence[str]) -> NDArray[np.bool_]:
    """Find the ways whose order is one of these."""
    return np.isin(ways.order, [at for at, name in enumerate(ways.names) if name in orders])


def _first(slices: int) -> float:
    """Share of a mean slice that the first takes at least: that of attention, the keys it sees."""
    return 2 / (slices + 1)


def _waiting(both: Floats, ranks: Ints, micro: Ints) -> Floats:
    """Seconds of a pipeline whose backwards are whole, whatever its cuts.

    The first microbatch goes down to a rank, this computes, the last one goes back up: the rank of
    place s needs sum(t[:s]) + m t[s].  Of all cuts that one is the least for which all are alike.
    With more microbatches than ranks 1F1B needs more: all of the first microbatch, then what is on
    its way below s, then s alone, T + sum(t[s:]) + (m - 1 - p + s) t[s]; and all are alike for
    even stages.
    """
    down = both / (1 - (1 - 1 / micro) ** ranks)
    return np.where(micro > ranks, np.maximum(down, both * (1 + (micro - 1) / ranks)), down)


def _last(ahead: Floats, back: Floats, ranks: Ints, micro: Ints) -> Floats:
    """Seconds of any pipeline with one stage on each rank, whatever its cuts.

    The last rank waits for the first forward, F + (m - 1) t; if it has little itself, the others
    have more than the mean, m (T - t) / (p - 1).  Both are alike for the t that is the least.
    """
    both = ahead + back
    least = np.maximum(0.0, (micro * both - ahead * (ranks - 1)) / (micro * ranks - ranks + 1))
    found: Floats = ahead + (micro - 1) * least
    return found


def sums_floor(ways: Ways, job: Job) -> tuple[Floats, Floats]:
    """Seconds in which each way's replicas send at least, however it is cut.

    The first beside the computing, so that a step takes at least as long; the second after the last
    backward, with the update.  The fullest rank has at least the mean of the numbers.
    """
    one = ways.chain.placement
    beside, after = np.zeros(len(ways)), np.zeros(len(ways))
    numbers, spread = _numbers(ways.chain)
    held = np.array([numbers - spread, spread], dtype=float)
    for pp in np.unique(ways.pp).tolist():
        setting = Setting(one, job.ranks // (one.tp * one.cp * pp), pp)
        took = {op: _summed(op, ways.chain, setting, job) for op in (SUM, SCATTER, GATHER)}
        often = ways.passes * (took[SCATTER] + 2 * took[GATHER])
        once = took[SCATTER] + took[GATHER]
        nothing = np.zeros(len(ways))
        more = (nothing, nothing, (ways.passes - 1) * took[SCATTER], often)
        mine = ways.pp == pp
        for stage, last in enumerate((took[SUM], once, once, 0.0)):
            at = mine & (ways.zero == stage)
            fewer = replace(setting, zero=stage)
            after[at] = last + updating(fewer, held / pp, job.cluster, job.recipe)
            beside[at] = more[stage][at]
    return beside, after


SUM, SCATTER, GATHER = "all_reduce", "reduce_scatter", "all_gather"


def _summed(op: str, chain: Chain, setting: Setting, job: Job) -> float:
    """Seconds of one collective of replicas over the mean share of all numbers."""
    one, recipe = setting.placement, job.recipe
    far, ranks = stride(setting, "dp" if setting.dp > 1 else "cp"), setting.dp * one.cp
    size = (recipe.parameter if op == GATHER else recipe.gradient) / setting.pp
    numbers, spread = _numbers(chain)
    plain = _sent(job.cluster, op, (numbers - spread) * size, ranks, far)
    if not spread:
        return plain
    return plain + _sent(job.cluster, op, spread * size, ranks // one.ep, far * one.ep)


@lru_cache(100_000)
def _sent(cluster: Cluster, op: str, size: float, ranks: int, apart: int) -> float:
    return collective(cluster, op, size, ranks, apart)


def _numbers(chain: Chain) -> tuple[int, int]:
    """Parameters of a chain, shared ones once, and those of experts among them."""
    tied = {max(pair) for pair in chain.tied}
    runs = [run for at, run in enumerate(chain.runs) if at not in tied]
    return (
        sum(run.unit.numbers * run.count for run in runs),
        sum(run.unit.spread * run.count for run in runs),
    )


def bytes_floor(ways: Ways, job: Job) -> Floats:
    """Bytes that the fullest rank of each way holds at least, however it is cut.

    The fullest holds at least the mean: of the state, and of what one microbatch keeps where all
    units are computed again, less gradients that may not be there yet.
    """
    runs, recipe, one = ways.chain.runs, job.recipe, ways.chain.placement
    numbers, spread = _numbers(ways.chain)
    held = np.zeros(len(ways))
    for stage, size in enumerate((recipe.state(one.hosted), recipe.gradient, recipe.parameter)):
        split = np.where(ways.zero > stage, ways.dp * one.cp, 1)
        apart = np.where(ways.zero > stage, np.maximum(1, ways.dp * one.cp // one.ep), 1)
        held += size * ((numbers - spread) / split + spread / apart)
    kept = sum(_least(run.unit, one.parked) * run.count for run in runs)
    least = min(run.unit.most for run in runs)
    kept = max(0.0, kept - numbers * recipe.gradient)
    found: Floats = (held + kept) / ways.pp + least
    return found


def _least(unit: Unit, parked: bool) -> float:
    return 0.0 if parked and unit.input < unit.kept else min(unit.kept, unit.input)


# -- of one way ------------------------------------------------------------------------------------


def span_floor(clock: Clock, setting: Setting) -> float:
    """Seconds that the pipeline of a setting with cuts takes at least, whatever its order.

    Each rank waits for the first microbatch to reach its first stage, computes, and, where
    backwards are whole, waits until the last one has gone back to the first stage of all.
    """
    ahead, back, once_more = clock.times(setting.pp)
    first = _first(setting.placement.slices)
    made, again = composition(clock.chain, setting.cuts, setting.again)
    forward, backward = made @ ahead, made @ back + again @ once_more
    rank = homes(setting.order, setting.pp, setting.chunks)
    busy = np.bincount(rank, forward + backward, setting.pp) * setting.passes
    whole = setting.order in WHOLE
    before = forward[: setting.pp] + (backward[: setting.pp] if whole else 0.0)
    waits = np.concatenate([[0.0], np.cumsum(before)[:-1]]) * first
    return float((busy + waits).max())
