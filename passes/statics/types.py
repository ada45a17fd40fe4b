"""Proof that whatever is summed is a pending sum: only linear calls stand before a sum."""

from __future__ import annotations

from schedlang.diagnostic import Diagnostic
from schedlang.passes.statics.claim import Claim, axis_row, folded, placed
from schedlang.passes.statics.gradients import Gradients
from schedlang.plan import Plan


def types(plan: Plan, gradients: Gradients) -> Claim:
    """The calls of one forward by their types on each axis (S713)."""
    problems = [
        (f.fqn, Diagnostic("S713", f.reason, placed(axis_row(plan, f.fqn, f.axis))))
        for f in gradients.faults
        if f.kind == "type"
    ]
    said = f"{gradients.calls} calls, {gradients.sums} pending sums"
    return Claim("placement types", said, folded(problems))
