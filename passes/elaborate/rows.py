"""Some rows of a plan alone; and whether another text comes to the same plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal
from schedlang.ir.plan import Action, Plan
from schedlang.language import nodes as n
from schedlang.passes.elaborate.expand import expand
from schedlang.passes.elaborate.state import Settings

if TYPE_CHECKING:
    from schedlang.ir.mesh import Mesh
    from schedlang.ir.model import ModelFacts

# ---- Some rows of a plan alone: those of given lines, or those that are suspected.


def only(plan: Plan, rows: Sequence[Action]) -> Plan:
    """A plan of some of the rows, on a mesh in which axes that none of them uses have size 1.

    Raises Refusal where these rows alone are not legal.
    """
    used = of_rows(plan, rows).used_axes
    axes = tuple((name, size if name in used else 1) for name, size in plan.mesh.axes)
    return of_rows(plan, rows, replace(plan.mesh, axes=axes))


def of_rows(plan: Plan, rows: Sequence[Action], mesh: Mesh | None = None) -> Plan:
    """The plan of other rows than those of a plan, on its mesh or another one.

    Raises Refusal where these rows alone are not legal.
    """
    made = Plan.empty(plan.model, mesh or plan.mesh)
    made = replace(made, decisions=plan.decisions, relaxed=plan.relaxed)
    for action in rows:
        made = made.add(action.primitive, action.sites, step=action.step, span=action.span)
    return made


def shown(action: Action) -> str:
    """A row as text: its place and what it does."""
    span = action.span
    where = f"{span.source.name}:{span.line}: " if span is not None and span.line else ""
    sites = (
        action.sites[0]
        if len(action.sites) == 1
        else f"{action.sites[0]} and {len(action.sites) - 1} more"
    )
    return f"{where}{sites}  {action.primitive}".rstrip()


def only_lines(plan: Plan, lines: str) -> Plan:
    """The plan of the rows that stand on the given lines, as "11,14-17" (S705)."""
    wanted: set[int] = set()
    for part in lines.split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            raise Refusal(
                Diagnostic(
                    "S705",
                    f"cannot read the lines `--only {lines}`",
                    helps=("write `--only 11,14-17`",),
                )
            )
        wanted |= set(range(int(first), int(last or first) + 1))
    rows = [
        action for action in plan.actions if action.span is not None and action.span.line in wanted
    ]
    if not rows:
        raise Refusal(
            Diagnostic(
                "S705",
                f"no row is on the lines {lines}",
                helps=("give line numbers of the schedule file",),
            )
        )
    return only(plan, rows)


def repeated(file: object, plan: Plan, seed: int, model: str | None, lines: str | None) -> str:
    """The command that repeats a verification."""
    mesh = ",".join(f"{name}={size}" for name, size in plan.mesh.axes)
    parts = ["schedlang verify", str(file), f"--seed {seed}"]
    parts += [f"--mesh {mesh}"] if mesh else []
    parts += [f"--model {model}"] if model else []
    parts += [f"--only {lines}"] if lines else []
    return " ".join(parts)


# ---- Whether other text comes to the same plan: the same done to the same modules, to the same
# end.


def comes_to(file: n.File, plan: Plan, facts: ModelFacts, settings: Settings) -> bool:
    """Whether a file's plan is this one, in whatever rows, and is not refused."""
    try:
        made = expand(file, facts, settings).plan
    except Refusal:
        return False
    if made is None or _done(made) != _done(plan):
        return False
    return replace(made, actions=()) == replace(plan, actions=())


def _done(plan: Plan) -> Counter[tuple[str, str, tuple[str, ...]]]:
    """What is done in which step, to which modules at a time."""
    return Counter((repr(a.primitive), a.step, at) for a in plan.actions for at in a.each)
