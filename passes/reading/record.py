"""A plan as a machine's record: decisions and actions."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from schedlang.source import NOWHERE

if TYPE_CHECKING:
    from schedlang.plan import Plan


EXPECTED = ("measure", "axes", "op", "bound", "said", "on")


def record(plan: Plan) -> dict[str, object]:
    """Knob decisions, mesh, what is expected, and each row with its sites, arguments and place."""
    return {
        "schedule": 1,
        "decisions": {name: plain(value) for name, value in plan.decisions},
        "mesh": dict(plan.mesh.sizes),
        "views": {name: list(axes) for name, axes in plan.mesh.views},
        "device": plan.mesh.device,
        "expected": [
            {
                **{name: plain(getattr(one, name)) for name in EXPECTED},
                "from": _place(one.span or NOWHERE),
            }
            for one in plan.expected
        ],
        "relaxed": {step: list(names) for step, names in plan.relaxed},
        "actions": [
            {
                "id": action.row,
                "step": action.step,
                "at": list(action.sites),
                "do": action.name,
                "args": arguments(action.primitive),
                "from": _place(action.span or NOWHERE),
            }
            for action in plan.actions
        ],
    }


def _place(span: Any) -> list[object]:
    return [span.source.name, span.line, span.col]


def arguments(primitive: Any) -> dict[str, object]:
    """What differs from the defaults."""
    own = ((f, getattr(primitive, f.name)) for f in dataclasses.fields(primitive))
    return {f.name: plain(value) for f, value in own if value != f.default}


def plain(value: object) -> object:
    """A value as JSON has it; placements and calls as text."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if isinstance(value, int):
        return int(value)
    return float(value) if isinstance(value, float) else str(value)
