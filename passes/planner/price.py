"""The price of a setting: seconds of a step by cause, bytes of the rank of each place.

* Seconds of one unit of a model, by what takes them.
* Stages: what units they have, what each of their operations takes.
* Data axes: what replicas send, and the update.
* Bytes: state, microbatches in flight, the fullest moment of a unit.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from schedlang.passes.planner.values import Chain, Kind, Priced, Recipe, Setting, Unit, Work

if TYPE_CHECKING:
    from schedlang.passes.simulate.step_time import Cluster

Array = NDArray[np.float64]

# -- one unit --------------------------------------------------------------------------------------


def stride(setting: Setting, axis: str) -> int:
    """How far ranks of an axis lie apart: dp, pp, cp, tp from slow to fast, ep folded into dp."""
    at = setting.placement
    inner = {"tp": 1, "cp": at.tp, "pp": at.tp * at.cp}
    return inner.get(axis, at.tp * at.cp * setting.pp)


def extent(setting: Setting, axis: str) -> int:
    """How many ranks an axis has."""
    at = setting.placement
    return {"tp": at.tp, "cp": at.cp, "ep": at.ep, "pp": setting.pp, "dp": setting.dp}[axis]


def unit_times(unit: Unit, setting: Setting, cluster: Cluster) -> tuple[float, float, float]:
    """Seconds of one microbatch: forward, backward, and the forward computed once more."""
    strides = tuple((axis, stride(setting, axis), extent(setting, axis)) for axis in AXES)
    forward, backward = _causes(unit, strides, cluster)
    ahead = sum(forward.values())
    return ahead, sum(backward.values()), ahead


AXES = ("tp", "cp", "ep")
Causes = Mapping[str, float]  # seconds by what takes them: "computing", or an axis


@lru_cache(4096)
def _causes(
    unit: Unit, strides: tuple[tuple[str, int, int], ...], cluster: Cluster
) -> tuple[Causes, Causes]:
    """Seconds of a unit's forward and backward, by cause."""
    where = {axis: (extent, stride) for axis, stride, extent in strides}

    def of(work: Work) -> Causes:
        found = {"computing": 0.0}
        for op in work.operators:
            found["computing"] += op.count * _operator(cluster, op.kind, op.flops, op.moved)
        for sent in work.sent:
            took = sent.count * _collective(cluster, sent.op, sent.bytes, *where[sent.axis])
            found[sent.axis] = found.get(sent.axis, 0.0) + took
        return found

    return of(unit.forward), of(unit.backward)


def _operator(cluster: Cluster, kind: Kind, flops: float, moved: float) -> float:
    if hasattr(cluster, "operator"):
        return float(cluster.operator(kind, flops, moved))
    return max(flops / cluster.speed, moved / cluster.stream)


def _collective(cluster: Cluster, op: str, size: float, ranks: int, apart: int) -> float:
    if ranks < 2:
        return 0.0
    if hasattr(cluster, "collective"):
        return float(cluster.collective(op, size, ranks, apart))
    share = {"all_reduce": 2.0, "send": ranks / (ranks - 1)}.get(op, 1.0) * (ranks - 1) / ranks
    if op == "send":
        return size / (cluster.link if apart < cluster.node else cluster.network)
    inside = max(1, min(ranks, cluster.node // apart))
    if inside == ranks:
        return share * size / cluster.link
    return share * size / min(cluster.link, cluster.network * inside)


# -- stages ----------------------------------------------------------------------------------------


def price(chain: Chain, setting: Setting, cluster: Cluster, recipe: Recipe | None = None) -> Priced:
    """Price a setting: seconds of a step, and bytes of the rank of each place.

    Raises ValueError for a chain that is cut into other stages than there are.
    """
    recipe = recipe or Recipe()
    strides = tuple((axis, stride(setting, axis), extent(setting, axis)) for axis in AXES)
    units = [run.unit for run in chain.runs]
    causes = [_causes(unit, strides, cluster) for unit in units]
    ahead = np.array([sum(f.values()) for f, _ in causes])
    back = np.array([sum(b.values()) for _, b in causes])
    stages = setting.pp * setting.chunks
    cuts = setting.cuts or even(chain, stages, tuple(ahead + back))
    made, again = composition(chain, cuts, setting.again)
    if len(made) != stages:
        raise ValueError(f"{len(made)} stages are cut, and there are {stages}")
    forward, backward = made @ ahead, made @ back + again @ ahead
    send = _transfer(chain, setting, cluster)
    span = pipeline(setting, forward, backward, send)
    rank = _places(setting)
    busy = np.bincount(rank, forward + backward, setting.pp) * setting.micro
    worst = int(busy.argmax())
    parts: dict[str, float] = {}
    mine = np.flatnonzero(rank == worst)
    for unit, (f, b) in enumerate(causes):
        often, once_more = made[mine, unit].sum(), again[mine, unit].sum()
        for cause in {**f, **b}:
            took = f.get(cause, 0.0) * (often + once_more) + b.get(cause, 0.0) * often
            parts[cause] = parts.get(cause, 0.0) + took * setting.micro
    parts["idle"] = span - float(busy[worst])
    held = _held(units, made, rank, setting.pp)
    beside, after = _data(setting, held, cluster, recipe, parts["computing"])
    parts["gradients"] = beside + after
    parts["optimizer"] = max(_update(setting, one, cluster, recipe) for one in held)
    parts = {cause: float(took) for cause, took in parts.items()}
    seconds = sum(parts.values())
    return Priced(seconds, peaks(chain, setting, recipe, made, again), parts)


def even(chain: Chain, stages: int, times: tuple[float, ...]) -> tuple[int, ...]:
    """Cut a chain so that its slowest stage is as quick as can be; `times` of one of each run.

    Of cuts that are as good, that with the fullest stages first.  Raises ValueError for fewer units
    than stages.
    """
    return _even(tuple(run.count for run in chain.runs), stages, times)


@lru_cache(4096)
def _even(counts: tuple[int, ...], stages: int, times: tuple[float, ...]) -> tuple[int, ...]:
    flat = [took for count, took in zip(counts, times) for _ in range(count)]
    if len(flat) < stages:
        raise ValueError(f"{len(flat)} units are too few for {stages} stages")
    total = np.concatenate([[0.0], np.cumsum(flat)])
    low, high = max(flat), float(total[-1])
    for _ in range(40):
        middle = (low + high) / 2
        if len(_filled(total, middle, stages)) <= stages:
            high = middle
        else:
            low = middle
    ends = _filled(total, high * (1 + 1e-12), stages)
    sizes = [int(b - a) for a, b in zip([0, *ends], ends)]
    while len(sizes) < stages:  # fewer were enough: take apart the longest
        longest = max(range(len(sizes)), key=sizes.__getitem__)
        sizes[longest : longest + 1] = [sizes[longest] - sizes[longest] // 2, sizes[longest] // 2]
    return tuple(sizes)


def _filled(total: Array, most: float, stages: int) -> list[int]:
    """Ends of stages that take as many units as `most` seconds allow."""
    ends, at = list[int](), 0
    while at < len(total) - 1 and len(ends) <= stages:
        at = max(at + 1, int(np.searchsorted(total, total[at] + most, side="right")) - 1)
        ends.append(at)
    return ends


def composition(
    chain: Chain, cuts: tuple[int, ...], again: tuple[int, ...] = ()
) -> tuple[Array, Array]:
    """How many units of each run each stage has [stages, runs], and of them are computed again."""
    ends = np.cumsum([run.count for run in chain.runs])
    begins = ends - [run.count for run in chain.runs]
    last = np.cumsum(cuts)
    if last[-1] != ends[-1]:
        raise ValueError(f"the cuts have {last[-1]} units, and there are {ends[-1]}")
    first = last - cuts

    def within(low: Array, high: Array) -> Array:
        return np.clip(
            np.minimum(high[:, None], ends) - np.maximum(low[:, None], begins), 0, None
        ).astype(float)

    none = np.zeros(len(cuts))
    more = within(first, first + np.minimum(again, cuts)) if again else within(none, none)
    return within(first, last), more


def _places(setting: Setting) -> NDArray[np.int64]:
    """The rank along pp of each stage."""
    stage = np.arange(setting.pp * setting.chunks)
    if setting.order in VEE and setting.chunks == 2:
        return np.where(stage < setting.pp, stage, 2 * setting.pp - 1 - stage)
    return stage % setting.pp


VEE = ("ZB-V", "V-Half", "V-Min", "1F1B-V", "DualPipeV")


def _transfer(chain: Chain, setting: Setting, cluster: Cluster) -> float:
    """Seconds of what a stage hands to the next: the largest."""
    if setting.pp < 2:
        return 0.0
    size = max(run.unit.handed for run in chain.runs)
    return _collective(cluster, "send", size, setting.pp, stride(setting, "pp"))


def pipeline(setting: Setting, forward: Array, backward: Array, send: float) -> float:
    """Seconds from the first forward to the last backward, by the order's operations."""
    ranks, micro = setting.pp, setting.micro
    if ranks == 1 and setting.chunks == 1:
        return float(micro * (forward + backward).sum())
    if setting.order.lower() == "1f1b" and setting.chunks == 1:
        return _one_by_one(forward + backward, micro, send)
    if setting.order.lower() == "gpipe" and setting.chunks == 1:
        both = sum(float(t.sum() + (micro - 1) * t.max()) for t in (forward, backward))
        return both + 2 * (ranks - 1) * send
    return _played(setting, forward, backward, send)


def _one_by_one(times: Array, micro: int, send: float) -> float:
    """1F1B: the longest way through its operations.

    It goes down all stages and up again once, and on its way round stages that follow one another,
    once for as many microbatches as they are: each rank takes a forward for each backward.
    """
    count = len(times)
    total = np.concatenate([[0.0], np.cumsum(times)])
    around = total[None, 1:] - total[:-1, None]  # [first, last]
    length = np.arange(count)[None, :] - np.arange(count)[:, None] + 1
    there = length > 0
    length = np.where(there, length, 1)
    rounds, rest = np.divmod(micro - 1, length)
    took = rounds * (around + 2 * send * (length - 1)) + rest * times.max()
    return float(total[-1] + 2 * (count - 1) * send + took[there].max())


def _played(setting: Setting, forward: Array, backward: Array, send: float) -> float:
    """Play the order; of many microbatches few, and what each one more takes."""
    from schedlang.pipeline.timeline.simulation import timing
    from schedlang.pipeline.timeline.table import Kind as Of

    def span(micro: int) -> float:
        line = _timeline(setting.order, setting.pp, micro, setting.chunks)
        whole = np.zeros((len(Of), len(forward)))
        whole[Of.F], whole[Of.B] = forward, backward
        whole[Of.I], whole[Of.W] = backward / 2, backward / 2
        return float(timing(line, whole[line.kind, line.stage], send).makespan)

    few = 2 * setting.pp
    if setting.micro <= 2 * few:
        return span(setting.micro)
    more = few + setting.pp
    each = (span(more) - span(few)) / setting.pp
    return span(more) + (setting.micro - more) * each


@lru_cache(512)
def _timeline(order: str, ranks: int, micro: int, chunks: int):  # type: ignore[no-untyped-def]
    from schedlang.pipeline.schedules import order as named

    return named(order, ranks, micro, chunks)


# -- data axes -------------------------------------------------------------------------------------


def _held(units: list[Unit], made: Array, rank: NDArray[np.int64], places: int) -> Array:
    """Numbers of the rank of each place [places, 2]: those of all replicas, those of experts."""
    plain = made @ np.array([float(unit.numbers - unit.spread) for unit in units])
    spread = made @ np.array([float(unit.spread) for unit in units])
    return np.stack([np.bincount(rank, each, places) for each in (plain, spread)], 1)


def _data(
    setting: Setting, held: Array, cluster: Cluster, recipe: Recipe, computing: float
) -> tuple[float, float]:
    """Seconds that replicas send beside the computing, where longer, and after it."""
    at, zero = setting.placement, setting.zero
    apart = stride(setting, "dp")

    def took(op: str, size: int) -> float:
        whole = _collective(cluster, op, float(held[:, 0].max()) * size, setting.dp, apart)
        fewer = setting.dp // at.ep
        return whole + _collective(
            cluster, op, float(held[:, 1].max()) * size, fewer, apart * at.ep
        )

    if zero == 0:
        return 0.0, took("all_reduce", recipe.gradient)
    gather = took("all_gather", recipe.parameter)
    scatter = took("reduce_scatter", recipe.gradient)
    if zero == 1:
        return 0.0, scatter + gather
    if zero == 2:
        return max(0.0, (setting.micro - 1) * scatter - computing), scatter + gather
    return max(0.0, setting.micro * (2 * gather + scatter) - computing), 0.0


def _update(setting: Setting, held: Array, cluster: Cluster, recipe: Recipe) -> float:
    """Seconds of the optimizer: state is read and written, gradients read, parameters written."""
    at = setting.placement
    each = 2 * (recipe.moments + recipe.master) + recipe.gradient + recipe.parameter
    split = (setting.dp, max(1, setting.dp // at.ep)) if setting.zero else (1, 1)
    return _operator(cluster, "other", 0.0, each * float((held / split).sum()))


# -- bytes -----------------------------------------------------------------------------------------


def peaks(
    chain: Chain, setting: Setting, recipe: Recipe, made: Array, again: Array
) -> tuple[float, ...]:
    """Bytes of the rank of each place at its fullest moment."""
    units, rank = [run.unit for run in chain.runs], _places(setting)
    held = _held(units, made, rank, setting.pp)
    split = np.array([setting.dp, max(1, setting.dp // setting.placement.ep)])
    kept = np.array([unit.kept for unit in units])
    less = np.array([unit.input for unit in units])
    stage = made @ kept - again @ (kept - less)
    flying = in_flight(setting)
    found = []
    for place in range(setting.pp):
        mine = np.flatnonzero(rank == place)
        most = max(
            unit.most + (unit.kept - unit.input) * bool(again[mine, at].any())
            for at, unit in enumerate(units)
            if made[mine, at].any()
        )
        gathered = max(
            unit.numbers * 2 * recipe.parameter
            for at, unit in enumerate(units)
            if made[mine, at].any()
        )
        state = _state(held[place], split, setting.zero, recipe)
        found.append(
            state + float(flying[mine] @ stage[mine]) + most + gathered * (setting.zero == 3)
        )
    return tuple(found)


def _state(held: Array, split: NDArray[np.int64], zero: int, recipe: Recipe) -> float:
    """Bytes of parameters, gradients and the optimizer's state, each split from its stage on."""
    sizes = (recipe.moments + recipe.master, recipe.gradient, recipe.parameter)
    return float(
        sum(size * (held / (split if zero > at else 1)).sum() for at, size in enumerate(sizes))
    )


def in_flight(setting: Setting) -> Array:
    """Microbatches whose activations each stage holds when its rank holds most."""
    ranks, micro, chunks = setting.pp, setting.micro, setting.chunks
    if chunks == 1 and setting.order.lower() in ("1f1b", "zb-h1"):
        return np.minimum(ranks - np.arange(ranks), micro).astype(float)
    if chunks == 1 and setting.order.lower() == "gpipe":
        return np.full(ranks, float(micro))
    return _flying(setting.order, ranks, min(micro, 4 * ranks), chunks)


@lru_cache(512)
def _flying(order: str, ranks: int, micro: int, chunks: int) -> Array:
    from schedlang.pipeline.timeline.table import Kind as Of

    line = _timeline(order, ranks, micro, chunks)
    change = (line.kind == Of.F).astype(int) - np.isin(line.kind, (Of.B, Of.W))
    found = np.zeros(ranks * chunks)
    for rank in range(ranks):
        rows = slice(line.starts[rank], line.starts[rank + 1])
        each = np.zeros((rows.stop - rows.start, ranks * chunks))
        each[np.arange(len(each)), line.stage[rows]] = change[rows]
        live = each.cumsum(0)
        found += live[live.sum(1).argmax()]
    return found
