"""What rows refuse once the whole plan stands and is traced: see `Primitive.settled`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from schedlang.diagnostic import Refusal
from schedlang.plan import Plan
from schedlang.primitive import Primitive

if TYPE_CHECKING:
    from schedlang.passes.laying.propagate import Traced


def check_settled(plan: Plan, traced: Traced) -> None:
    """Ask every row about its sites; a refusal is placed at its row."""
    for action in plan.actions:
        if type(action.primitive).settled is Primitive.settled:
            continue
        for target in plan.targets(action):
            try:
                action.primitive.settled(target, plan, traced)
            except Refusal as refusal:
                if action.span is None:
                    raise
                raise refusal.at(action.span) from refusal
