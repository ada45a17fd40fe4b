"""Price of a setting: seconds of a step by cause, and bytes of the rank of each pipeline place.

The search calls this for every candidate that survives its bounds.  The file goes from seconds of
one unit over a step (its critical path, what replicas send, the update) to bytes (state, in-flight
microbatches, the fullest moment of a unit).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from schedlang.passes.planner.critical_path import (
    KNOWN_IN_FLIGHT,
    CriticalPath,
    count_in_flight,
    find_critical_path,
    stage_ranks,
)
from schedlang.passes.planner.even_stages import split_evenly
from schedlang.passes.planner.values import Chain, Price, Recipe, Setting, Unit, Work
from schedlang.passes.simulate.node_cluster import Nodes

if TYPE_CHECKING:
    from schedlang.passes.simulate.machine import Cluster

Array = NDArray[np.float64]
Causes = Mapping[str, float]  # seconds by cause, or weights by cause
AxisStrides = tuple[tuple[str, int, int], ...]  # axes: name, number of ranks, stride
NO_WEIGHTS: Causes = {}
DEFAULT_RECIPE = Recipe()
COMPUTING, HOST = "computing", "host"

# -- one unit --------------------------------------------------------------------------------------


def unit_seconds(unit: Unit, setting: Setting, cluster: Cluster) -> tuple[float, float, float]:
    """Seconds of one microbatch: forward, backward, and the extra seconds of recomputation."""
    ahead, back, _, fore, hind = (
        sum(one.values()) for one in unit_seconds_by_cause(unit, sending_axes(setting), cluster)
    )
    return ahead, back, fore + hind


def sending_axes(setting: Setting) -> AxisStrides:
    """Return the axes along which units send."""
    at = setting.placement
    sizes = {"tp": at.tp, "cp": at.cp, "ep": at.ep}
    found = tuple((axis, size, setting.stride(axis)) for axis, size in sizes.items())
    return (*found, (HOST, 1, 0)) if at.offloads_activations else found


def replica_stride(setting: Setting, cluster: Cluster) -> int:
    """Return the stride from one replica to the next.

    Two data axes count as one axis, of which equally many ranks share a node.
    """
    sizes = {"dp": setting.dp, "cp": setting.placement.cp}
    lie = [(setting.stride(axis), size) for axis, size in sizes.items() if size > 1]
    if len(lie) < 2 or isinstance(cluster, Nodes):
        return max(lie, default=(1, 1))[0]
    shared = math.prod(min(size, max(1, cluster.node // far)) for far, size in lie)
    return max(1, cluster.node // shared)


@lru_cache(4096)
def unit_seconds_by_cause(unit: Unit, where: AxisStrides, cluster: Cluster) -> tuple[Causes, ...]:
    """Seconds by cause: a unit's forward, its backward, the weight gradients within its backward,
    and the extra seconds of its forward and of its backward where it is recomputed.

    Weight gradients are half of a backward's matrix products: a backward has two for each product
    of the forward.  Of a recomputed unit only its input is offloaded to the host.
    """
    sizes = {axis: (ranks, apart) for axis, ranks, apart in where}
    ahead, back = (_work_seconds(work, sizes, cluster) for work in (unit.forward, unit.backward))
    fore, hind = dict[str, float](), dict(ahead)
    if HOST in sizes and unit.input < unit.kept:
        copies = [cluster.copy_seconds(size) for size in (unit.kept, unit.input)]
        for found, more in ((ahead, fore), (back, hind)):  # out during forward, in during backward
            beside = sum(found.values())
            whole, own = (copy - cluster.overlap * min(copy, beside) for copy in copies)
            found[HOST], more[HOST] = whole, own - whole
    every = unit.backward.operators
    products = Work(tuple(op for op in every if op.kind == "product" == (op.cause or op.kind)))
    half = {cause: took / 2 for cause, took in _work_seconds(products, sizes, cluster).items()}
    return ahead, back, half, fore, hind


def _work_seconds(
    work: Work, sizes: Mapping[str, tuple[int, int]], cluster: Cluster
) -> dict[str, float]:
    """Seconds of a stretch by cause; a ring's sends overlap with the computing of the stretch."""
    found: dict[str, float] = {}

    def add(cause: str, took: float) -> None:
        if took:
            found[cause] = found.get(cause, 0.0) + took

    for op in work.operators:
        start = cluster.operator_seconds(op.kind, 0.0, 0.0)
        took = cluster.operator_seconds(op.kind, op.flops, op.moved)
        add(op.cause or op.kind, op.count * (took - start))
        add("start", op.count * start)
    shown = 1.0
    if rings := [sent for sent in work.collectives if sent.op == "send"]:
        ring = sum(
            one.count * collective_seconds(cluster, "send", one.bytes, *sizes[one.axis])
            for one in rings
        )
        shown = 1 - cluster.overlap * min(1.0, sum(found.values()) / max(ring, 1e-12))
    for sent in work.collectives:
        often = sent.count * (shown if sent.op == "send" else 1)
        for cause, took in _sending(cluster, sent.axis, sent.op, sent.bytes, *sizes[sent.axis]):
            add(cause, often * took)
    return found


def _sending(
    cluster: Cluster, axis: str, op: str, size: float, ranks: int, apart: int
) -> tuple[tuple[str, float], tuple[str, float]]:
    """Seconds of a collective: of its bytes, and of its start, which depends on the ranks alone."""
    start = collective_seconds(cluster, op, 0.0, ranks, apart)
    took = collective_seconds(cluster, op, size, ranks, apart)
    return (axis, took - start), (f"{axis} start", start)


@lru_cache(100_000)
def collective_seconds(cluster: Cluster, op: str, size: float, ranks: int, apart: int) -> float:
    """Seconds of one collective, or of one message to a neighbour, along an axis."""
    return cluster.collective_seconds(op, size, ranks, apart)


# -- a step ----------------------------------------------------------------------------------------


def price(
    chain: Chain,
    setting: Setting,
    cluster: Cluster,
    recipe: Recipe = DEFAULT_RECIPE,
    weights: Causes = NO_WEIGHTS,
) -> Price:
    """Price a setting: seconds of a step, and bytes of the rank of each place.

    `weights` are factors by cause from a fit to measured runs; 1 for other causes.  Raises
    ValueError for a chain that is split into another number of stages than the setting has,
    OrderError for sizes that the order does not have, TypeError for unequal nodes.
    """
    step = _step(chain, setting, cluster, recipe, weights)
    own = {cause: float(took) for cause, took in zip(step.names, step.busiest * step.weight)}
    sending = {axis: own.pop(axis, 0.0) + own.pop(f"{axis} start", 0.0) for axis in SENDING_CAUSES}
    parts = {COMPUTING: sum(own.values())} | {axis: t for axis, t in sending.items() if t}
    if setting.pp > 1:
        parts["pp"] = step.way.sends * step.send
        parts["idle"] = step.span - sum(parts.values())
    parts["gradients"] = _total(step.data, weights)
    parts["optimizer"] = _total(step.update, weights)
    fullest = peak_bytes(chain, setting, recipe, step.made, step.again)
    return Price(sum(parts.values()), fullest, parts)


def step_seconds_by_cause(
    chain: Chain,
    setting: Setting,
    cluster: Cluster,
    recipe: Recipe = DEFAULT_RECIPE,
    weights: Causes = NO_WEIGHTS,
) -> dict[str, float]:
    """Seconds of a step by cause; their weighted sum is its price.  Overlap is negative.

    The seconds are those of the critical path under `weights`: the sum is a price under other
    weights only as long as these have the same critical path.
    """
    step = _step(chain, setting, cluster, recipe, weights)
    way, made = step.way, step.made
    found = dict.fromkeys(step.names, 0.0)
    ahead, inputs, weigh = (  # [slices, stages]
        one.reshape(len(made), -1).T.copy() for one in (way.forward, way.inputs, way.weights)
    )
    forward, backward, half, fore, hind = step.tables
    inputs[:, 0] = np.where(split_backward_stages(setting)[0], weigh[:, 0], inputs[:, 0])
    vector = (ahead @ made) @ forward + (inputs @ made) @ backward
    vector = vector + (ahead @ step.again) @ fore + (inputs @ step.again) @ hind
    vector = vector + ((weigh - inputs) * split_backward_stages(setting)) @ made @ half
    vector = (vector * slice_shares(step.names, setting.placement.slices)).sum(0)
    found |= {cause: float(took) for cause, took in zip(step.names, vector)}
    for cause, took in step.sent:
        found[cause] = found.get(cause, 0.0) + took * way.sends
    for more in (step.data, step.update):
        for cause, took in more.items():
            found[cause] = found.get(cause, 0.0) + took
    return found


SENDING_CAUSES = ("tp", "cp", "ep", HOST)


@dataclass(frozen=True)
class _Step:
    """Intermediate values of the price of a step.

    names        causes of units
    tables       seconds of one unit of each run, as `run_seconds` gives them
    made, again  units of each run at each stage, and recomputed ones among them [stages, runs]
    busiest      seconds of the rank with most work [causes]
    """

    names: tuple[str, ...]
    weight: Array
    tables: tuple[Array, ...]
    made: Array
    again: Array
    busiest: Array
    way: CriticalPath
    span: float
    send: float
    sent: tuple[tuple[str, float], ...]
    data: Causes
    update: Causes


def _step(
    chain: Chain, setting: Setting, cluster: Cluster, recipe: Recipe, weights: Causes
) -> _Step:
    check_equal_ranks(cluster)
    names, tables = run_seconds(chain, sending_axes(setting), cluster)
    weight = np.array([weights.get(name, 1.0) for name in names])
    shares = slice_shares(names, setting.placement.slices)
    ahead, back, weigh, fore, hind = (one @ (shares * weight).T for one in tables)
    stages = setting.pp * setting.chunks
    cuts = setting.cuts or split_evenly(chain, stages, tuple((ahead + back).mean(1).tolist()))
    if len(cuts) != stages:
        raise ValueError(f"{len(cuts)} stages are cut, and there are {stages}")
    made, again = units_by_stage(chain, cuts, setting.again)
    sent = stage_send_seconds(chain, setting, cluster)
    send = sum(took * weights.get(cause, 1.0) for cause, took in sent)
    f, whole = made @ ahead + again @ fore, made @ back + again @ hind
    w = weight_grad_seconds(setting, whole, made @ weigh)
    i = whole - w
    sizes = (setting.pp, setting.chunks, setting.micro)  # [stages, slices]
    way = find_critical_path(setting.order, *sizes, f, i, w, send)
    rank = stage_ranks(setting.order, setting.pp, setting.chunks)
    worst = int(np.bincount(rank, (f + i + w).sum(1), setting.pp).argmax())
    mine = rank == worst
    once, more = made[mine].sum(0), again[mine].sum(0)
    forward, backward, _, out, home = tables
    busiest = setting.passes * (once @ (forward + backward) + more @ (out + home))
    held = parameters_by_place(chain, made, rank, setting.pp).max(0)
    units, by_cause = round(float(once.sum())), dict(zip(names, busiest.tolist()))
    data = dict(replica_seconds(setting, held, units, cluster, recipe, by_cause, weights))
    for cause, took in tied_grad_seconds(chain, setting, cluster, recipe, made, rank):
        data[cause] = data.get(cause, 0.0) + took
    span = way.seconds(f, i, w, send)
    update = {"optimizer": optimizer_seconds(setting, held, cluster, recipe)}
    return _Step(names, weight, tables, made, again, busiest, way, span, send, sent, data, update)


def split_backward_stages(setting: Setting, again: Array | None = None) -> NDArray[np.bool_]:
    """Find stages whose backward runs in two halves, if the order has halves.

    Stages whose weights are gathered from ZeRO shards do not, nor do stages that recompute units
    (`again`; default: the setting's).
    """
    if again is None:
        again = np.array(setting.again or (0,) * setting.pp * setting.chunks)
    gathered = setting.zero > 0 and setting.dp > 1
    found: NDArray[np.bool_] = (again == 0) & (not gathered)
    return found


def weight_grad_seconds(setting: Setting, backward: Array, weights: Array) -> Array:
    """Seconds of weight gradients that each stage runs in a second half [stages, slices].

    The first stage's backward is all second half: its inputs need no gradients.
    """
    found: Array = split_backward_stages(setting)[:, None] * weights
    found[0] = np.where(split_backward_stages(setting)[0], backward[0], 0.0)
    return found


def check_equal_ranks(cluster: Cluster) -> None:
    """Raise TypeError for unequal nodes, which `planner.unlike` prices."""
    if isinstance(cluster, Nodes):
        raise TypeError(f"{cluster.text()}: this assumes equal ranks; `search` does not")


@lru_cache(1024)
def run_seconds(
    chain: Chain, where: AxisStrides, cluster: Cluster
) -> tuple[tuple[str, ...], tuple[Array, ...]]:
    """Seconds of one unit of each run by cause [runs, causes], five tables: forward, backward,
    weight gradients within backward, extra forward and extra backward of recomputation."""
    each = [unit_seconds_by_cause(run.unit, where, cluster) for run in chain.runs]
    names = tuple(sorted({cause for five in each for one in five for cause in one}))
    tables = [[[one.get(name, 0.0) for name in names] for one in five] for five in each]
    found = np.array(tables).reshape(len(each), 5, len(names)).transpose(1, 0, 2)
    return names, tuple(found)


def slice_shares(names: tuple[str, ...], slices: int) -> Array:
    """Seconds of each slice relative to their mean, by cause [slices, causes]."""
    later = 2 * np.arange(1, slices + 1) / (slices + 1)
    return np.array([later if name == "attention" else np.ones(slices) for name in names]).T


def stage_send_seconds(
    chain: Chain, setting: Setting, cluster: Cluster
) -> tuple[tuple[str, float], ...]:
    """Seconds of the largest send from a stage to the next, by cause."""
    if setting.pp < 2:
        return ()
    size = max(run.unit.output for run in chain.runs)
    return _sending(cluster, "pp", "send", size, setting.pp, setting.stride("pp"))


def _total(found: Causes, weights: Causes) -> float:
    return float(sum(took * weights.get(cause, 1.0) for cause, took in found.items()))


# -- stages ----------------------------------------------------------------------------------------


def units_by_stage(
    chain: Chain, cuts: tuple[int, ...], again: tuple[int, ...] = ()
) -> tuple[Array, Array]:
    """Units of each run at each stage [stages, runs], and the recomputed ones among them.

    A unit that would not save less by recomputation is not recomputed.
    """
    ends = np.cumsum([run.count for run in chain.runs])
    begins = ends - [run.count for run in chain.runs]
    last = np.cumsum(cuts)
    if last[-1] != ends[-1]:
        raise ValueError(f"the cuts have {last[-1]} units, and there are {ends[-1]}")
    first = last - cuts

    def within(high: NDArray[np.int64]) -> Array:
        over = np.minimum(high[:, None], ends) - np.maximum(first[:, None], begins)
        found: Array = np.maximum(over, 0).astype(np.float64)
        return found

    more = np.minimum(again, cuts) if again else np.zeros(len(cuts), dtype=np.int64)
    spares = np.array([run.unit.input < run.unit.kept for run in chain.runs])
    return within(last), within(first + more) * spares


# -- data axes -------------------------------------------------------------------------------------


def parameters_by_place(chain: Chain, made: Array, rank: NDArray[np.int64], places: int) -> Array:
    """Parameters of the rank of each place [places, 2]: replicated ones, and those of experts.

    A rank holds tied parameters once.
    """
    units = [run.unit for run in chain.runs]
    each = np.array([[u.numel - u.expert_numel, u.expert_numel] for u in units], dtype=float)
    found = np.zeros((places, 2))
    np.add.at(found, rank, made @ each)
    for first, second in chain.tied:
        both = _has(made, rank, first) & _has(made, rank, second)
        found[sorted(both), 0] -= min(units[first].numel, units[second].numel)
    return found


def _has(made: Array, rank: NDArray[np.int64], run: int) -> set[int]:
    """Places that have units of a run."""
    return set(rank[made[:, run] > 0].tolist())


def replica_seconds(
    setting: Setting,
    held: Array,
    units: int,
    cluster: Cluster,
    recipe: Recipe,
    busiest: Causes,
    weights: Causes,
) -> Causes:
    """Seconds of replicas' collectives that are not hidden, and of ZeRO's copies, by cause.

    Without ZeRO: one all-reduce a step.  Stage 1: its two halves, a reduce-scatter of gradients and
    an all-gather of parameters (Rajbhandari et al. 2020).  From stage 2 on gradients are
    reduce-scattered in every microbatch, in stage 3 parameters are gathered twice, unit by unit.
    Of these collectives and the computing the shorter is hidden as far as the cluster overlaps
    them.  The ranks of context parallelism take part as replicas.
    """
    at, zero = setting.placement, setting.zero
    replicas = setting.dp * at.cp
    apart = replica_stride(setting, cluster)
    places = (replicas, apart), (replicas // at.ep, apart * at.ep)

    def took(op: str, size: int, often: float = 1) -> dict[str, float]:
        found: dict[str, float] = {}
        for number, (ranks, far) in zip(held.tolist(), places):
            if number:
                buckets = units if zero > 2 else math.ceil(number / BUCKET_NUMEL)
                each = _sending(cluster, "dp", op, number * size / buckets, ranks, far)
                for cause, one in each:
                    found[cause] = found.get(cause, 0.0) + often * buckets * one
        return found

    def both(*found: Causes) -> dict[str, float]:
        return {c: sum(one.get(c, 0.0) for one in found) for c in ("dp", "dp start")}

    if replicas == 1:
        return {}
    if zero == 0:
        return took("all_reduce", recipe.gradient)
    once = both(took("reduce_scatter", recipe.gradient), took("all_gather", recipe.parameter))
    if zero == 1:
        return once
    scattered = took("reduce_scatter", recipe.gradient, setting.passes - (zero == 2))
    often = 2 * setting.passes * (zero > 2)
    beside = both(scattered, took("all_gather", recipe.parameter, often))
    after = once if zero == 2 else {}
    share = cluster.overlap
    computing = {c: t for c, t in busiest.items() if c not in ALL_SENDING_CAUSES}
    if _total(beside, weights) <= _total(computing, weights):
        found = both(after, {cause: (1 - share) * took for cause, took in beside.items()})
    else:
        hidden = {cause: -share * took for cause, took in computing.items()}
        found = both(after, beside) | hidden
    if copied := _copied(setting, held, recipe):
        found["other"] = found.get("other", 0.0) + cluster.operator_seconds("other", 0.0, copied)
    return found


def _copied(setting: Setting, held: Array, recipe: Recipe) -> float:
    """Bytes that ZeRO stage 3 copies in a step, as torch's `fully_shard` does.

    A rank casts its shard to the parameters' dtype and copies it to where it is gathered; the full
    tensor is copied out of the gathered buffer; both happen twice.  Gradients are copied into one
    buffer, and shards of them are accumulated in place of full ones.
    """
    if setting.zero < 3:
        return 0.0
    size, gradient, split = recipe.parameter, recipe.gradient, zero_shards(setting)
    master = bool(recipe.master)
    gathered = 2 * size + (2 * size + master * (recipe.master + size)) / split
    laid = (not master) * (size + gradient)  # with masters they are cast for accumulation
    each = np.maximum(0.0, 2 * gathered + laid - 3 * gradient * (1 - 1 / split))
    return float(setting.passes * (held @ each))


def tied_grad_seconds(
    chain: Chain,
    setting: Setting,
    cluster: Cluster,
    recipe: Recipe,
    made: Array,
    rank: NDArray[np.int64],
) -> Iterator[tuple[str, float]]:
    """Seconds of all-reduces of tied gradients between two places, by cause."""
    for first, second in chain.tied:
        one, other = (_has(made, rank, run) for run in (first, second))
        if one and other and not one & other:
            size = min(chain.runs[at].unit.numel for at in (first, second)) * recipe.gradient
            far = setting.stride("pp") * abs(min(one) - min(other))
            yield from _sending(cluster, "pp", "all_reduce", size, 2, far)


BUCKET_NUMEL = 40e6  # elements that replicas reduce at a time, as in Megatron-LM
ALL_SENDING_CAUSES = tuple(name for axis in SENDING_CAUSES for name in (axis, f"{axis} start"))


def optimizer_seconds(setting: Setting, held: Array, cluster: Cluster, recipe: Recipe) -> float:
    """Seconds of the optimizer: state is read and written, gradients read, parameters written.

    With state on the host its processor does the same at the pace of the link: gradients and
    masters come over it, and masters go back.
    """
    share = float((held / zero_shards(setting)).sum() if setting.zero else held.sum())
    if setting.placement.offloads_optimizer:
        value = recipe.master or recipe.parameter
        each = 2 * recipe.moments + 2 * recipe.gradient + 3 * value
        return cluster.copy_seconds(share * each)
    each = 2 * (recipe.moments + recipe.master) + recipe.gradient + recipe.parameter
    return cluster.operator_seconds("other", 0.0, each * share)


def zero_shards(setting: Setting) -> Array:
    """Number of ranks over which ZeRO shards parameters, and that for experts' parameters."""
    return np.array([setting.dp, max(1.0, setting.dp // setting.placement.ep)], dtype=float)


# -- bytes -----------------------------------------------------------------------------------------


def peak_bytes(
    chain: Chain, setting: Setting, recipe: Recipe, made: Array, again: Array
) -> tuple[float, ...]:
    """Bytes of the rank of each place at its fullest moment."""
    units = [run.unit for run in chain.runs]
    rank = stage_ranks(setting.order, setting.pp, setting.chunks)
    kept, less, most, enters, waiting = np.array(
        [[one.kept, one.input, one.peak, one.entering, one.waiting] for one in units]
    ).T
    back, coming = kept - less, np.zeros(len(units))
    # the next unit's activations are there too, or still leaving
    if setting.placement.offloads_activations:
        parked, inputs = (less < kept) * kept, (less < kept) * less
        coming = 2 * parked
        kept, most = kept - parked, most + coming
        less = np.minimum(less, kept)
        back = back + 3 * inputs - 2 * parked  # recomputed units offload only their inputs
        waiting = waiting + parked  # activations reloaded for a first half stay for the second
    number, spread = np.array([[unit.numel, unit.expert_numel] for unit in units]).T
    gathered = number - spread * (setting.dp <= setting.placement.ep)  # experts without replicas
    once = most + gathered * 2.0 * recipe.parameter * (setting.zero > 2)  # this unit and the next
    found = state_bytes(chain, setting, recipe, made, rank)
    each = np.array([kept, less, once, enters, waiting, back, coming])
    grown = gradient_bytes(chain, setting, recipe, made, rank)
    return tuple((found + activation_bytes(setting, made, again, each, grown)).tolist())


def gradient_bytes(
    chain: Chain, setting: Setting, recipe: Recipe, made: Array, rank: NDArray[np.int64]
) -> Array:
    """Bytes of gradients of the units of each run at each stage [stages, runs].

    A tied parameter that a rank has at two stages counts at the later one: its backward runs first.
    """
    units = [run.unit for run in chain.runs]
    sizes = np.array([[unit.numel - unit.expert_numel, unit.expert_numel] for unit in units])
    split = zero_shards(setting) if setting.zero > 1 else np.ones(2)
    each = (sizes / split).sum(1) * float(recipe.gradient)
    found: Array = made * each
    for first, second in chain.tied:
        shared = np.isin(rank, rank[made[:, second] > 0])
        found[:, first] -= shared * made[:, first] * min(each[first], each[second])
    return found


def activation_bytes(
    setting: Setting, made: Array, again: Array, each: Array, grown: Array
) -> Array:
    """Bytes of in-flight microbatches and of the fullest moment of a unit, for each place.

    They are added to all gradients, `grown` [stages, runs], less those that do not exist by then.

    Rows of `each`, of one unit of each run: bytes saved for its backward; bytes saved where it is
    recomputed; the most besides these; what the first unit of a stage saves besides; what waits
    between halves of a backward; what recomputation brings back; and the part of `most` that is
    reloaded already where backwards wait for second halves.
    """
    kept, less, most, enters, waiting, back, coming = each
    sizes = setting.order, setting.pp, setting.micro, setting.chunks
    rank = stage_ranks(setting.order, setting.pp, setting.chunks)
    stages = np.arange(len(made))
    first = (made > 0).argmax(1)
    entering = np.where(stages > 0, enters[first], 0.0)
    own = made * kept - again * (kept - less)
    until = own.cumsum(1) + entering[:, None]
    whole = until[:, -1]  # of one microbatch
    last = np.where(made > again, until, -np.inf)
    once = np.where(again > 0, until - own + again * less + back, -np.inf)
    often = again.sum(1)
    rests = (made @ waiting) * (often == 0)  # recomputation serves both halves at once
    mine = grown.sum(1)
    halves = tuple(split_backward_stages(setting, often).tolist())
    slices = setting.placement.slices
    flying, waits, there = count_in_flight(*sizes, whole, rests, slices, halves, mine)
    alone = (made @ (coming > 0) < 2) / 2  # no next unit
    most = most - coming * np.maximum(waits * rests > 0, alone)[:, None]
    moments = np.maximum(last, once) + most - whole[:, None]
    early = (moments - grown.cumsum(1) + grown).max(1)  # earlier units have no gradients yet
    missing = mine * (1 - there)
    held = np.bincount(rank, flying * whole + waits * rests - missing, setting.pp)
    fullest = np.full(setting.pp, -np.inf)
    np.maximum.at(fullest, rank, np.where(there > 0, moments.max(1), early + missing))
    found: Array = held + fullest
    if setting.chunks > 1 or setting.order not in KNOWN_IN_FLIGHT:
        return found
    first_back = flying * whole + early, found - whole
    return np.where(flying >= setting.passes, np.maximum(*first_back), found)


def state_bytes(
    chain: Chain, setting: Setting, recipe: Recipe, made: Array, rank: NDArray[np.int64]
) -> Array:
    """Bytes of parameters, gradients and optimizer state of each place, as ZeRO shards them."""
    held = parameters_by_place(chain, made, rank, setting.pp)
    split, whole = (held / zero_shards(setting)).sum(1), held.sum(1)
    sizes = (recipe.state(setting.placement.offloads_optimizer), recipe.gradient, recipe.parameter)
    found: Array = sum(
        (size * (split if setting.zero > at else whole) for at, size in enumerate(sizes)),
        np.zeros(setting.pp),
    )
    return found
