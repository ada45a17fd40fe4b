"""Lower bounds of what candidates cost: no split into stages and no recomputation is cheaper.

`search` prunes with them: all candidates of a placement at once, by columns, before stages are
known; and one candidate whose stages are known, before its order is simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedlang.passes.planner.critical_path import stage_ranks
from schedlang.passes.planner.even_stages import split_evenly
from schedlang.passes.planner.price import (
    collective_seconds,
    optimizer_seconds,
    replica_stride,
    run_seconds,
    sending_axes,
    units_by_stage,
)
from schedlang.passes.planner.search_space import AXIS_ORDERS, Candidates, Floats, Ints, Job
from schedlang.passes.planner.values import Chain, Setting, Unit
from schedlang.passes.simulate.machine import Cluster

ONE_STAGE_ORDERS = (
    "1F1B",
    "GPipe",
    "Eager1F1B",
)  # backwards are not split, and a rank has one stage
WHOLE_BACKWARD_ORDERS = (
    *ONE_STAGE_ORDERS,
    "Interleaved1F1B",
    "BFS",
    "Seq1F1B",
    "TeraPipe",
)  # backwards are not split


# -- all candidates of a placement -----------------------------------------------------------------


@dataclass(frozen=True)
class ChainTimes:
    """Lower bounds of seconds of a chain's units, by runs: forward, backward, and recomputation.

    They depend on how far apart the ranks of the chain's own axes are.
    """

    chain: Chain
    job: Job
    _known: dict[object, Floats] = field(default_factory=dict)
    _cuts: dict[object, tuple[int, ...]] = field(default_factory=dict)
    _spans: dict[object, float] = field(default_factory=dict)

    def split_stages(self, way: Setting) -> tuple[Setting, float]:
        """Split into stages so that the slowest is as quick as possible; also return the pipeline's
        floor."""
        if way.cuts:
            return way, pipeline_floor(self, way)
        key = way.pp, way.chunks, self.ranks_in_node(way)
        if (cuts := self._cuts.get(key)) is None:
            each = tuple(self.times(way)[:2].sum(0).tolist())
            cuts = self._cuts[key] = split_evenly(self.chain, way.pp * way.chunks, each)
        split, known = replace(way, cuts=cuts), (*key, way.order)
        if (span := self._spans.get(known)) is None:
            span = self._spans[known] = pipeline_floor(self, split)
        return split, span

    def ranks_in_node(self, setting: Setting) -> tuple[int, ...]:
        """Ranks of each of the chain's axes that share a node: times depend on nothing else."""
        where, node = sending_axes(setting), self.job.cluster.node
        return tuple(max(1, min(size, node // far)) for _, size, far in where if size > 1)

    def times(self, setting: Setting | None = None) -> Floats:
        """Return seconds [3, runs] for the axes of a setting, whatever its rows and offloading.

        Without a setting: seconds as if ranks of every axis were adjacent, which no setting beats.
        """
        one = self.chain.placement
        where = sending_axes(Setting(one) if setting is None else replace(setting, placement=one))
        if setting is None:
            where = tuple((axis, size, min(far, 1)) for axis, size, far in where)
        key = None if setting is None else self.ranks_in_node(setting)
        if key not in self._known:
            tables = run_seconds(self.chain, where, self.job.cluster)[1]
            ahead, back, _, fore, hind = (one.sum(1) for one in tables)
            least = ahead + fore, back + np.minimum(0.0, hind), np.maximum(0.0, hind)
            self._known[key] = np.array(least)
        return self._known[key]


def step_bounds(
    ways: Candidates, clocks: Sequence[ChainTimes], laid: bool = True
) -> tuple[Floats, Floats]:
    """Lower bounds and estimates of the seconds of a step of each candidate, for any split into
    stages; also for any order of its axes where it is not `laid`.

    A rank computes its share of a step; the busiest rank computes at least the mean.  With one
    stage on each rank the bound adds how long some rank waits before and after, for any split.  The
    estimate is not a bound: it sorts candidates.  It assumes equal stages, and bubbles by the
    closed forms of orders: one microbatch's share for each other rank, divided by the stages on a
    rank, and a third of that where backwards are split.
    """
    ahead, back, longest = _units(ways, clocks, laid)
    both, share = ahead + back, (ahead + back) / ways.pp / clocks[0].job.relative_speed
    busy = ways.passes * np.maximum(share, longest)
    alone = (ways.chunks == 1) & (ways.pp > 1)
    waits = _flushed_seconds(both, ways.pp, ways.passes)
    first = ahead * _first_slice_share(ways.chain.placement.slices)
    last = _last_rank_seconds(first, both - first, ways.pp, ways.passes)
    waits = np.where(_has_order(ways, ONE_STAGE_ORDERS), waits, last)
    idle = (
        np.where(_has_order(ways, WHOLE_BACKWARD_ORDERS), 1.0, 1 / 3) * (ways.pp - 1) / ways.chunks
    )
    hoped: Floats = share * (ways.passes + idle)
    return np.where(alone, np.maximum(busy, waits), busy), hoped


def _units(
    ways: Candidates, clocks: Sequence[ChainTimes], laid: bool
) -> tuple[Floats, Floats, Floats]:
    """Seconds of all units, forward and backward, and of the longest unit, for each candidate."""
    each, near = (
        _distinct_settings(ways, clocks) if laid else ([None], np.zeros(len(ways), dtype=np.int64))
    )
    which, at = _distinct(ways.one, near)
    pairs = zip(ways.one[at].tolist(), near[at].tolist())
    table = np.array([_unit_times(clocks[one], each[place]) for one, place in pairs])
    ahead, back, longest = table[which].T
    return ahead, back, longest


def _unit_times(clock: ChainTimes, near: Setting | None) -> tuple[float, float, float]:
    """Seconds of all units of one chain, and of its longest unit.

    Each chain has runs of its own: units that are equal for few rows may differ for many.
    """
    times = clock.times(near)[:2]
    ahead, back = times @ [run.count for run in clock.chain.runs]
    return ahead, back, times.sum(0).max()


def _distinct_settings(
    ways: Candidates, clocks: Sequence[ChainTimes]
) -> tuple[list[Setting | None], Ints]:
    """List settings whose units take different times, and the index of each candidate's setting."""
    which, at = _distinct(ways.pp, ways.axes)
    settings: list[Setting | None] = []
    places, found = dict[tuple[int, ...], int](), []
    for one in at.tolist():
        key = clocks[0].ranks_in_node(setting := ways.setting(one))
        if key not in places:
            settings.append(setting)
        found.append(places.setdefault(key, len(places)))
    return settings, np.array(found, dtype=np.int64)[which]


def _has_order(ways: Candidates, orders: Sequence[str]) -> NDArray[np.bool_]:
    """Find the candidates whose order is one of `orders`."""
    found: NDArray[np.bool_] = np.array([name in orders for name in ways.names])[ways.order]
    return found


def _first_slice_share(slices: int) -> float:
    """Share of the mean slice's time that the first slice takes at least: attention to fewer
    keys."""
    return 2 / (slices + 1)


def _flushed_seconds(both: Floats, ranks: Ints, micro: Ints) -> Floats:
    """Seconds of a pipeline whose backwards are not split, for any split into stages.

    The first microbatch goes down to a rank, the rank computes, and the last one goes back up: the
    rank at place s needs sum(t[:s]) + m t[s].  The minimum over all splits makes all of these
    equal.  With more microbatches than ranks 1F1B needs more: all of the first microbatch, then the
    microbatches in flight below s, then s alone: T + sum(t[s:]) + (m - 1 - p + s) t[s]; these are
    all equal for equal stages.
    """
    down = both / (1 - (1 - 1 / micro) ** ranks)
    return np.where(micro > ranks, np.maximum(down, both * (1 + (micro - 1) / ranks)), down)


def _last_rank_seconds(ahead: Floats, back: Floats, ranks: Ints, micro: Ints) -> Floats:
    """Seconds of any pipeline with one stage on each rank, for any split into stages.

    The last rank waits for the first forward, F + (m - 1) t.  If its own t is small, the other
    ranks have more than the mean, m (T - t) / (p - 1).  The smallest bound has the t that makes
    both equal.
    """
    both = ahead + back
    least = np.maximum(0.0, (micro * both - ahead * (ranks - 1)) / (micro * ranks - ranks + 1))
    found: Floats = ahead + (micro - 1) * least
    return found


def replica_floor(ways: Candidates, job: Job, laid: bool = True) -> tuple[Floats, Floats]:
    """Lower bounds of the seconds in which each candidate's replicas send, for any split into
    stages; also for any order of its axes where it is not `laid`.

    The first result is sent while ranks compute, so a step takes at least as long; the second is
    sent after the last backward, and includes the update.  The fullest rank has at least the mean
    of the parameters.
    """
    one, numbers = ways.chain.placement, _count_parameters(ways.chain)
    held = np.array([numbers[0] - numbers[1], numbers[1]], dtype=float)
    ranks = job.ranks // (one.tp * one.cp)

    @cache
    def summed(pp: int, axes: int) -> Floats:
        """Seconds of an all-reduce, of a reduce-scatter, of an all-gather."""
        setting = Setting(one, ranks // pp, pp, axes=AXIS_ORDERS[axes])
        return np.array(
            [_collective_floor(op, ways.chain, setting, job) for op in (SUM, SCATTER, GATHER)]
        )

    @cache
    def updated(hosted: bool, pp: int) -> list[float]:
        """Seconds of the update, by stage of ZeRO."""
        at = replace(one, offload="optimizer" if hosted else "none")
        setting = Setting(at, ranks // pp, pp)
        each = (replace(setting, zero=zero) for zero in range(4))
        return [optimizer_seconds(zero, held / pp, job.cluster, job.recipe) for zero in each]

    hosted = np.array([chain.placement.offloads_optimizer for chain in ways.chains])[ways.one]
    which, at = _distinct(ways.pp, ways.axes, hosted)
    sums, updates = [], []
    for pp, axes, away in zip(*(one[at].tolist() for one in (ways.pp, ways.axes, hosted))):
        some = (axes,) if laid else ways.axis_orders[pp]
        sums.append(np.min([summed(pp, order) for order in some], 0))
        updates.append(updated(away, pp))
    every, zero = np.array(sums)[which], ways.zero
    once = every[:, 1] + every[:, 2]
    after = np.select([zero == 0, zero < 3], [every[:, 0], once]) + np.array(updates)[which, zero]
    scattered, often = (ways.passes - 1) * every[:, 1], ways.passes * (once + every[:, 2])
    return np.select([zero == 2, zero == 3], [scattered, often]), after


SUM, SCATTER, GATHER = "all_reduce", "reduce_scatter", "all_gather"


def _distinct(*columns: NDArray[Any]) -> tuple[Ints, Ints]:
    """Number the distinct combinations of columns: the number of each row, and a row of each."""
    key = np.zeros(len(columns[0]), dtype=np.int64)
    for one in columns:
        key = key * (int(one.max(initial=0)) + 1) + one
    _, at, which = np.unique(key, return_index=True, return_inverse=True)
    return which, at


def _collective_floor(op: str, chain: Chain, setting: Setting, job: Job) -> float:
    """Seconds of one collective of replicas over the mean share of all parameters."""
    one, recipe = setting.placement, job.recipe
    far, ranks = replica_stride(setting, job.cluster), setting.dp * one.cp
    size = (recipe.parameter if op == GATHER else recipe.gradient) / setting.pp
    numbers, spread = _count_parameters(chain)
    plain = _collective_seconds(job.cluster, op, (numbers - spread) * size, ranks, far)
    if not spread:
        return plain
    return plain + _collective_seconds(
        job.cluster, op, spread * size, ranks // one.ep, far * one.ep
    )


@lru_cache(100_000)
def _collective_seconds(cluster: Cluster, op: str, size: float, ranks: int, apart: int) -> float:
    return collective_seconds(cluster, op, size, ranks, apart)


def _count_parameters(chain: Chain) -> tuple[int, int]:
    """Parameters of a chain (tied ones once), and the experts' parameters among them."""
    tied = {max(pair) for pair in chain.tied}
    runs = [run for at, run in enumerate(chain.runs) if at not in tied]
    return (
        sum(run.unit.numel * run.count for run in runs),
        sum(run.unit.expert_numel * run.count for run in runs),
    )


def bytes_floor(ways: Candidates, job: Job) -> Floats:
    """Lower bound of the bytes of the fullest rank of each candidate, for any split into stages.

    The fullest rank holds at least the mean: of the state, and of what one microbatch saves where
    all units are recomputed, less gradients that may not exist yet.
    """
    recipe, one = job.recipe, ways.chain.placement
    numbers, spread = _count_parameters(ways.chain)
    each = []
    for chain in ways.chains:
        at = chain.placement
        kept = sum(
            _least_saved(run.unit, at.offloads_activations) * run.count for run in chain.runs
        )
        least = min(run.unit.peak for run in chain.runs)
        each.append(
            (recipe.state(at.offloads_optimizer), max(0.0, kept - numbers * recipe.gradient), least)
        )
    state, kept, least = np.array(each, dtype=float)[ways.one].T
    held = np.zeros(len(ways))
    for stage, size in enumerate((state, recipe.gradient, recipe.parameter)):
        split = np.where(ways.zero > stage, ways.dp * one.cp, 1)
        apart = np.where(ways.zero > stage, np.maximum(1, ways.dp * one.cp // one.ep), 1)
        held += size * ((numbers - spread) / split + spread / apart)
    found: Floats = (held + kept) / ways.pp + least
    return found


def _least_saved(unit: Unit, parked: bool) -> float:
    return 0.0 if parked and unit.input < unit.kept else min(unit.kept, unit.input)


# -- one candidate ---------------------------------------------------------------------------------


def pipeline_floor(clock: ChainTimes, setting: Setting) -> float:
    """Lower bound of the seconds of the pipeline of a setting with stages, for any order.

    Each rank waits for the first microbatch to reach its first stage, computes, and, where
    backwards are not split, waits until the last one has gone back to the first stage of the model.
    """
    ahead, back, once_more = clock.times(setting)
    first = _first_slice_share(setting.placement.slices)
    made, again = units_by_stage(clock.chain, setting.cuts, setting.again)
    forward, backward = made @ ahead, made @ back + again @ once_more
    rank = stage_ranks(setting.order, setting.pp, setting.chunks)
    busy = np.bincount(rank, forward + backward, setting.pp) * setting.passes
    whole = setting.order in WHOLE_BACKWARD_ORDERS
    before = forward[: setting.pp] + (backward[: setting.pp] if whole else 0.0)
    waits = np.concatenate([[0.0], np.cumsum(before)[:-1]]) * first
    return float((busy + waits).max())
