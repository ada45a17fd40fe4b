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

from schedlang.passes.planner.critical_path import known_paths_floor, stage_ranks
from schedlang.passes.planner.even_stages import split_evenly
from schedlang.passes.planner.price import (
    collective_seconds,
    optimizer_seconds,
    replica_stride,
    run_seconds,
    sending_axes,
    stage_send_seconds,
)
from schedlang.passes.planner.search_space import AXIS_ORDERS, Candidates, Floats, Ints, Job
from schedlang.passes.planner.stage_contents import padded_parameters, units_by_stage
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

    They depend on how far apart the ranks of the chain's own axes are.  Chains of equal times share
    what is known: a copy with another chain has the same caches.
    """

    chain: Chain
    job: Job
    _known: dict[object, Floats] = field(default_factory=dict)
    _cuts: dict[object, tuple[int, ...]] = field(default_factory=dict)
    _spans: dict[object, float] = field(default_factory=dict)

    def split_stages(self, setting: Setting) -> tuple[Setting, float]:
        """Split into stages so that the slowest is as quick as possible; also return the pipeline's
        floor."""
        if setting.cuts:
            return setting, pipeline_floor(self, setting)
        key = setting.pp, setting.chunks, self.ranks_in_node(setting)
        if (cuts := self._cuts.get(key)) is None:
            times = tuple(self.times(setting)[:2].sum(0).tolist())
            cuts = self._cuts[key] = split_evenly(self.chain, setting.pp * setting.chunks, times)
        split = replace(setting, cuts=cuts)
        ranks = stage_ranks(setting.order, setting.pp, setting.chunks)
        span_key = *key, ranks.tobytes(), setting.order in WHOLE_BACKWARD_ORDERS
        if (span := self._spans.get(span_key)) is None:
            span = self._spans[span_key] = pipeline_floor(self, split)
        return split, span

    def ranks_in_node(self, setting: Setting) -> tuple[int, ...]:
        """Ranks of each of the chain's axes that share a node: times depend on nothing else."""
        axes, node = sending_axes(setting), self.job.cluster.node
        return tuple(max(1, min(size, node // stride)) for _, size, stride in axes if size > 1)

    def times(self, setting: Setting | None = None) -> Floats:
        """Return seconds [3, runs] for the axes of a setting, whatever its rows and offloading.

        Without a setting: seconds as if ranks of every axis were adjacent, which no setting beats.
        """
        base = self.chain.placement
        axes = sending_axes(Setting(base) if setting is None else replace(setting, placement=base))
        if setting is None:
            axes = tuple((axis, size, min(stride, 1)) for axis, size, stride in axes)
        key = None if setting is None else self.ranks_in_node(setting)
        if key not in self._known:
            tables = run_seconds(self.chain, axes, self.job.cluster)[1]
            fwd, bwd, _, re_fwd, re_bwd = (base.sum(1) for base in tables)
            seconds = fwd + re_fwd, bwd + np.minimum(0.0, re_bwd), np.maximum(0.0, re_bwd)
            self._known[key] = np.array(seconds)
        return self._known[key]


def step_bounds(
    pool: Candidates, clocks: Sequence[ChainTimes], laid: bool = True
) -> tuple[Floats, Floats]:
    """Lower bounds and estimates of the seconds of a step of each candidate, for any split into
    stages; also for any order of its axes where it is not `laid`.

    A rank computes its share of a step; the busiest rank computes at least the mean.  With one
    stage on each rank the bound adds how long some rank waits before and after, for any split.  The
    estimate is not a bound: it sorts candidates.  It assumes equal stages, and bubbles by the
    closed forms of orders: one microbatch's share for each other rank, divided by the stages on a
    rank, and a third of that where backwards are split.
    """
    fwd, bwd, longest = _units(pool, clocks, laid)
    total, share = fwd + bwd, (fwd + bwd) / pool.pp / clocks[0].job.relative_speed
    busy = pool.passes * np.maximum(share, longest)
    one_stage = (pool.chunks == 1) & (pool.pp > 1)
    waits = _flushed_seconds(total, pool.pp, pool.passes)
    first_forward = fwd * _first_slice_share(pool.chain.placement.slices)
    last = _last_rank_seconds(first_forward, total - first_forward, pool.pp, pool.passes)
    waits = np.where(_has_order(pool, ONE_STAGE_ORDERS), waits, last)
    idle = (
        np.where(_has_order(pool, WHOLE_BACKWARD_ORDERS), 1.0, 1 / 3) * (pool.pp - 1) / pool.chunks
    )
    estimate: Floats = share * (pool.passes + idle)
    return np.where(one_stage, np.maximum(busy, waits), busy), estimate


def _units(
    pool: Candidates, clocks: Sequence[ChainTimes], laid: bool
) -> tuple[Floats, Floats, Floats]:
    """Seconds of all units, forward and backward, and of the longest unit, for each candidate."""
    settings, setting_index = (
        _distinct_settings(pool, clocks) if laid else ([None], np.zeros(len(pool), dtype=np.int64))
    )
    row_of, samples = _distinct(pool.one, setting_index)
    pairs = zip(pool.one[samples].tolist(), setting_index[samples].tolist())
    table = np.array([_unit_times(clocks[chain], settings[index]) for chain, index in pairs])
    forward, backward, longest = table[row_of].T
    return forward, backward, longest


def _unit_times(clock: ChainTimes, setting: Setting | None) -> tuple[float, float, float]:
    """Seconds of all units of one chain, and of its longest unit.

    Each chain has runs of its own: units that are equal for few rows may differ for many.
    """
    times = clock.times(setting)[:2]
    forward, backward = times @ [run.count for run in clock.chain.runs]
    return forward, backward, times.sum(0).max()


def _distinct_settings(
    pool: Candidates, clocks: Sequence[ChainTimes]
) -> tuple[list[Setting | None], Ints]:
    """List settings whose units take different times, and the index of each candidate's setting."""
    row_of, samples = _distinct(pool.pp, pool.axes)
    settings: list[Setting | None] = []
    numbers, setting_index = dict[tuple[int, ...], int](), []
    for sample in samples.tolist():
        key = clocks[0].ranks_in_node(setting := pool.setting(sample))
        if key not in numbers:
            settings.append(setting)
        setting_index.append(numbers.setdefault(key, len(numbers)))
    return settings, np.array(setting_index, dtype=np.int64)[row_of]


def _has_order(pool: Candidates, orders: Sequence[str]) -> NDArray[np.bool_]:
    """Find the candidates whose order is one of `orders`."""
    matches: NDArray[np.bool_] = np.array([name in orders for name in pool.names])[pool.order]
    return matches


def _first_slice_share(slices: int) -> float:
    """Share of the mean slice's time that the first slice takes at least: attention to fewer
    keys."""
    return 2 / (slices + 1)


def _flushed_seconds(total: Floats, ranks: Ints, micro: Ints) -> Floats:
    """Seconds of a pipeline whose backwards are not split, for any split into stages.

    The first microbatch goes down to a rank, the rank computes, and the last one goes back up: the
    rank at place s needs sum(t[:s]) + m t[s].  The minimum over all splits makes all of these
    equal.  With more microbatches than ranks 1F1B needs more: all of the first microbatch, then the
    microbatches in flight below s, then s alone: T + sum(t[s:]) + (m - 1 - p + s) t[s]; these are
    all equal for equal stages.
    """
    down = total / (1 - (1 - 1 / micro) ** ranks)
    return np.where(micro > ranks, np.maximum(down, total * (1 + (micro - 1) / ranks)), down)


def _last_rank_seconds(forward: Floats, backward: Floats, ranks: Ints, micro: Ints) -> Floats:
    """Seconds of any pipeline with one stage on each rank, for any split into stages.

    The last rank waits for the first forward, F + (m - 1) t.  If its own t is small, the other
    ranks have more than the mean, m (T - t) / (p - 1).  The smallest bound has the t that makes
    both equal.
    """
    total = forward + backward
    last = np.maximum(0.0, (micro * total - forward * (ranks - 1)) / (micro * ranks - ranks + 1))
    bound: Floats = forward + (micro - 1) * last
    return bound


def replica_floor(pool: Candidates, job: Job, laid: bool = True) -> tuple[Floats, Floats]:
    """Lower bounds of the seconds in which each candidate's replicas send, for any split into
    stages; also for any order of its axes where it is not `laid`.

    The first result is sent while ranks compute, so a step takes at least as long; the second is
    sent after the last backward, and includes the update.  The fullest rank has at least the mean
    of the parameters.
    """
    one, counts = pool.chain.placement, _count_parameters(pool.chain)
    numels = np.array([counts[0] - counts[1], counts[1]], dtype=float)
    ranks = job.ranks // (one.tp * one.cp)

    @cache
    def summed(pp: int, axes: int) -> Floats:
        """Seconds of an all-reduce, of a reduce-scatter, of an all-gather."""
        setting = Setting(one, ranks // pp, pp, axes=AXIS_ORDERS[axes])
        return np.array(
            [_collective_floor(op, pool.chain, setting, job) for op in (SUM, SCATTER, GATHER)]
        )

    @cache
    def updated(hosted: bool, pp: int) -> list[float]:
        """Seconds of the update, by stage of ZeRO."""
        hosted_placement = replace(one, offload="optimizer" if hosted else "none")
        setting = Setting(hosted_placement, ranks // pp, pp)
        settings = (replace(setting, zero=zero) for zero in range(4))
        return [optimizer_seconds(zero, numels / pp, job.cluster, job.recipe) for zero in settings]

    hosted = np.array([chain.placement.offloads_optimizer for chain in pool.chains])[pool.one]
    row_of, rows = _distinct(pool.pp, pool.axes, hosted)
    sums, updates = [], []
    for pp, axes, offloaded in zip(*(one[rows].tolist() for one in (pool.pp, pool.axes, hosted))):
        axis_orders = (axes,) if laid else pool.axis_orders[pp]
        sums.append(np.min([summed(pp, order) for order in axis_orders], 0))
        updates.append(updated(offloaded, pp))
    sent, zero = np.array(sums)[row_of], pool.zero
    once = sent[:, 1] + sent[:, 2]
    after = np.select([zero == 0, zero < 3], [sent[:, 0], once]) + np.array(updates)[row_of, zero]
    scattered, every_pass = (pool.passes - 1) * sent[:, 1], pool.passes * (once + sent[:, 2])
    return np.select([zero == 2, zero == 3], [scattered, every_pass]), after


SUM, SCATTER, GATHER = "all_reduce", "reduce_scatter", "all_gather"


def _distinct(*columns: NDArray[Any]) -> tuple[Ints, Ints]:
    """Number the distinct combinations of columns: the number of each row, and a row of each."""
    key = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        key = key * (int(column.max(initial=0)) + 1) + column
    _, samples, row_of = np.unique(key, return_index=True, return_inverse=True)
    return row_of, samples


def _collective_floor(op: str, chain: Chain, setting: Setting, job: Job) -> float:
    """Seconds of one collective of replicas over the mean share of all parameters."""
    placement, recipe = setting.placement, job.recipe
    stride, ranks = replica_stride(setting, job.cluster), setting.dp * placement.cp
    size = (recipe.parameter if op == GATHER else recipe.gradient) / setting.pp
    numel, expert_numel = _count_parameters(chain)
    seconds = _collective_seconds(job.cluster, op, (numel - expert_numel) * size, ranks, stride)
    if not expert_numel:
        return seconds
    return seconds + _collective_seconds(
        job.cluster, op, expert_numel * size, ranks // placement.ep, stride * placement.ep
    )


@lru_cache(100_000)
def _collective_seconds(cluster: Cluster, op: str, size: float, ranks: int, stride: int) -> float:
    return collective_seconds(cluster, op, size, ranks, stride)


def _count_parameters(chain: Chain) -> tuple[int, int]:
    """Parameters of a chain (tied ones once), and the experts' parameters among them."""
    tied = {max(pair) for pair in chain.tied}
    runs = [run for index, run in enumerate(chain.runs) if index not in tied]
    return (
        sum(run.unit.numel * run.count for run in runs),
        sum(run.unit.expert_numel * run.count for run in runs),
    )


def _count_sharded(chain: Chain, replicas: int, experts: int) -> float:
    """Parameters of a chain (tied ones once) in the fullest shard of so many replicas."""
    shards = replicas, max(1, replicas // experts)
    tied, counts = {max(pair) for pair in chain.tied}, [run.count for run in chain.runs]
    untied = [count * (index not in tied) for index, count in enumerate(counts)]
    return float((untied @ padded_parameters(chain, shards) / shards).sum())


def bytes_floor(pool: Candidates, job: Job) -> Floats:
    """Lower bound of the bytes of the fullest rank of each candidate, for any split into stages.

    The fullest rank holds at least the mean: of the state, and of what one microbatch saves where
    all units are recomputed, less gradients that may not exist yet.
    """
    recipe, placement = job.recipe, pool.chain.placement
    numel, _ = _count_parameters(pool.chain)
    rows = []
    for chain in pool.chains:
        place = chain.placement
        kept = sum(
            _least_saved(run.unit, place.offloads_activations) * run.count for run in chain.runs
        )
        peak = min(run.unit.peak for run in chain.runs)
        rows.append(
            (recipe.state(place.offloads_optimizer), max(0.0, kept - numel * recipe.gradient), peak)
        )
    state, kept, peak = np.array(rows, dtype=float)[pool.one].T
    replicas, index = np.unique(pool.dp, return_inverse=True)
    shards = [_count_sharded(pool.chain, count, placement.ep) for count in replicas.tolist()]
    sharded, state_bytes = np.array(shards)[index], np.zeros(len(pool))
    for stage, size in enumerate((state, recipe.gradient, recipe.parameter)):
        state_bytes += size * np.where(pool.zero > stage, sharded, numel)
    floor: Floats = (state_bytes + kept) / pool.pp + peak
    return floor


def _least_saved(unit: Unit, parked: bool) -> float:
    return 0.0 if parked and unit.input < unit.kept else min(unit.kept, unit.input)


# -- one candidate ---------------------------------------------------------------------------------


def pipeline_floor(clock: ChainTimes, setting: Setting) -> float:
    """Lower bound of the seconds of the pipeline of a setting with stages, for any order.

    Each rank waits for the first microbatch to reach its first stage, computes, and, where
    backwards are not split, waits until the last one has gone back to the first stage of the model.
    """
    unit_forward, unit_backward, unit_again = clock.times(setting)
    first_share = _first_slice_share(setting.placement.slices)
    counts, recomputed = units_by_stage(clock.chain, setting.cuts, setting.again)
    forward, backward = counts @ unit_forward, counts @ unit_backward + recomputed @ unit_again
    rank = stage_ranks(setting.order, setting.pp, setting.chunks)
    busy = np.bincount(rank, forward + backward, setting.pp) * setting.passes
    unsplit = setting.order in WHOLE_BACKWARD_ORDERS
    warmup = forward[: setting.pp] + (backward[: setting.pp] if unsplit else 0.0)
    waits = np.concatenate([[0.0], np.cumsum(warmup)[:-1]]) * first_share
    return float((busy + waits).max())


def critical_floor(clock: ChainTimes, setting: Setting) -> float:
    """Lower bound of the seconds of the pipeline of a setting with stages, sends included, by paths
    that were critical for other settings; 0 where backwards are split or sequences sliced."""
    if setting.order not in WHOLE_BACKWARD_ORDERS or setting.placement.slices > 1:
        return 0.0
    counts, _ = units_by_stage(clock.chain, setting.cuts)
    forward, backward = clock.times(setting)[:2] @ counts.T
    send = sum(
        seconds for _, seconds in stage_send_seconds(clock.chain, setting, clock.job.cluster)
    )
    sizes = setting.pp, setting.chunks, setting.micro
    return known_paths_floor(setting.order, *sizes, forward, backward, send)
