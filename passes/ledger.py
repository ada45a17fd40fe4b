"""Proof that every gradient is summed over the axes that it is a part over, once, and no other.

Two derivations that share nothing but the model: which gradients are parts follows from types
(`gradients`); which sums a step does follows from the plan as it is carried out (`booked`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from schedlang.diagnostic import Diagnostic
from schedlang.passes.claim import Claim, axis_row, folded, placed
from schedlang.passes.gradients import Gradients
from schedlang.passes.holdings import slicing
from schedlang.passes.prepare import Prepared
from schedlang.passes.reductions import reductions, sliced_names
from schedlang.plan import Plan

if TYPE_CHECKING:
    from schedlang.runtime.adjoint import Gradient


@dataclass(frozen=True)
class Booked:
    """One sum that a step does: plain axes, names, and the places of one axis if not all."""

    axes: tuple[str, ...]
    names: frozenset[str]
    places: frozenset[int] | None = None


def booked(plan: Plan, prepared: Prepared) -> list[Booked]:
    """The sums of a step: buckets after the last backward, and those of sliced units."""
    mesh, found = plan.mesh, []
    for one in reductions(plan, prepared.traced, prepared.holdings):
        found.append(Booked(mesh.fold(one.axes), frozenset(one.names), one.stages))
    row, whole = slicing(plan)
    if row is not None:
        axes = mesh.fold((*row.axes, *whole))
        for stage, place in enumerate(prepared.staged.ranks):
            units = sliced_names(plan, prepared.staged, prepared.holdings, stage)
            for names in units.values():
                at = None if prepared.staged.axis is None else frozenset([place])
                found.append(Booked(axes, frozenset(names), at))
    return found


def ledger(
    plan: Plan, prepared: Prepared, gradients: Gradients, sums: list[Booked]
) -> Claim:
    """Compare what gradients are with what is summed (S711 missing, S712 too often)."""
    problems: list[tuple[str, Diagnostic]] = []
    kinds: Counter[tuple[object, ...]] = Counter()
    for name, gradient in gradients.found.items():
        mine = [one for one in sums if name in one.names]
        kinds[_kind(gradient)] += 1
        for axis in gradient.shares:
            if axis in _pipeline(plan):
                continue
            problems += ((name, d) for d in _axis(plan, prepared, name, gradient, axis, mine))
        problems += ((name, d) for d in _stages(plan, prepared, name, gradient, mine))
    problems += ((f.fqn, _fault(plan, f)) for f in gradients.faults if f.kind == "sum")
    still = len(plan.model.unique) - len(gradients.found)
    more = f", {still} without a gradient" if still else ""
    said = f"{len(gradients.found)} parameters, {len(kinds)} kind{'s' * (len(kinds) != 1)}{more}"
    return Claim("reductions", said, folded(problems))


def _pipeline(plan: Plan) -> tuple[str, ...]:
    return tuple(axis for cut in plan.cuts for axis in plan.mesh.fold(cut.axis))


def _kind(gradient: Gradient) -> tuple[object, ...]:
    """Parameters whose gradients are alike in all that is compared."""
    shares = tuple((axis, share.kind) for axis, share in gradient.shares.items())
    return (*shares, len(gradient.stages) > 1)


def _fault(plan: Plan, fault: object) -> Diagnostic:
    from schedlang.runtime.typed import Fault

    assert isinstance(fault, Fault)
    code = "S712" if "alike on all ranks" in fault.reason else "S711"
    row = axis_row(plan, fault.fqn, fault.axis)
    return Diagnostic(code, fault.reason, placed(row))


def _axis(
    plan: Plan, prepared: Prepared, name: str, gradient: Gradient, axis: str, sums: list[Booked]
) -> Iterator[Diagnostic]:
    """One parameter along one axis that holds no stages."""
    share = gradient.shares[axis]
    for place in _places(prepared, name):
        done = sum(axis in s.axes for s in sums if s.places is None or place in s.places)
        label = placed(axis_row(plan, _user(plan, name, gradient), axis))
        due = int(share.kind == "part")
        if done < due:
            said = f"gradients are parts over `{axis}`, and nothing sums them over it"
            yield Diagnostic("S711", said, label)
        elif done - due + share.times > 0:
            times = f"{plan.mesh.size(axis)}" + (f"**{n}" if (n := done - due + share.times) > 1
                                                else "")  # fmt: skip
            said = f"gradients are summed once too often over `{axis}`: {times} times too large"
            yield Diagnostic("S712", said, label)
        else:
            continue
        return


def _places(prepared: Prepared, name: str) -> tuple[int | None, ...]:
    stages = prepared.holdings[name].stages
    return (None,) if stages is None else tuple(sorted(stages))


def _user(plan: Plan, name: str, gradient: Gradient) -> str:
    owner = plan.model.owner(name).fqn
    return owner or next(iter(gradient.sites), "")


def _stages(
    plan: Plan, prepared: Prepared, name: str, gradient: Gradient, sums: list[Booked]
) -> Iterator[Diagnostic]:
    """A parameter that several stages use: held by each, and summed over them, once."""
    staged = prepared.staged
    if staged.axis is None:
        return
    used = frozenset(staged.ranks[stage] for stage in gradient.stages)
    label = placed(axis_row(plan, name, staged.axis))
    lacking = used - (prepared.holdings[name].stages or frozenset())
    if lacking:
        said = f"stages at {sorted(lacking)} of `{staged.axis}` use parameters that they lack"
        yield Diagnostic("S711", said, label)
    along = [s for s in sums if set(plan.mesh.fold(staged.axis)) & set(s.axes)]
    cover = [s for s in along if s.places is None or used <= s.places]
    if len(used) > 1 and not cover:
        said = f"gradients come from {len(used)} stages, and nothing sums them over `{staged.axis}`"
        yield Diagnostic("S711", said, label)
    elif len(along) > 1:
        said = f"gradients are summed {len(along)} times over the stages that hold them"
        yield Diagnostic("S712", said, label)

