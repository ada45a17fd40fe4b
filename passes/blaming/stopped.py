"""Stopped: the row for which ranks refuse to go on in the middle of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from schedlang.diagnostic import Refusal
from schedlang.passes.blaming.blame import blame
from schedlang.passes.proving.observe import Condition
from schedlang.passes.proving.sides import Case, prepared, tried
from schedlang.passes.reading.rows import only
from schedlang.plan import Action

if TYPE_CHECKING:
    from schedlang.runtime.launching.launch import Pool


def placed(refusal: Refusal, case: Case, told: Sequence[Condition], pool: Pool) -> Refusal:
    """The refusal at the last of the fewest rows that are refused alike.

    What is found out while a model runs is found where no row is known.  As it is, if it has a
    place, or if the first step of the first run alone is not refused so.
    """
    if any(one.primary.span for one in refusal.diagnostics):
        return refusal
    step = replace(told[0], batches=told[0].batches[:1])
    code = refusal.diagnostic.code

    def stops(rows: Sequence[Action]) -> bool:
        from schedlang.runtime.launching.launch import Hang, RankDied

        try:
            some = prepared(replace(case, plan=only(case.plan, rows)))
        except Refusal:
            return False  # these rows alone are not legal
        try:
            pool.run(tried, some.plan.mesh.world, some, [step])
        except Refusal as other:
            return other.diagnostic.code == code
        except (RankDied, Hang):
            pass
        return False

    rows = tuple(action for action in case.plan.actions if action.name != "verify")
    if not stops(rows):
        return refusal
    found = blame(rows, stops).rows
    span = found[-1].span if found else None
    return refusal if span is None else refusal.at(span)
