"""Proof that the parts of a step weigh one together, and each as much as its labels say."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import Diagnostic
from schedlang.ir.primitive import Facet
from schedlang.passes.propagate.batch_weights import weight_of
from schedlang.passes.propagate.context import weight_by_tokens
from schedlang.passes.simulate.played_step import Step
from schedlang.passes.static_checks.claim import Claim, facet_row, placed
from schedlang.passes.static_checks.roles import Role, shortened

if TYPE_CHECKING:
    from schedlang.runtime.batch import Part

NEAR = 1e-9


def weights(step: Step, batch: Mapping[str, Any], played: Sequence[Role]) -> Claim:
    """Weights add up: over parts to the whole batch, and over a step to one (S716)."""
    from schedlang.runtime.batch import split

    plan = step.plan
    micro = plan.micro
    shares = split(batch, plan.shares, micro)
    found = [part for row in shares for whole in row for part in _tokens(step, whole)]
    if len(found) == 1:
        return Claim("loss weights", "one part, which is the whole")
    by = weight_of if step.prepared.tokens is None else weight_by_tokens
    weigh = step.weight or by(step.prepared.traced, len(found))
    each, whole = [float(weigh(part)) for part in found], float(weigh(batch))
    problems = [*_whole(step, each, whole), *_counted(step, weigh), *_step(step, played)]
    said = f"{len(each)} parts of {whole:g}, {len(played)} ranks"
    unseen = () if _labels(step) else ("that the loss is a mean over rows; `verify` measures it",)
    return Claim("loss weights", said, tuple(problems), unseen=unseen)


def _tokens(step: Step, part: Part) -> list[Mapping[str, Any]]:
    """What is weighed of some rows, on each of the ranks that split their sequences."""
    tokens = step.prepared.tokens
    if tokens is None:
        return [part.inputs]
    pieces = [tokens.part(part, place, None) for place in range(tokens.ranks)]
    return [one.weighed if one.weighed is not None else one.inputs for one in pieces]


def _labels(step: Step) -> bool:
    return step.weight is None and len(step.prepared.traced.labels) == 1


def _row(step: Step) -> Any:
    plan = step.plan
    return placed(facet_row(plan, Facet.STATE if plan.data_axes else Facet.ORDER))


def _whole(step: Step, each: list[float], whole: float) -> Iterator[Diagnostic]:
    if not math.isclose(sum(each), whole, rel_tol=NEAR):
        said = f"the weights of all parts add up to {sum(each):g}; the batch weighs {whole:g}"
        yield Diagnostic("S716", said, _row(step))


def _counted(step: Step, weigh: Any) -> Iterator[Diagnostic]:
    """The labels that the loss itself counts in a part, where it averages over labels."""
    if not _labels(step):
        return
    seen, said = counted(step), float(weigh(step.sample))
    if seen is not None and seen != said:
        title = f"the loss averages over {seen:g} labels of a part that weighs {said:g}"
        yield Diagnostic("S716", title, _row(step))


def counted(step: Step) -> float | None:
    """How many labels the model's own call of cross-entropy counts in the sample; None: no one."""
    from schedlang.passes.propagate.dryrun import call
    from schedlang.runtime.grad_reduction.loss_weights import Counting
    from schedlang.runtime.tracing.constants import OnMeta
    from schedlang.runtime.tracing.meta import hollow_batch, hollow_model

    model, inputs = hollow_model(step.plan.model.model, {}), hollow_batch(dict(step.sample))
    model.train()
    with OnMeta(dict(step.sample), inputs) as values, Counting(values) as counting:
        call(model, inputs, step.loss)
    return counting.found[0] if len(counting.found) == 1 else None


def _step(step: Step, played: Sequence[Role]) -> Iterator[Diagnostic]:
    """Of a batch whose parts are alike, those of all replicas weigh one in each update."""
    from schedlang.pipeline.timeline.versions import updates

    count, tokens = step.plan.shares, step.plan.context_axes
    times = int(updates(shortened(step).prepared.staged.timeline).max())  # of a step
    for role in played:
        weights = [sum(one.weights) for one in played if _same_rows(step, one, role)]
        if len(weights) < step.plan.mesh.size(tokens):
            continue  # not all ranks with tokens of these rows were played
        total = sum(weights) * count / times
        if not math.isclose(total, 1.0, rel_tol=NEAR):
            said = f"the microbatches of rank {role.rank} weigh {total:g} of their share"
            yield Diagnostic("S716", said, _row(step))
            return


def _same_rows(step: Step, one: Role, other: Role) -> bool:
    """Whether two ranks differ at most in which tokens of the same rows they have."""
    mesh, tokens = step.plan.mesh, step.plan.context_axes
    a, b = mesh.coordinates(one.rank), mesh.coordinates(other.rank)
    return all(a[axis] == b[axis] for axis in mesh.sizes if axis not in tokens)
