"""`expect time(step)`: held against what a step was simulated, or measured, to take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from schedlang.diagnostic import Diagnostic, Label
from schedlang.facets import Expectation
from schedlang.passes.reading.expect import TIME
from schedlang.plan import Plan

if TYPE_CHECKING:
    from schedlang.passes.costs.step_time import Took

LEFT = (
    "a time can be compared only where it was measured or simulated: `schedlang run` measures"
    " them, and "
    "`schedlang plan FILE --cost F=18,B=37,step=4` simulates with milliseconds that you give"
)
FASTER = "`schedlang simulate FILE` shows where ranks wait; docs/pipelines.md lists other orders"


def timed(plan: Plan) -> tuple[Expectation, ...]:
    """What the plan expects of times, as far as it is about the plan's machine."""
    return tuple(one for one in plan.expected if one.measure == TIME and one.applies(plan.mesh))


def late(plan: Plan, took: Took) -> Iterator[Diagnostic]:
    """What a step of this length does not hold (S860)."""
    for one in timed(plan):
        if not one.holds(took.seconds):
            label = Label(one.span) if one.span is not None else Label()
            title = f"`{one.said}` does not hold: it is {took.seconds * 1e3:.4g} ms"
            yield Diagnostic("S860", title, label, notes=took.how, helps=(FASTER,))
