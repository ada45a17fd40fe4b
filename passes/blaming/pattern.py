"""Pattern: the arithmetic behind a failure, from the tensors that tell it best."""

from __future__ import annotations

from typing import TYPE_CHECKING

from schedlang.passes.blaming.again import Failure
from schedlang.passes.blaming.diagnose import diagnose, explain, of_parts, of_ranks
from schedlang.passes.blaming.localise import Location
from schedlang.passes.proving.observe import Batch, Key
from schedlang.report import Row

if TYPE_CHECKING:
    from torch import Tensor

NONE = "no simple pattern fits"


def pattern(first: Row, failure: Failure, where: Location | None, batch: Batch) -> str:
    """In words: of the first gradient that is wrong, or of what the first wrong module makes."""
    plan = failure.case.plan
    micro = plan.micro
    sizes = dict(plan.mesh.axes) | ({"microbatches": micro} if micro > 1 else {})
    found = explain(first, failure.expected, failure.actual, sizes)
    if where is None:
        return found
    if found.startswith(NONE) or first.kind == "outputs":
        found = _of_module(failure, where, sizes) or found
    if first.kind == "gradients" and first.step == 0 and found.startswith((NONE, "only block")):
        found = _of_gradient(first, failure, where, batch) or found
    return found


def _of_module(failure: Failure, where: Location, sizes: dict[str, int]) -> str:
    """Of what a module makes that is fed what is right."""
    if where.values is None:
        return ""
    got, want = where.values
    name, _ = where.guilty[0]
    model = failure.case.plan.model
    own = {
        f"its {attribute}": model.model.get_parameter(fact.name).detach()
        for attribute, fact in model.sites[name].parameters.items()
    }
    found = diagnose(got, want, sizes, own)
    return f"{found}, in {name or 'the model'}" if found and found != NONE else ""


def _of_gradient(first: Row, failure: Failure, where: Location, batch: Batch) -> str:
    """Of the ranks' own values, or of the shares of the parts of the batch."""
    key = Key(first.condition, first.kind, 0, first.name)
    got, want = failure.actual.tensors.get(key), failure.expected.tensors.get(key)
    if want is None:
        return ""
    return _of_ranks(first.name, failure, where, want) or (
        "" if got is None else of_parts(got, want, _shares(first.name, failure, batch))
    )


def _of_ranks(name: str, failure: Failure, where: Location, want: Tensor) -> str:
    from schedlang.runtime.saving.holding import take

    prepared, mesh = failure.case.prepared, failure.case.plan.mesh
    if prepared is None or name not in prepared.holdings:
        return ""
    holding = prepared.holdings[name]
    if not all(holding.held(mesh, rank) for rank in range(mesh.world)):
        return ""
    right = [take(want, holding, mesh, rank) for rank in range(mesh.world)]
    return of_ranks(where.locals, right, mesh)


def _shares(name: str, failure: Failure, batch: Batch) -> dict[str, Tensor | None]:
    """What each part of the batch adds to a gradient, on the original."""
    from schedlang.passes.laying.weigh import part_weight
    from schedlang.passes.proving.original import Sequential
    from schedlang.passes.proving.sides import modes_of, twin
    from schedlang.runtime.modes import ambient
    from schedlang.runtime.parts import split

    case, plan = failure.case, failure.case.plan
    micro = plan.micro
    parts = [p for share in split(batch, plan.shares, micro) for p in share]
    if len(parts) < 2:
        return {}
    weigh = part_weight(plan, parts[0].inputs, case.loss, case.weight, len(parts))
    weights = [weigh(part.inputs) for part in parts]
    subject = Sequential(twin(case), loss=case.loss)
    found: dict[str, Tensor | None] = {}
    modes, _ = modes_of(case.seed)
    with ambient(*modes):
        for number, (part, weight) in enumerate(zip(parts, weights)):
            if weight:
                subject.derive(part.inputs, part.rows)
                grad = subject.gradients().get(name)
                share = None if grad is None else grad.clone() * (weight / sum(weights))
                found[f"part {number} of {len(parts)}"] = share
    return found
