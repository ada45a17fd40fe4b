"""What the `verify(...)` rows of a schedule ask for beyond what every proof checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from schedlang.diagnostic import Diagnostic, Refusal
from schedlang.passes.reading.words import arguments
from schedlang.plan import Action, Plan

STEPS = 3  # of every proof
_SCOPES = {
    "forward": ("outputs", "training outputs", "loss"),
    "backward": ("gradients", "input gradients", "gradient norm"),
    "train": ("parameters",),
    "loss": ("loss",),
}


@dataclass(frozen=True)
class Curve:
    """A loss curve that stays within a share of the original's, in the working dtype."""

    within: float
    steps: int
    place: str


@dataclass(frozen=True)
class Asked:
    """`rtol` by kind replaces the rule of rounding in the working dtype; float64 is never wider."""

    steps: int = STEPS
    rtol: Mapping[str, float] = field(default_factory=dict)
    curves: tuple[Curve, ...] = ()
    evaluate: bool = False
    exact: tuple[str, ...] = ()  # places of rows that ask for equal bits


def asked(plan: Plan) -> Asked:
    """All `verify` rows together; raises Refusal S709 where bits are asked of rows that round."""
    found = Asked()
    rtol: dict[str, float] = {}
    for action in plan.actions:
        if action.name != "verify":
            continue
        row: Any = action.primitive
        scopes = [what for what in row.what if what in _SCOPES] or ["forward", "backward", "train"]
        for kind in (kind for scope in scopes for kind in _SCOPES[scope]):
            if row.rtol is not None:
                rtol[kind] = min(row.rtol, rtol.get(kind, row.rtol))
        curves, steps, exact = found.curves, found.steps, found.exact
        if row.within is not None:
            curves = (*curves, Curve(row.within, row.steps or STEPS, _place(action)))
        elif row.steps is not None:
            steps = max(steps, row.steps)
        if "exact" in row.what:
            _check_exact(plan, action)
            exact = (*exact, _place(action))
        found = Asked(steps, rtol, curves, found.evaluate or row.mode == "eval", exact)
    return found


def steps_of(plan: Plan) -> int:
    """How many batches a proof of this plan wants."""
    return asked(plan).steps


def _check_exact(plan: Plan, action: Action) -> None:
    """Bits can be asked of what gives up nothing: the rows of the same step."""
    from schedlang.passes.proving.exact import given_up

    allowed = given_up(plan)
    inexact = [a for a in plan.actions if a.step == action.step and a.primitive.gives_up & allowed]
    if inexact:
        refusal = Refusal(
            Diagnostic(
                "S709", f"`{inexact[0].name}` cannot be bitwise equal",
                notes=(f"it changes {', '.join(sorted(inexact[0].primitive.gives_up))}, and is"
                       f" in the step that `verify({arguments(action.primitive)})` checks",),
                helps=("leave `exact` out: float64 is compared to 1e-9",
                       "or move the rows that are exact (`checkpoint`, `offload`) into another"
                       " step"),
            )
        )  # fmt: skip
        raise refusal.at(action.span) if action.span is not None else refusal


def _place(action: Action) -> str:
    span = action.span
    return f"{span.source.name}:{span.line}" if span is not None and span.line else "verify"
