"""The program in the working dtype, against float64 and against the original's own rounding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from schedlang.passes.proving.asked import asked
from schedlang.passes.proving.observe import Condition, Observation, observe
from schedlang.passes.proving.sides import Case, original, sequential
from schedlang.report import Row

if TYPE_CHECKING:
    from schedlang.passes.proving.original import Sequential

TIPPED = "numbers that roundings tip are taken as ranks took them"


def working_rows(
    case: Case, working: Case, told: Sequence[Condition], exact: Observation, program: Observation
) -> list[Row]:
    """Rows of the first condition; `exact` is the original in float64, `program` in the other.

    Of activations in fewer bits a number that lies where two are as near falls to either side: one
    is a whole step of its block off, above every gate for rounding.  Where rows fail for it, the
    original is run again with such numbers, and no others, as ranks took them; gates stay.
    """
    rows = list(_rows(working, told, exact, program))
    if all(row.ok for row in rows) or not program.tipped:
        return rows
    case, working = (replace(one, tipped=program.tipped) for one in (case, working))
    again, _ = original(case, told[:1])
    rows = list(_rows(working, told, again, program))
    return [replace(row, note=TIPPED) if row.ok and not row.note else row for row in rows]


def _rows(
    working: Case, told: Sequence[Condition], exact: Observation, program: Observation
) -> Iterator[Row]:
    from schedlang.passes.laying.casts import lowest
    from schedlang.passes.proving.rounding import within_rounding
    from schedlang.runtime.drawing.random import LogicalDropout
    from schedlang.runtime.modes import ambient

    def make(condition: Condition) -> Sequential:
        return sequential(working, condition, cast=True)

    first = [replace(condition, batches=working.batches) for condition in told[:1]]
    with ambient(LogicalDropout(working.seed)):
        plain = observe(make, first)
    names = {condition.name for condition in first}
    tensors = {k: v for k, v in exact.tensors.items() if k.condition in names}
    wanted = replace(exact, tensors=tensors)
    rtol, low = asked(working.plan).rtol, lowest(working.plan)
    return iter(within_rounding(wanted, plain, program, rtol=rtol, low=low))
