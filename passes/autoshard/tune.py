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
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal, guess, unknown
from schedlang.diagnostics.tables import GAP, fitted, seconds, size, table, widths
from schedlang.ir.memory import heaviest
from schedlang.language.value import shown
from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.complete.complete import completed
from schedlang.passes.elaborate.expand import expand
from schedlang.passes.elaborate.state import Settings
from schedlang.passes.propagate.original import rejected
from schedlang.passes.simulate.memory import rank_classes
from schedlang.passes.simulate.nodes import Nodes
from schedlang.passes.simulate.rehearse import held, rehearse
from schedlang.passes.simulate.step_time import lacking, step_time

if TYPE_CHECKING:
    from schedlang.ir.model import ModelFacts
    from schedlang.ir.plan import Plan
    from schedlang.language import nodes as n
    from schedlang.language.knob import Knob
    from schedlang.passes.propagate.dryrun import Loss
    from schedlang.passes.propagate.original import Weight
    from schedlang.passes.simulate.machine import Cluster
    from schedlang.passes.simulate.step_time import StepTime


MOST = 1000  # maximal number of settings


def settings_of(
    tree: n.File, fixed: Mapping[str, Any], wanted: Mapping[str, Sequence[str]]
) -> list[dict[str, Any]]:
    """List every setting of the knobs of a schedule that are not `fixed`.

    `wanted` gives values of some knobs; of the others all values of their domains are tried, of a
    long interval its powers of two.  A knob whose domain lists nothing keeps its default.  Raises
    Refusal S106 for an unknown knob, S109 for more settings than can be tried.
    """
    knobs = expand(tree, None, Settings(fixed)).knobs
    for name in wanted:
        if name not in knobs:
            title = f"the schedule has no knob `{name}`"
            help_, facts = guess(name, knobs, "its knobs are"), unknown(name, knobs)
            raise Refusal.of("S106", title, helps=(help_,), facts=facts)
    menus = {
        name: wanted.get(name) or _values(knob) for name, knob in knobs.items() if name not in fixed
    }
    _check_count(menus)
    free = {name: values for name, values in menus.items() if values}
    return [dict(zip(free, chosen)) for chosen in product(*free.values())]


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
    if count > MOST:
        sizes = ", ".join(f"{name} {len(values)}" for name, values in menus.items() if values)
        longest = max(menus, key=lambda name: len(menus[name]))
        few = ",".join(map(str, menus[longest][:3]))
        raise Refusal.of(
            "S109",
            f"{count} settings are too many: at most {MOST} are tried",
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
class Tried:
    """One setting: its price, or why it has none.

    given  values of knobs; of a proposed mesh its axes
    mesh   sizes of all axes
    peak   bytes of the fullest rank at its fullest moment; the state alone where that is too large
    time   None where memory is too small already without activations
    lacks  on unequal nodes: the most bytes that a rank needs beyond its own memory
    """

    given: Mapping[str, Any]
    mesh: Mapping[str, int]
    peak: int = 0
    time: StepTime | None = None
    refusal: Diagnostic | None = None
    lacks: int = 0

    def fits(self, memory: int) -> bool:
        """Return whether the setting runs within so many bytes."""
        known = self.refusal is None and self.time is not None
        return known and self.peak <= memory and self.lacks <= 0


def tune(job: Job, tree: n.File, settings: Iterable[Mapping[str, Any]]) -> Iterator[Tried]:
    """Price the settings of a schedule's knobs, one after the other.

    Raises Refusal only for what no setting changes: the refusal of one setting is part of its
    result.
    """

    def planned(given: Mapping[str, Any]) -> Plan:
        plan = expand(tree, job.facts, Settings(given, {}, job.ranks)).plan
        assert plan is not None
        return plan

    for given in settings:
        yield _tried(job, given, planned)


def ranked(found: Iterable[Tried], memory: int) -> list[Tried]:
    """Return the settings that fit, the quickest first; of equally quick ones the lower peak
    first."""
    fits = [one for one in found if one.fits(memory)]
    return sorted(fits, key=lambda one: (one.time.seconds if one.time else 0.0, one.peak))


def _tried(
    job: Job, given: Mapping[str, Any], planned: Callable[[Mapping[str, Any]], Plan]
) -> Tried:
    """Price one setting; a refusal is its result."""
    try:
        plan = planned(given)
        mesh = dict(plan.mesh.sizes)
        if plan.mesh.world != job.ranks:
            title = f"the mesh has {plan.mesh.world} ranks, but there are {job.ranks}"
            return Tried(given, mesh, refusal=Diagnostic("S607", title))
        return priced(job, plan, given)
    except Refusal as refusal:
        return Tried(given, {}, refusal=refusal.diagnostics[0])


def priced(job: Job, plan: Plan, given: Mapping[str, Any]) -> Tried:
    """Price one plan: its state first, because a plan with too large a state needs no simulated
    step."""
    from schedlang.runtime.batch import sample_of

    plan = completed(plan, job.batch, job.loss)
    sample = sample_of(job.batch, plan.dealt, plan.micro)
    prepared = prepare(plan, sample, job.loss, job.weight)
    mesh = dict(plan.mesh.sizes)
    state = max(one.state for one in rank_classes(plan, prepared.staged, prepared.holdings))
    if state > job.cluster.memory:
        return Tried(given, mesh, state)
    try:
        played = rehearse(plan, job.batch, job.loss, prepared, works=True)
    except Refusal:
        raise
    except Exception as error:  # a model may read values, which meta tensors do not have
        raise rejected(error) from error
    memories = held(plan, prepared, played)
    lacks = lacking(plan, prepared.staged, memories, job.cluster)
    time = step_time(plan, prepared, played, job.cluster)
    return Tried(given, mesh, heaviest(memories).peak, time, lacks=lacks)


HEADS = ("step", "computing", "sending", "idle", "peak")
BOUND = (
    "times are predicted, not measured: operators at the rates that such devices reach, messages "
    "as their library sends them"
)


def text(
    job: Job, found: Sequence[Tried], top: int | None, title: str = "", width: int | None = None
) -> str:
    """Format a table of the settings that fit, `top` of them; then a line for each reason of the
    others."""
    memory = job.cluster.memory
    best = ranked(found, memory)
    below = [*_too_large(found, memory), *_refused(found), BOUND]
    if best and top is not None and len(best) > top:
        below.insert(0, f"{len(best) - top} more fit: --top {len(best)}")
    parts = [fitted(title + _head(job, found, len(best)), width)]
    parts += ["", *_table(best[:top], width), ""] if best else []
    return "\n".join([*parts, fitted("\n".join(below), width)])


def to_json(job: Job, found: Sequence[Tried]) -> dict[str, Any]:
    """Return plain values; seconds and bytes."""
    memory = job.cluster.memory
    best = ranked(found, memory)
    return {
        "cluster": asdict(job.cluster),
        "ranks": job.ranks,
        "fit": [_one(one) for one in best],
        "too_large": [_one(one) for one in found if one.refusal is None and not one.fits(memory)],
        "refused": [
            {**_one(one), "refusal": one.refusal.to_json()} for one in found if one.refusal
        ],
    }


def setting(given: Mapping[str, Any]) -> str:
    """Format the values of knobs: `tp = 2, pp = 4`."""
    return ", ".join(f"{name} = {_value(value)}" for name, value in given.items())


def _one(one: Tried) -> dict[str, Any]:
    time = None if one.time is None else asdict(one.time)
    return {"given": dict(one.given), "mesh": dict(one.mesh), "peak": one.peak, "time": time}


def _head(job: Job, found: Sequence[Tried], fit: int) -> str:
    refused = sum(one.refusal is not None for one in found)
    over = len(found) - refused - fit
    parts = [f"{fit} fit"]
    parts += [f"{over} need more memory"] if over else []
    parts += [f"{refused} refused"] if refused else []
    return f"{job.ranks} ranks of {_cluster(job.cluster)} · {len(found)} tried: {', '.join(parts)}"


def _cluster(one: Cluster) -> str:
    if isinstance(one, Nodes):
        return f"{one.name}, {one.text()}"
    near = f"{one.link / 1e9:g} GB/s in a node of {one.node}"
    far = f"{one.network / 1e9:g} GB/s between nodes"
    return f"{one.name}, {size(one.memory)}, {one.speed / 1e12:g} TFLOP/s, {near}, {far}"


def _table(best: Sequence[Tried], width: int | None) -> Iterator[str]:
    knobs, axes = list(best[0].given), list(dict.fromkeys(a for one in best for a in one.mesh))
    beside = [axis for axis in axes if axis not in knobs]
    names = [*knobs, *beside] if set(knobs) - set(axes) or not set(knobs) else axes
    rows = [["", *names, *HEADS]]
    rows += [[str(place), *_cells(one, names)] for place, one in enumerate(best, 1)]
    wide = widths(rows)
    right = [[cell.rjust(w) for cell, w in zip(row, wide)] for row in rows]
    room = None if width is None else width + len(GAP)
    yield from (line.removeprefix(GAP) for line in table(right, room))


def _cells(one: Tried, names: Sequence[str]) -> list[str]:
    values = {**{axis: size for axis, size in one.mesh.items()}, **one.given}
    assert one.time is not None
    time = one.time
    shares = (part / time.seconds for part in (time.computing, time.sending, time.idle))
    return [
        *(_value(values.get(name, "-")) for name in names),
        seconds(time.seconds),
        *(f"{share:.0%}" for share in shares),
        size(one.peak),
    ]


def _value(value: object) -> str:
    return value if isinstance(value, str) else shown(value).strip("`")


def _too_large(found: Sequence[Tried], memory: int) -> Iterator[str]:
    over = [one for one in found if one.refusal is None and not one.fits(memory)]
    if over:
        least = min(over, key=lambda one: one.peak)
        state = "state alone " if least.time is None else ""
        said = setting(least.given or least.mesh)
        yield f"{len(over)} need more than {size(memory)}; least, {state}{size(least.peak)}: {said}"


def _refused(found: Sequence[Tried]) -> Iterator[str]:
    """Yield a line for each code, with the first setting that was refused."""
    reasons: dict[str, list[Tried]] = {}
    for one in found:
        if one.refusal is not None:
            reasons.setdefault(one.refusal.code, []).append(one)
    for code, those in reasons.items():
        assert those[0].refusal is not None
        told = [setting(those[0].given or those[0].mesh), those[0].refusal.title]
        yield ": ".join([f"{len(those)} refused, {code}", *filter(None, told)])
