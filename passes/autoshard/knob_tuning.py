"""Settings of one schedule, or schedules for one model, priced and ranked: time under a memory
limit.

For `schedlang tune FILE` and elastic runs: enumerates the settings of a schedule's knobs, prices
each by a simulated step, and shows them as a table: the quickest first, then what is too large, and
what is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal
from schedlang.diagnostics.tables import (
    GAP,
    column_widths,
    format_bytes,
    format_seconds,
    format_table,
    wrap_lines,
)
from schedlang.ir.memory import find_heaviest
from schedlang.ir.model import ModelFacts
from schedlang.ir.plan import Plan
from schedlang.language import nodes as n
from schedlang.language.knob import Knob, refuse_unknown_settings
from schedlang.language.value import show_value
from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.complete.complete import complete_plan
from schedlang.passes.elaborate.expand import expand
from schedlang.passes.elaborate.state import Settings
from schedlang.passes.propagate.batch_refusals import batch_refusal
from schedlang.passes.propagate.original_forward import Weight
from schedlang.passes.propagate.sharded_run import Loss
from schedlang.passes.simulate.machine import Cluster
from schedlang.passes.simulate.memory import rank_classes
from schedlang.passes.simulate.node_cluster import Nodes
from schedlang.passes.simulate.simulated_ranks import memory_of_ranks, simulate_ranks
from schedlang.passes.simulate.step_time import StepTime, missing_memory, time_step

MAX_SETTINGS = 1000  # maximal number of settings


def settings_of(
    tree: n.File, fixed: Mapping[str, Any], choices: Mapping[str, Sequence[str]]
) -> list[dict[str, Any]]:
    """List every setting of the knobs of a schedule that are not `fixed`.

    `choices` gives values of some knobs; of the others all values of their domains are tried, of a
    long interval its powers of two.  A knob whose domain lists nothing keeps its default.  Raises
    Refusal S106 for an unknown knob, S109 for more settings than can be tried.
    """
    knobs = expand(tree, None, Settings(fixed)).knobs
    refuse_unknown_settings(choices, knobs)
    menus = {
        name: choices.get(name) or _values(knob)
        for name, knob in knobs.items()
        if name not in fixed
    }
    _check_count(menus)
    free = {name: values for name, values in menus.items() if values}
    return [dict(zip(free, setting)) for setting in product(*free.values())]


def _values(knob: Knob) -> list[Any]:
    if knob.choices is not None:
        return [str(v) if knob.type == "choice" else v for v in knob.choices]
    if knob.type == "int" and knob.interval is not None:
        low, high = knob.interval
        powers = [2**k for k in range(high.bit_length() + 1) if low <= 2**k <= high]
        return powers or [low]
    return list(knob.options)


def _check_count(menus: Mapping[str, Sequence[Any]]) -> None:
    count = math.prod(len(values) or 1 for values in menus.values())
    if count > MAX_SETTINGS:
        sizes = ", ".join(f"{name} {len(values)}" for name, values in menus.items() if values)
        longest = max(menus, key=lambda name: len(menus[name]))
        few = ",".join(map(str, menus[longest][:3]))
        raise Refusal.of(
            "S109",
            f"{count} settings are too many: at most {MAX_SETTINGS} are tried",
            notes=(sizes,),
            helps=(
                f"give fewer values: `--try {longest}={few}`",
                "or fix some knobs: `--knob k=v`",
            ),
        )


@dataclass(frozen=True)
class Job:
    """A training job: the model's facts, a batch of a full step, and the cluster it runs on."""

    facts: ModelFacts
    batch: Mapping[str, Any]
    loss: Loss | None
    weight: Weight | None
    cluster: Cluster
    ranks: int


@dataclass(frozen=True)
class PricedPlan:
    """One setting: its price, or why it has none.

    knobs          values of knobs; of a proposed mesh its axes
    mesh           sizes of all axes
    peak           bytes of the fullest rank at its fullest moment; the state alone where that is
                   too large
    time           None where memory is too small already without activations
    missing_bytes  on unequal nodes: the most bytes that a rank needs beyond its own memory
    """

    knobs: Mapping[str, Any]
    mesh: Mapping[str, int]
    peak: int = 0
    time: StepTime | None = None
    refusal: Diagnostic | None = None
    missing_bytes: int = 0

    def fits(self, memory: int) -> bool:
        """Return whether the setting runs within so many bytes."""
        is_priced = self.refusal is None and self.time is not None
        return is_priced and self.peak <= memory and self.missing_bytes <= 0


def price_settings(
    job: Job, tree: n.File, settings: Iterable[Mapping[str, Any]]
) -> Iterator[PricedPlan]:
    """Price the settings of a schedule's knobs, one after the other.

    Raises Refusal only for what no setting changes: the refusal of one setting is part of its
    result.
    """

    def planned(setting: Mapping[str, Any]) -> Plan:
        plan = expand(tree, job.facts, Settings(setting, {}, job.ranks)).plan
        assert plan is not None
        return plan

    for setting in settings:
        yield _tried(job, setting, planned)


def rank_fitting(plans: Iterable[PricedPlan], memory: int) -> list[PricedPlan]:
    """Return the settings that fit, the quickest first; of equally quick ones the lower peak
    first."""
    fits = [plan for plan in plans if plan.fits(memory)]
    return sorted(fits, key=lambda plan: (plan.time.seconds if plan.time else 0.0, plan.peak))


def _tried(
    job: Job, setting: Mapping[str, Any], planned: Callable[[Mapping[str, Any]], Plan]
) -> PricedPlan:
    """Price one setting; a refusal is its result."""
    try:
        plan = planned(setting)
        mesh = dict(plan.mesh.sizes)
        if plan.mesh.world != job.ranks:
            title = f"the mesh has {plan.mesh.world} ranks, but there are {job.ranks}"
            return PricedPlan(setting, mesh, refusal=Diagnostic("S607", title))
        return price_plan(job, plan, setting)
    except Refusal as refusal:
        return PricedPlan(setting, {}, refusal=refusal.diagnostics[0])


def price_plan(job: Job, plan: Plan, setting: Mapping[str, Any]) -> PricedPlan:
    """Price one plan: its state first, because a plan with too large a state needs no simulated
    step."""
    from schedlang.runtime.batch import largest_part

    plan = complete_plan(plan, job.batch, job.loss)
    sample = largest_part(job.batch, plan.share_weights, plan.micro)
    prepared = prepare(plan, sample, job.loss, job.weight)
    mesh = dict(plan.mesh.sizes)
    state = max(
        rank_class.state for rank_class in rank_classes(plan, prepared.staged, prepared.holdings)
    )
    if state > job.cluster.memory:
        return PricedPlan(setting, mesh, state)
    try:
        simulated = simulate_ranks(plan, job.batch, job.loss, prepared, works=True)
    except Refusal:
        raise
    except Exception as error:  # a model may read values, which meta tensors do not have
        raise batch_refusal(error) from error
    memories = memory_of_ranks(plan, prepared, simulated)
    lacks = missing_memory(plan, prepared.staged, memories, job.cluster)
    time = time_step(plan, prepared, simulated, job.cluster)
    return PricedPlan(setting, mesh, find_heaviest(memories).peak, time, missing_bytes=lacks)


TABLE_HEADS = ("step", "computing", "sending", "idle", "peak")
FOOTNOTE = (
    "times are predicted, not measured: operators at the rates that such devices reach, messages "
    "as their library sends them"
)


def format_tuning(
    job: Job,
    plans: Sequence[PricedPlan],
    top: int | None,
    title: str = "",
    width: int | None = None,
) -> str:
    """Format a table of the settings that fit, `top` of them; then a line for each reason of the
    others."""
    memory = job.cluster.memory
    best = rank_fitting(plans, memory)
    lines = [*_too_large(plans, memory), *_refused(plans), FOOTNOTE]
    if best and top is not None and len(best) > top:
        lines.insert(0, f"{len(best) - top} more fit: --top {len(best)}")
    parts = [wrap_lines(title + _head(job, plans, len(best)), width)]
    parts += ["", *_table(best[:top], width), ""] if best else []
    return "\n".join([*parts, wrap_lines("\n".join(lines), width)])


def to_json(job: Job, plans: Sequence[PricedPlan]) -> dict[str, Any]:
    """Return plain values; seconds and bytes."""
    memory = job.cluster.memory
    best = rank_fitting(plans, memory)
    return {
        "cluster": asdict(job.cluster),
        "ranks": job.ranks,
        "fit": [_one(plan) for plan in best],
        "too_large": [
            _one(plan) for plan in plans if plan.refusal is None and not plan.fits(memory)
        ],
        "refused": [
            {**_one(plan), "refusal": plan.refusal.to_json()} for plan in plans if plan.refusal
        ],
    }


def format_setting(setting: Mapping[str, Any]) -> str:
    """Format the values of knobs: `tp = 2, pp = 4`."""
    return ", ".join(f"{name} = {_value(value)}" for name, value in setting.items())


def _one(plan: PricedPlan) -> dict[str, Any]:
    time = None if plan.time is None else asdict(plan.time)
    return {"given": dict(plan.knobs), "mesh": dict(plan.mesh), "peak": plan.peak, "time": time}


def _head(job: Job, plans: Sequence[PricedPlan], fit: int) -> str:
    refused = sum(priced.refusal is not None for priced in plans)
    oversized = len(plans) - refused - fit
    parts = [f"{fit} fit"]
    parts += [f"{oversized} need more memory"] if oversized else []
    parts += [f"{refused} refused"] if refused else []
    return f"{job.ranks} ranks of {_cluster(job.cluster)} · {len(plans)} tried: {', '.join(parts)}"


def _cluster(cluster: Cluster) -> str:
    if isinstance(cluster, Nodes):
        return f"{cluster.name}, {cluster.text()}"
    near = f"{cluster.link / 1e9:g} GB/s in a node of {cluster.node}"
    far = f"{cluster.network / 1e9:g} GB/s between nodes"
    return (
        f"{cluster.name}, {format_bytes(cluster.memory)}, {cluster.speed / 1e12:g}"
        f" TFLOP/s, {near}, {far}"
    )


def _table(best: Sequence[PricedPlan], width: int | None) -> Iterator[str]:
    knobs = list(best[0].knobs)
    axes = list(dict.fromkeys(a for priced in best for a in priced.mesh))
    mesh_columns = [axis for axis in axes if axis not in knobs]
    names = [*knobs, *mesh_columns] if set(knobs) - set(axes) or not set(knobs) else axes
    rows = [["", *names, *TABLE_HEADS]]
    rows += [[str(position), *_cells(priced, names)] for position, priced in enumerate(best, 1)]
    widths = column_widths(rows)
    cells = [[cell.rjust(w) for cell, w in zip(row, widths)] for row in rows]
    room_left = None if width is None else width + len(GAP)
    yield from (line.removeprefix(GAP) for line in format_table(cells, room_left))


def _cells(priced: PricedPlan, names: Sequence[str]) -> list[str]:
    values = {**{axis: size for axis, size in priced.mesh.items()}, **priced.knobs}
    assert priced.time is not None
    time = priced.time
    shares = (part / time.seconds for part in (time.computing, time.sending, time.idle))
    return [
        *(_value(values.get(name, "-")) for name in names),
        format_seconds(time.seconds),
        *(f"{share:.0%}" for share in shares),
        format_bytes(priced.peak),
    ]


def _value(value: object) -> str:
    return value if isinstance(value, str) else show_value(value).strip("`")


def _too_large(plans: Sequence[PricedPlan], memory: int) -> Iterator[str]:
    oversized = [priced for priced in plans if priced.refusal is None and not priced.fits(memory)]
    if oversized:
        smallest = min(oversized, key=lambda priced: priced.peak)
        state = "state alone " if smallest.time is None else ""
        setting = format_setting(smallest.knobs or smallest.mesh)
        needed = f"least, {state}{format_bytes(smallest.peak)}: {setting}"
        yield f"{len(oversized)} need more than {format_bytes(memory)}; {needed}"


def _refused(plans: Sequence[PricedPlan]) -> Iterator[str]:
    """Yield a line for each code, with the first setting that was refused."""
    reasons: dict[str, list[PricedPlan]] = {}
    for priced in plans:
        if priced.refusal is not None:
            reasons.setdefault(priced.refusal.code, []).append(priced)
    for code, group in reasons.items():
        assert group[0].refusal is not None
        description = [format_setting(group[0].knobs or group[0].mesh), group[0].refusal.title]
        yield ": ".join([f"{len(group)} refused, {code}", *filter(None, description)])
