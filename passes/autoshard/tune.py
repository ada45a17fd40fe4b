"""Settings of one schedule, or schedules for one model, priced and ranked: time under a limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal, guess, unknown

if TYPE_CHECKING:
    from torch import nn

    from schedlang.ir.model import ModelFacts
    from schedlang.ir.plan import Plan
    from schedlang.language import nodes as n
    from schedlang.language.knob import Knob
    from schedlang.passes.propagate.batch_weights import Weight
    from schedlang.passes.propagate.dryrun import Loss
    from schedlang.passes.simulate.step_time import Cluster, StepTime

# ---- What is tried: every setting of a schedule's knobs, or every mesh of so many ranks.


MOST = 1000  # settings


def settings_of(
    tree: n.File, fixed: Mapping[str, Any], wanted: Mapping[str, Sequence[str]]
) -> list[dict[str, Any]]:
    """Every setting of the knobs of a schedule that are not `fixed`.

    `wanted` names values of some; of the others all that their domains list are tried, of a long
    interval its powers of two.  A knob whose domain lists nothing stays as it is.  Raises Refusal
    S106 for a knob that there is not, S109 for more than can be tried.
    """
    from schedlang.passes.elaborate.expand import expand
    from schedlang.passes.elaborate.state import Settings

    knobs = expand(tree, None, Settings(fixed)).knobs
    for name in wanted:
        if name not in knobs:
            title = f"the schedule has no knob `{name}`"
            help_, facts = guess(name, knobs, "its knobs are"), unknown(name, knobs)
            raise Refusal(Diagnostic("S106", title, helps=(help_,), facts=facts))
    menus = {
        name: wanted.get(name) or _values(knob) for name, knob in knobs.items() if name not in fixed
    }
    _not_too_many(menus)
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


def _not_too_many(menus: Mapping[str, Sequence[Any]]) -> None:
    count = math.prod(len(values) or 1 for values in menus.values())
    if count > MOST:
        sizes = ", ".join(f"{name} {len(values)}" for name, values in menus.items() if values)
        longest = max(menus, key=lambda name: len(menus[name]))
        few = ",".join(map(str, menus[longest][:3]))
        raise Refusal(
            Diagnostic(
                "S109",
                f"{count} settings are too many: at most {MOST} are tried",
                notes=(sizes,),
                helps=(
                    f"give fewer values: `--try {longest}={few}`",
                    "or fix some knobs: `--knob k=v`",
                ),
            )
        )


def meshes(ranks: int, node: int) -> Iterator[dict[str, int]]:
    """Every mesh of so many ranks over data, stages and tensors, as `init` knows their axes.

    Tensors are split within a node.  Each with sliced optimizer state (`dp`), and with sliced
    parameters (`fsdp`).  Axes of one rank are left out.
    """
    for tp in _divisors(ranks):
        for pp in _divisors(ranks // tp) if tp <= node else ():
            rest = ranks // tp // pp
            for data in ("dp", "fsdp") if rest > 1 else ("dp",):
                sizes = {data: rest, "pp": pp, "tp": tp}
                yield {axis: size for axis, size in sizes.items() if size > 1} or {"dp": 1}


def _divisors(number: int) -> list[int]:
    return [k for k in range(1, number + 1) if number % k == 0]


# ---- Settings of one schedule, or schedules for one model, priced and ranked: time under a
# limit.


@dataclass(frozen=True)
class Job:
    """What is trained, and on what: the model's facts, a batch of a whole step, a cluster."""

    facts: ModelFacts
    batch: Mapping[str, Any]
    loss: Loss | None
    weight: Weight | None
    cluster: Cluster
    ranks: int


@dataclass(frozen=True)
class Tried:
    """One setting: its price, or why it has none.

    given  knobs as they are set; of a mesh that was proposed the axes
    mesh   sizes of all axes
    peak   bytes of the fullest rank at its fullest moment; where the state alone is too much, that
    time   None where the memory is too small already without activations
    """

    given: Mapping[str, Any]
    mesh: Mapping[str, int]
    peak: int = 0
    time: StepTime | None = None
    refusal: Diagnostic | None = None

    def fits(self, memory: int) -> bool:
        """Can it run in so many bytes?"""
        return self.refusal is None and self.time is not None and self.peak <= memory


def tune(job: Job, tree: n.File, settings: Iterable[Mapping[str, Any]]) -> Iterator[Tried]:
    """Settings of a schedule's knobs, priced one after the other.

    Raises Refusal only for what no setting changes: what refuses one setting is told of that.
    """
    from schedlang.passes.elaborate.expand import expand
    from schedlang.passes.elaborate.state import Settings

    def planned(given: Mapping[str, Any]) -> Plan:
        plan = expand(tree, job.facts, Settings(given, {}, job.ranks)).plan
        assert plan is not None
        return plan

    for given in settings:
        yield _tried(job, given, planned)


def tune_meshes(job: Job, module: nn.Module, sizes: Iterable[Mapping[str, int]]) -> Iterator[Tried]:
    """The schedules that `init` writes for some meshes, priced one after the other."""
    from schedlang.diagnostics.source import Source
    from schedlang.language.syntax import parse
    from schedlang.passes.autoshard.propose import propose
    from schedlang.passes.elaborate.expand import expand

    def planned(mesh: Mapping[str, int]) -> Plan:
        text = propose(module, job.batch, mesh, job.loss).text
        plan = expand(parse(Source("proposed", text)), job.facts).plan
        assert plan is not None
        return plan

    for mesh in sizes:
        yield _tried(job, mesh, planned)


def ranked(found: Iterable[Tried], memory: int) -> list[Tried]:
    """Those that fit, the quickest first; of equal ones that with the lower peak."""
    fits = [one for one in found if one.fits(memory)]
    return sorted(fits, key=lambda one: (one.time.seconds if one.time else 0.0, one.peak))


def _tried(
    job: Job, given: Mapping[str, Any], planned: Callable[[Mapping[str, Any]], Plan]
) -> Tried:
    """One setting; refusals are its answer."""
    try:
        plan = planned(given)
        mesh = dict(plan.mesh.sizes)
        if plan.mesh.world != job.ranks:
            title = f"the mesh has {plan.mesh.world} ranks, but there are {job.ranks}"
            return Tried(given, mesh, refusal=Diagnostic("S607", title))
        return _priced(job, plan, given)
    except Refusal as refusal:
        return Tried(given, {}, refusal=refusal.diagnostics[0])


def _priced(job: Job, plan: Plan, given: Mapping[str, Any]) -> Tried:
    """Its state alone first: most that is too large is so at once, and need not be played."""
    from schedlang.ir.memory import heaviest
    from schedlang.passes.analyze.prepare import prepare
    from schedlang.passes.complete.complete import completed
    from schedlang.passes.propagate.dryrun import rejected
    from schedlang.passes.simulate.memory import rank_classes
    from schedlang.passes.simulate.rehearse import held, rehearse
    from schedlang.passes.simulate.step_time import step_time
    from schedlang.runtime.batch import sample_of

    plan = completed(plan, job.batch, job.loss)
    sample = sample_of(job.batch, plan.shares, plan.micro)
    prepared = prepare(plan, sample, job.loss, job.weight)
    mesh = dict(plan.mesh.sizes)
    state = max(one.state for one in rank_classes(plan, prepared.staged, prepared.holdings))
    if state > job.cluster.memory:
        return Tried(given, mesh, state)
    try:
        played = rehearse(plan, job.batch, job.loss, prepared, works=True)
    except Refusal:
        raise
    except Exception as error:  # a model may ask for what only values tell
        raise rejected(error) from error
    peak = heaviest(held(plan, prepared, played)).peak
    return Tried(given, mesh, peak, step_time(plan, prepared, played, job.cluster))
