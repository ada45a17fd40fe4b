"""Settings of one schedule, or schedules for one model, priced and ranked: time under a limit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from schedlang.diagnostic import Diagnostic, Refusal

if TYPE_CHECKING:
    from torch import nn

    from schedlang import nodes as n
    from schedlang.model import ModelFacts
    from schedlang.passes.costs.cluster import Cluster
    from schedlang.passes.costs.played_time import StepTime
    from schedlang.passes.laying.dryrun import Loss
    from schedlang.passes.laying.weigh import Weight
    from schedlang.plan import Plan


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
    from schedlang.passes.reading.expand import expand
    from schedlang.passes.reading.state import Settings

    def planned(given: Mapping[str, Any]) -> Plan:
        plan = expand(tree, job.facts, Settings(given, {}, job.ranks)).plan
        assert plan is not None
        return plan

    for given in settings:
        yield _tried(job, given, planned)


def tune_meshes(job: Job, module: nn.Module, sizes: Iterable[Mapping[str, int]]) -> Iterator[Tried]:
    """The schedules that `init` writes for some meshes, priced one after the other."""
    from schedlang.passes.proposing.propose import propose
    from schedlang.passes.reading.expand import expand
    from schedlang.source import Source
    from schedlang.syntax import parse

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
    from schedlang.memory import heaviest
    from schedlang.passes.completing.complete import completed
    from schedlang.passes.costs.estimate import held
    from schedlang.passes.costs.memory import rank_classes
    from schedlang.passes.costs.played_time import step_time
    from schedlang.passes.costs.rehearse import rehearse
    from schedlang.passes.laying.dryrun import rejected
    from schedlang.passes.preparing.prepare import prepare
    from schedlang.runtime import parts

    plan = completed(plan, job.batch, job.loss)
    sample = parts.sample(job.batch, plan.shares, plan.micro)
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
