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
    stages_on_ranks,
)
from schedlang.passes.planner.even_stages import split_evenly
from schedlang.passes.planner.stage_contents import (
    crosswise_parameters,
    has_run,
    padded_parameters,
    parameters_by_place,
    split_backward_stages,
    units_by_stage,
    zero_shards,
)
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
    forward, backward, _, again_forward, again_backward = (
        sum(part.values()) for part in unit_seconds_by_cause(unit, sending_axes(setting), cluster)
    )
    return forward, backward, again_forward + again_backward


def sending_axes(setting: Setting) -> AxisStrides:
    """Return the axes along which units send."""
    placement = setting.placement
    sizes = {"tp": placement.tp, "cp": placement.cp, "ep": placement.ep}
    axes = tuple((axis, size, setting.stride(axis)) for axis, size in sizes.items())
    return (*axes, (HOST, 1, 0)) if placement.offloads_activations else axes


def replica_stride(setting: Setting, cluster: Cluster) -> int:
    """Return the stride from one replica to the next.

    Two data axes count as one axis, of which equally many ranks share a node.
    """
    sizes = {"dp": setting.dp, "cp": setting.placement.cp}
    strides = [(setting.stride(axis), size) for axis, size in sizes.items() if size > 1]
    if len(strides) < 2 or isinstance(cluster, Nodes):
        return max(strides, default=(1, 1))[0]
    shared = math.prod(min(size, max(1, cluster.node // stride)) for stride, size in strides)
    return max(1, cluster.node // shared)


@lru_cache(4096)
def unit_seconds_by_cause(unit: Unit, axes: AxisStrides, cluster: Cluster) -> tuple[Causes, ...]:
    """Seconds by cause: a unit's forward, its backward, the weight gradients within its backward,
    and the extra seconds of its forward and of its backward where it is recomputed.

    Weight gradients are half of a backward's matrix products: a backward has two for each product
    of the forward.  Of a recomputed unit only its input is offloaded to the host.
    """
    sizes = {axis: (ranks, stride) for axis, ranks, stride in axes}
    fwd, bwd = (_work_seconds(work, sizes, cluster) for work in (unit.forward, unit.backward))
    re_fwd, re_bwd = dict[str, float](), dict(fwd)
    if HOST in sizes and unit.input < unit.kept:
        copies = [cluster.copy_seconds(size) for size in (unit.kept, unit.input)]
        for base, extra in ((fwd, re_fwd), (bwd, re_bwd)):  # out during forward, in during backward
            busy = sum(base.values())
            kept_copy, input_copy = (copy - cluster.overlap * min(copy, busy) for copy in copies)
            base[HOST], extra[HOST] = kept_copy, input_copy - kept_copy
    operators = unit.backward.operators
    products = Work(tuple(op for op in operators if op.kind == "product" == (op.cause or op.kind)))
    half = {cause: time / 2 for cause, time in _work_seconds(products, sizes, cluster).items()}
    return fwd, bwd, half, re_fwd, re_bwd


def _work_seconds(
    work: Work, sizes: Mapping[str, tuple[int, int]], cluster: Cluster
) -> dict[str, float]:
    """Seconds of a stretch by cause; a ring's sends overlap with the computing of the stretch."""
    causes: dict[str, float] = {}

    def add(cause: str, seconds: float) -> None:
        if seconds:
            causes[cause] = causes.get(cause, 0.0) + seconds

    for op in work.operators:
        start = cluster.operator_seconds(op.kind, 0.0, 0.0)
        seconds = cluster.operator_seconds(op.kind, op.flops, op.moved)
        add(op.cause or op.kind, op.count * (seconds - start))
        add("start", op.count * start)
    exposed = 1.0
    if rings := [sent for sent in work.collectives if sent.op == "send"]:
        ring = sum(
            send.count * collective_seconds(cluster, "send", send.bytes, *sizes[send.axis])
            for send in rings
        )
        exposed = 1 - cluster.overlap * min(1.0, sum(causes.values()) / max(ring, 1e-12))
    for sent in work.collectives:
        count = sent.count * (exposed if sent.op == "send" else 1)
        for cause, seconds in _sending(cluster, sent.axis, sent.op, sent.bytes, *sizes[sent.axis]):
            add(cause, count * seconds)
    return causes


def _sending(
    cluster: Cluster, axis: str, op: str, size: float, ranks: int, stride: int
) -> tuple[tuple[str, float], tuple[str, float]]:
    """Seconds of a collective: of its bytes, and of its start, which depends on the ranks alone."""
    start = collective_seconds(cluster, op, 0.0, ranks, stride)
    total = collective_seconds(cluster, op, size, ranks, stride)
    return (axis, total - start), (f"{axis} start", start)


@lru_cache(100_000)
def collective_seconds(cluster: Cluster, op: str, size: float, ranks: int, stride: int) -> float:
    """Seconds of one collective, or of one message to a neighbour, along an axis."""
    return cluster.collective_seconds(op, size, ranks, stride)


# -- a step ----------------------------------------------------------------------------------------


def price(
    chain: Chain,
    setting: Setting,
    cluster: Cluster,
    recipe: Recipe = DEFAULT_RECIPE,
    weights: Causes = NO_WEIGHTS,
    seconds_only: bool = False,
) -> Price:
    """Price a setting: seconds of a step, and bytes of the rank of each place, if wanted.

    `weights` are factors by cause from a fit to measured runs; 1 for other causes.  Raises
    ValueError for a chain that is split into another number of stages than the setting has,
    OrderError for sizes that the order does not have, TypeError for unequal nodes.
    """
    step = _step(chain, setting, cluster, recipe, weights)
    sec = {cause: float(time) for cause, time in zip(step.names, step.busiest * step.weight)}
    sending = {axis: sec.pop(axis, 0.0) + sec.pop(f"{axis} start", 0.0) for axis in SENDING_CAUSES}
    parts = {COMPUTING: sum(sec.values())} | {axis: t for axis, t in sending.items() if t}
    if setting.pp > 1:
        parts["pp"] = step.way.sends * step.send
        parts["idle"] = step.span - sum(parts.values())
    parts["gradients"] = _total(step.data, weights)
    parts["optimizer"] = _total(step.update, weights)
    sizes = (chain, setting, recipe, step.made, step.again)
    peaks = () if seconds_only else tuple(peak_bytes(*sizes).tolist())
    return Price(sum(parts.values()), peaks, parts)


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
    path, counts = step.way, step.made
    causes = dict.fromkeys(step.names, 0.0)
    forwards, inputs, weight_grads = (  # [slices, stages]
        freq.reshape(len(counts), -1).T.copy() for freq in (path.forward, path.inputs, path.weights)
    )
    forward, backward, half, re_fwd, re_bwd = step.tables
    inputs[:, 0] = np.where(split_backward_stages(setting)[0], weight_grads[:, 0], inputs[:, 0])
    vector = (forwards @ counts) @ forward + (inputs @ counts) @ backward
    vector = vector + (forwards @ step.again) @ re_fwd + (inputs @ step.again) @ re_bwd
    vector = vector + ((weight_grads - inputs) * split_backward_stages(setting)) @ counts @ half
    vector = (vector * slice_shares(step.names, setting.placement.slices)).sum(0)
    causes |= {cause: float(seconds) for cause, seconds in zip(step.names, vector)}
    for cause, seconds in step.sent:
        causes[cause] = causes.get(cause, 0.0) + seconds * path.sends
    for part in (step.data, step.update):
        for cause, seconds in part.items():
            causes[cause] = causes.get(cause, 0.0) + seconds
    return causes


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
    fwd, bwd, w_grad, re_fwd, re_bwd = (table @ (shares * weight).T for table in tables)
    stages = setting.pp * setting.chunks
    cuts = setting.cuts or split_evenly(chain, stages, tuple((fwd + bwd).mean(1).tolist()))
    if len(cuts) != stages:
        raise ValueError(f"{len(cuts)} stages are cut, and there are {stages}")
    counts, again = units_by_stage(chain, cuts, setting.again)
    sent = stage_send_seconds(chain, setting, cluster)
    send = sum(seconds * weights.get(cause, 1.0) for cause, seconds in sent)
    f, full = counts @ fwd + again @ re_fwd, counts @ bwd + again @ re_bwd
    w = weight_grad_seconds(setting, full, counts @ w_grad)
    i = full - w
    sizes = (setting.pp, setting.chunks, setting.micro)  # [stages, slices]
    path = find_critical_path(setting.order, *sizes, f, i, w, send)
    rank = stage_ranks(setting.order, setting.pp, setting.chunks)
    worst = int(np.bincount(rank, (f + i + w).sum(1), setting.pp).argmax())
    on_worst = rank == worst
    busy, redone = counts[on_worst].sum(0), again[on_worst].sum(0)
    forward, backward, _, extra_fwd, extra_bwd = tables
    load = setting.passes * (busy @ (forward + backward) + redone @ (extra_fwd + extra_bwd))
    shards = zero_shards(setting) if setting.zero else (1, 1)
    numels = parameters_by_place(chain, counts, rank, setting.pp, shards).max(0)
    units, by_cause = round(float(busy.sum())), dict(zip(names, load.tolist()))
    data = dict(replica_seconds(setting, numels, units, cluster, recipe, by_cause, weights))
    places = chain, setting, cluster, recipe, counts, rank
    for cause, seconds in (*tied_grad_seconds(*places), *crosswise_seconds(*places)):
        data[cause] = data.get(cause, 0.0) + seconds
    span = path.seconds(f, i, w, send)
    update = {"optimizer": optimizer_seconds(setting, numels, cluster, recipe)}
    return _Step(names, weight, tables, counts, again, load, path, span, send, sent, data, update)


def weight_grad_seconds(setting: Setting, backward: Array, weights: Array) -> Array:
    """Seconds of weight gradients that each stage runs in a second half [stages, slices].

    The first stage's backward is all second half: its inputs need no gradients.
    """
    seconds: Array = split_backward_stages(setting)[:, None] * weights
    seconds[0] = np.where(split_backward_stages(setting)[0], backward[0], 0.0)
    return seconds


def check_equal_ranks(cluster: Cluster) -> None:
    """Raise TypeError for unequal nodes, which `planner.unlike` prices."""
    if isinstance(cluster, Nodes):
        raise TypeError(f"{cluster.text()}: this assumes equal ranks; `search` does not")


@lru_cache(1024)
def run_seconds(
    chain: Chain, axes: AxisStrides, cluster: Cluster
) -> tuple[tuple[str, ...], tuple[Array, ...]]:
    """Seconds of one unit of each run by cause [runs, causes], five tables: forward, backward,
    weight gradients within backward, extra forward and extra backward of recomputation."""
    unit_causes = [unit_seconds_by_cause(run.unit, axes, cluster) for run in chain.runs]
    names = tuple(sorted({cause for five in unit_causes for part in five for cause in part}))
    tables = [[[part.get(name, 0.0) for name in names] for part in five] for five in unit_causes]
    stacked = np.array(tables).reshape(len(unit_causes), 5, len(names)).transpose(1, 0, 2)
    return names, tuple(stacked)


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


def _total(causes: Causes, weights: Causes) -> float:
    return float(sum(seconds * weights.get(cause, 1.0) for cause, seconds in causes.items()))


# -- data axes -------------------------------------------------------------------------------------


def replica_seconds(
    setting: Setting,
    numels: Array,
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
    placement, zero = setting.placement, setting.zero
    replicas = setting.dp * placement.cp
    stride = replica_stride(setting, cluster)
    places = (replicas, stride), (replicas // placement.ep, stride * placement.ep)

    def took(op: str, size: int, count: float = 1) -> dict[str, float]:
        causes: dict[str, float] = {}
        for number, (ranks, group_stride) in zip(numels.tolist(), places):
            if number:
                buckets = units if zero > 2 else math.ceil(number / BUCKET_NUMEL)
                sends = _sending(cluster, "dp", op, number * size / buckets, ranks, group_stride)
                for cause, seconds in sends:
                    causes[cause] = causes.get(cause, 0.0) + count * buckets * seconds
        return causes

    def both(*causes: Causes) -> dict[str, float]:
        return {c: sum(part.get(c, 0.0) for part in causes) for c in ("dp", "dp start")}

    if replicas == 1:
        return {}
    if zero == 0:
        return took("all_reduce", recipe.gradient)
    once = both(took("reduce_scatter", recipe.gradient), took("all_gather", recipe.parameter))
    if zero == 1:
        return once
    scattered = took("reduce_scatter", recipe.gradient, setting.passes - (zero == 2))
    gathers = 2 * setting.passes * (zero > 2)
    overlapped = both(scattered, took("all_gather", recipe.parameter, gathers))
    after = once if zero == 2 else {}
    share = cluster.overlap
    computing = {c: t for c, t in busiest.items() if c not in ALL_SENDING_CAUSES}
    if _total(overlapped, weights) <= _total(computing, weights):
        causes = both(after, {cause: (1 - share) * took for cause, took in overlapped.items()})
    else:
        hidden = {cause: -share * took for cause, took in computing.items()}
        causes = both(after, overlapped) | hidden
    if copied := _copied(setting, numels, recipe):
        causes["other"] = causes.get("other", 0.0) + cluster.operator_seconds("other", 0.0, copied)
    return causes


def _copied(setting: Setting, numels: Array, recipe: Recipe) -> float:
    """Bytes that ZeRO stage 3 copies in a step, as torch's `fully_shard` does.

    A rank casts its shard to the parameters' dtype and copies it to where it is gathered; the full
    tensor is copied out of the gathered buffer; both happen twice.  Gradients are copied into one
    buffer, and shards of them are accumulated in place of full ones.
    """
    if setting.zero < 3:
        return 0.0
    size, gradient, split = recipe.parameter, recipe.gradient, np.array(zero_shards(setting))
    master = bool(recipe.master)
    gathered = 2 * size + (2 * size + master * (recipe.master + size)) / split
    accumulated = (not master) * (size + gradient)  # with masters they are cast for accumulation
    param_bytes = np.maximum(0.0, 2 * gathered + accumulated - 3 * gradient * (1 - 1 / split))
    return float(setting.passes * (numels @ param_bytes))


def tied_grad_seconds(
    chain: Chain,
    setting: Setting,
    cluster: Cluster,
    recipe: Recipe,
    counts: Array,
    rank: NDArray[np.int64],
) -> Iterator[tuple[str, float]]:
    """Seconds of all-reduces of tied gradients between two places, by cause."""
    for first, second in chain.tied:
        first_places, second_places = (has_run(counts, rank, run) for run in (first, second))
        if first_places and second_places and not first_places & second_places:
            size = min(chain.runs[index].unit.numel for index in (first, second)) * recipe.gradient
            distance = setting.stride("pp") * abs(min(first_places) - min(second_places))
            yield from _sending(cluster, "pp", "all_reduce", size, 2, distance)


def crosswise_seconds(
    chain: Chain,
    setting: Setting,
    cluster: Cluster,
    recipe: Recipe,
    counts: Array,
    rank: NDArray[np.int64],
) -> Iterator[tuple[str, float]]:
    """Seconds of copies of what ZeRO stage 3 shards along another dim than the first, by cause.

    Gathered shards are joined along that dim, and gradients are cut along it into shards that lie
    one after the other.
    """
    if setting.zero == 3 and setting.dp > 1:
        numels = counts @ crosswise_parameters(chain, zero_shards(setting))
        number_bytes = setting.passes * (4 * recipe.parameter + 2 * recipe.gradient)
        copied = float(np.bincount(rank, numels).max()) * number_bytes
        yield "other", cluster.operator_seconds("other", 0.0, copied)


BUCKET_NUMEL = 40e6  # elements that replicas reduce at a time, as in Megatron-LM
ALL_SENDING_CAUSES = tuple(name for axis in SENDING_CAUSES for name in (axis, f"{axis} start"))


def optimizer_seconds(setting: Setting, numels: Array, cluster: Cluster, recipe: Recipe) -> float:
    """Seconds of the optimizer: state is read and written, gradients read, parameters written.

    With state on the host its processor does the same at the pace of the link: gradients and
    masters come over it, and masters go back.
    """
    share = float((numels / zero_shards(setting)).sum() if setting.zero else numels.sum())
    if setting.placement.offloads_optimizer:
        value = recipe.master or recipe.parameter
        number_bytes = 2 * recipe.moments + 2 * recipe.gradient + 3 * value
        return cluster.copy_seconds(share * number_bytes)
    number_bytes = 2 * (recipe.moments + recipe.master) + recipe.gradient + recipe.parameter
    return cluster.operator_seconds("other", 0.0, number_bytes * share)


# -- bytes -----------------------------------------------------------------------------------------


def peak_bytes(
    chain: Chain, setting: Setting, recipe: Recipe, counts: Array, again: Array
) -> Array:
    """Bytes of the rank of each place at its fullest moment [places], for recomputed units `again`
    [stages, runs]; of several such choices [..., stages, runs] for each [..., places]."""
    units = [run.unit for run in chain.runs]
    rank = stage_ranks(setting.order, setting.pp, setting.chunks)
    kept, input_bytes, peak, enters, waiting = np.array(
        [[u.kept, u.input, u.peak, u.entering, u.waiting] for u in units]
    ).T
    extra, reloaded = kept - input_bytes, np.zeros(len(units))
    # the next unit's activations are there too, or still leaving
    if setting.placement.offloads_activations:
        offloaded, inputs = (input_bytes < kept) * kept, (input_bytes < kept) * input_bytes
        reloaded = 2 * offloaded
        kept, peak = kept - offloaded, peak + reloaded
        input_bytes = np.minimum(input_bytes, kept)
        extra = extra + 3 * inputs - 2 * offloaded  # recomputed units offload only their inputs
        waiting = waiting + offloaded  # activations reloaded for a first half stay for the second
    moment = peak + zero_bytes(chain, setting, recipe)
    state = state_bytes(chain, setting, recipe, counts, rank)
    run_bytes = np.array([kept, input_bytes, moment, enters, waiting, extra, reloaded])
    grown = gradient_bytes(chain, setting, recipe, counts, rank)
    return state + activation_bytes(setting, counts, again, run_bytes, grown)


def zero_bytes(chain: Chain, setting: Setting, recipe: Recipe) -> Array:
    """Bytes that ZeRO's collectives of a unit and the next need besides state, for each run:
    gathered parameters of stage 3, and one copy of those that are sharded along another dim than
    the first; else what pads the gradients to equal shards."""
    if not setting.zero:
        return np.zeros(len(chain.runs))
    shards = zero_shards(setting)
    padded = padded_parameters(chain, shards)
    if setting.zero == 3:  # experts may have no replicas
        gathered: Array = 2 * padded @ (1.0, setting.dp > setting.placement.ep)
        return (gathered + crosswise_parameters(chain, shards)) * recipe.parameter
    padding: Array = 2 * (padded - padded_parameters(chain, (1, 1))).sum(1)
    return padding * recipe.gradient


def gradient_bytes(
    chain: Chain, setting: Setting, recipe: Recipe, counts: Array, rank: NDArray[np.int64]
) -> Array:
    """Bytes of gradients of the units of each run at each stage [stages, runs].

    A tied parameter that a rank has at two stages counts at the later one: its backward runs first.
    """
    shards = zero_shards(setting) if setting.zero > 1 else (1, 1)
    per_unit = (padded_parameters(chain, shards) / shards).sum(1) * float(recipe.gradient)
    gradients: Array = counts * per_unit
    for first, second in chain.tied:
        shared = np.isin(rank, rank[counts[:, second] > 0])
        gradients[:, first] -= shared * counts[:, first] * min(per_unit[first], per_unit[second])
    return gradients


def activation_bytes(
    setting: Setting, counts: Array, again: Array, run_bytes: Array, grown: Array
) -> Array:
    """Bytes of in-flight microbatches and of the fullest moment of a unit, for each place.

    They are added to all gradients, `grown` [stages, runs], less those that do not exist by then.
    Of several choices of recomputed units, `again` [..., stages, runs], for each [..., places].

    Rows of `run_bytes`, of one unit of each run: bytes saved for its backward; bytes saved where it
    is recomputed; the most besides these; what the first unit of a stage saves besides; what waits
    between halves of a backward; what recomputation brings back; and the part of `peak` that is
    reloaded already where backwards wait for second halves.
    """
    kept, input_bytes, peak, enters, waiting, extra, reloaded = run_bytes
    sizes = setting.order, setting.pp, setting.micro, setting.chunks
    on_rank = stages_on_ranks(setting.order, setting.pp, setting.chunks)
    stages = np.arange(len(counts))
    first = (counts > 0).argmax(1)
    entering = np.where(stages > 0, enters[first], 0.0)
    stage_bytes = counts * kept - again * (kept - input_bytes)
    sums = stage_bytes.cumsum(-1) + entering[:, None]
    pass_bytes = sums[..., -1]  # of one microbatch
    last = np.where(counts > again, sums, -np.inf)
    again_moments = np.where(again > 0, sums - stage_bytes + again * input_bytes + extra, -np.inf)
    again_counts = again.sum(-1)
    pending = (counts @ waiting) * (again_counts == 0)  # recomputation serves both halves at once
    grads = grown.sum(1)
    halves, slices = split_backward_stages(setting, again_counts), setting.placement.slices
    in_flight, waits, present = count_in_flight(*sizes, pass_bytes, pending, slices, halves, grads)
    single_unit = (counts @ (reloaded > 0) < 2) / 2  # no next unit
    peak = peak - reloaded * np.maximum(waits * pending > 0, single_unit)[..., None]
    moments = np.maximum(last, again_moments) + peak - pass_bytes[..., None]
    early = (moments - grown.cumsum(1) + grown).max(-1)  # earlier units have no gradients yet
    missing = grads * (1 - present)
    stage_total = in_flight * pass_bytes + waits * pending - missing
    fullest = np.where(present > 0, moments.max(-1), early + missing)
    total: Array = stage_total[..., on_rank].sum(-1) + fullest[..., on_rank].max(-1)
    if setting.chunks > 1 or setting.order not in KNOWN_IN_FLIGHT:
        return total
    first_back = in_flight * pass_bytes + early, total - pass_bytes
    return np.where(in_flight >= setting.passes, np.maximum(*first_back), total)


def state_bytes(
    chain: Chain, setting: Setting, recipe: Recipe, counts: Array, rank: NDArray[np.int64]
) -> Array:
    """Bytes of parameters, gradients and optimizer state of each place, as ZeRO shards them."""
    shards = zero_shards(setting)
    full, padded = (
        parameters_by_place(chain, counts, rank, setting.pp, each) for each in ((1, 1), shards)
    )
    sharded, full = (padded / shards).sum(1), full.sum(1)
    sizes = (recipe.state(setting.placement.offloads_optimizer), recipe.gradient, recipe.parameter)
    total: Array = sum(
        (size * (sharded if setting.zero > stage else full) for stage, size in enumerate(sizes)),
        np.zeros(setting.pp),
    )
    return total
