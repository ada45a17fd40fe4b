"""What a step takes: simulated with times that are given, or with what a run measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from schedlang.cost import Cost
from schedlang.diagnostic import Diagnostic, Refusal
from schedlang.plan import Plan

if TYPE_CHECKING:
    from schedlang.timeline import Timeline

MEASURE = "measure again: `schedlang run FILE --timeline t.html --json > measured.json`"
TAIL = ("reduce", "step")  # what comes once, after the last backward


@dataclass(frozen=True)
class Took:
    """Seconds of one step, and in words what they are made of."""

    seconds: float
    how: tuple[str, ...] = ()


@dataclass(frozen=True)
class Measurement:
    """What a run measured of its pipeline, in seconds.

    means   of each kind of operation at each stage
    rest    of a step beside its pipeline: sums of gradients, the update
    mesh, micro, slices   under which that was so
    """

    means: Mapping[tuple[str, int], float]
    transfer: float
    rest: float
    mesh: Mapping[str, int]
    micro: int
    slices: int


def simulated_step(plan: Plan, given: Cost | Measurement) -> Took:
    """A step of the plan, by the timeline of its order; one microbatch after the other without.

    A `Cost` counts milliseconds, all stages alike.  Raises Refusal S608 for sizes that the order
    does not run, S914 where the plan runs what was not measured.
    """
    from schedlang.passes.cutting.staging import timeline_of

    line = timeline_of(plan).compute()
    return _by_cost(line, given) if isinstance(given, Cost) else _by_measure(plan, line, given)


def _by_cost(line: Timeline, cost: Cost) -> Took:
    from schedlang.timeline import Kind, timing

    tail = [name for name in TAIL if not (line.kind == Kind[name.upper()]).any()]
    once = sum(float(getattr(cost, name)) for name in tail)
    span = float(timing(line, cost).makespan)
    said = ", ".join(f"{name}={float(getattr(cost, name.lower())):.4g}" for name in "FIW")
    rest = ", ".join(f"{name}={float(getattr(cost, name)):.4g}" for name in ("comm", *TAIL))
    how = f"simulated with {said}, {rest} ms: {span:.4g} ms of microbatches, {once:.4g} ms after"
    return Took((span + once) / 1e3, (how,))


def _by_measure(plan: Plan, line: Timeline, given: Measurement) -> Took:
    import numpy as np

    from schedlang.timeline import Kind, timing

    mine = (dict(plan.mesh.sizes), line.microbatches, line.slices)
    if mine != (dict(given.mesh), given.micro, given.slices):
        _unfit(_ran(*mine), _ran(given.mesh, given.micro, given.slices))
    pairs = [(Kind(k).name, s) for k, s in zip(line.kind.tolist(), line.stage.tolist())]
    known = {pair: _mean(given.means, *pair) for pair in set(pairs)}
    if missing := sorted(f"{kind} of stage {s}" for (kind, s), t in known.items() if t is None):
        _unfit(f"it runs {', '.join(missing[:3])}", "without a measured time")
    costs = np.array([known[pair] for pair in pairs], dtype=np.float64)
    span = float(timing(line, costs, given.transfer).makespan)
    how = f"simulated with measured times: {span * 1e3:.4g} ms of the pipeline"
    return Took(span + given.rest, (f"{how}, {given.rest * 1e3:.4g} ms beside it",))


def _mean(means: Mapping[tuple[str, int], float], kind: str, stage: int) -> float | None:
    """The time of an operation; a whole backward is its two halves."""
    if kind == "B" and ("B", stage) not in means:
        halves = [means.get((half, stage)) for half in "IW"]
        return None if None in halves else sum(filter(None, halves))
    return means.get((kind, stage))


def _ran(mesh: Mapping[str, int], micro: int, slices: int) -> str:
    axes = ", ".join(f"{name}={size}" for name, size in mesh.items()) or "one rank"
    return f"mesh {axes}, {micro} microbatches" + (f", {slices} slices" if slices > 1 else "")


def _unfit(plan: str, run: str) -> NoReturn:
    title = "the measured times are not those of this plan"
    notes = (f"the plan: {plan}", f"measured: {run}")
    raise Refusal(Diagnostic("S914", title, notes=notes, helps=(MEASURE,)))


def measurement(made: Any) -> Measurement:
    """What `run --timeline --json` printed, read; raises KeyError, TypeError, ValueError or
    IndexError for anything else."""
    ran = made["pipeline"]
    means = {(str(m["kind"]), int(m["stage"])): float(m["seconds"]) for m in ran["means"]}
    rest = float(made["step_seconds"]) - float(ran["measured"]["makespan"])
    mesh = {str(name): int(size) for name, size in made["mesh"].items()}
    return Measurement(
        means, float(ran["transfer"]), max(0.0, rest), mesh, int(ran["micro"]), int(ran["slices"])
    )
