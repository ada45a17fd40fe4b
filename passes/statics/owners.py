"""Proof that everything a model keeps has its owner: stages of parameters and of buffers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from schedlang.diagnostic import Diagnostic
from schedlang.passes.cutting.staging import buffer_stages
from schedlang.passes.preparing.prepare import Prepared
from schedlang.passes.statics.claim import Claim, facet_row, folded, placed
from schedlang.passes.statics.gradients import Gradients
from schedlang.passes.statics.kept import kept
from schedlang.passes.statics.roles import Role
from schedlang.plan import Plan


def owners(
    plan: Plan, prepared: Prepared, gradients: Gradients | None, played: Sequence[Role]
) -> Claim:
    """Parameters in one stage or shared by ties or code between units; buffers assigned (S715).

    Ranks that were played told their optimizer of each trained parameter that they hold, once.
    """
    problems = [*_parameters(plan, prepared, gradients), *_buffers(plan, prepared)]
    problems += _optimizers(plan, played)
    stages = prepared.staged.cut.stages
    buffers = dict(plan.model.model.named_buffers())
    said = (
        f"{len(plan.model.unique)} parameters, {len(buffers)} buffers,"
        f" {stages} stage{'s' * (stages != 1)}"
    )
    label = placed(facet_row(plan, "stage"))
    found = [(name, Diagnostic("S715", why, label)) for name, why in problems]
    found += [(fqn, Diagnostic("S715", why, placed(row))) for fqn, why, row in kept(plan)]
    return Claim("ownership", said, folded(found))


def _units(prepared: Prepared, names: tuple[str, ...]) -> frozenset[int]:
    """The stages of the units that a tensor of these names stands in."""
    cut = prepared.staged.cut
    return frozenset(
        stage
        for unit, stage in zip(cut.graph.units, cut.stage_of)
        if any(name.startswith(f"{unit}.") for name in names)
    )


def _parameters(
    plan: Plan, prepared: Prepared, gradients: Gradients | None
) -> Iterator[tuple[str, str]]:
    staged = prepared.staged
    if prepared.holdings.keys() != plan.model.unique.keys():
        for name in prepared.holdings.keys() ^ plan.model.unique.keys():
            yield name, "a parameter has no place"
    if staged.axis is None:
        return
    for name, fact in plan.model.unique.items():
        holders = prepared.holdings[name].stages if name in prepared.holdings else None
        if not holders:
            yield name, "a parameter is held by no stage"
            continue
        inside = staged.places(*_units(prepared, fact.names))
        used = gradients.found.get(name) if gradients is not None else None
        reads = staged.places(*used.stages) if used is not None else inside
        if reads - holders:
            yield name, f"stages at {sorted(reads - holders)} use it and do not hold it"


def _buffers(plan: Plan, prepared: Prepared) -> Iterator[tuple[str, str]]:
    """A buffer of a unit belongs to the unit's stage; others to the stages that read them."""
    staged = prepared.staged
    if staged.axis is None:
        return
    assigned = buffer_stages(staged)
    same = {names[0]: names for names in plan.model.shared_buffers}
    for name, _ in plan.model.model.named_buffers():
        inside = staged.places(*_units(prepared, same.get(name, (name,))))
        holders = assigned.get(name)
        if holders is not None and not holders:
            yield name, "a buffer is held by no stage"
        elif holders is None and inside:
            yield name, f"a buffer of units at {sorted(inside)} is assigned to no stage"


def _optimizers(plan: Plan, played: Sequence[Role]) -> Iterator[tuple[str, str]]:
    """Every trained parameter that a rank holds is given to its optimizer once, and no other."""
    for role in played:
        given = Counter(role.trained)
        for name, fact in plan.model.unique.items():
            due = int(fact.requires_grad and name in role.held)
            if given.pop(name, 0) != due:
                yield name, f"the optimizer of rank {role.rank} does not train it exactly once"
        for name in given:
            yield name, f"the optimizer of rank {role.rank} trains what the model does not have"
