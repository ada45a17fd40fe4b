"""A program whose rank writes down what it does: names of its modules, and the rows at them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

from schedlang.ir.plan import Action, Plan
from schedlang.passes.analyze.axis_rows import axis_row

if TYPE_CHECKING:
    from schedlang.runtime.program import Program


def begin() -> None:
    """Start the record of this rank where one is asked for; all ranks at the same place."""
    from schedlang.runtime.comm import world
    from schedlang.runtime.launch import record
    from schedlang.runtime.launch.recorded_calls import tell

    here, before = world.job(), record.here()
    if here.size == 1 or here.played:
        return
    made = record.begin(here.rank, here.size)
    if made is not None and made is not before:
        tell(made)


def known(plan: Plan, program: Program) -> None:
    """Tell the record, if there is one, of the modules of a program and of its steps."""
    from schedlang.runtime.launch import record

    made, a = record.here(), program.assembly
    if made is None or a.ranks.world.played:
        return
    modules = {id(module): name for name, module in a.module.named_modules()}
    parameters = {id(one): name for name, one in a.parameters.items()}
    record.knows(a.ranks.device.type, modules, parameters, rows_of(plan))
    step: Any = program.train_step

    @wraps(step)
    def told(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        made.stepped(program.step)
        return result

    program.train_step = told  # type: ignore[method-assign]


def rows_of(plan: Plan) -> Callable[[str, Sequence[int]], str]:
    """A function that names the row behind a collective of ranks for a module, or at a module."""

    def row(whose: str, ranks: Sequence[int]) -> str:
        name = whose.partition(" ")[0]
        site = plan.model.owner(name).fqn if name in plan.model.parameters else name
        return ", ".join(map(_text, _between(plan, site, ranks) if ranks else _at(plan, site)))

    return row


def _text(action: Action) -> str:
    """A row: where it stands, and as it is written."""
    span = action.span
    if not span:
        return str(action.primitive)
    line = span.source.line(span.line)
    end = span.end_col - 1 if span.end_line == span.line else len(line)
    return f"{span}  {line[span.col - 1 : end] or action.primitive}"


def _between(plan: Plan, site: str, ranks: Sequence[int]) -> list[Action]:
    """The row that brings the axis along which these ranks differ."""
    if max(ranks) >= plan.mesh.world:  # a part of a job, which counts its own ranks
        return []
    at = [plan.mesh.coordinates(rank) for rank in ranks]
    axes = [name for name in plan.mesh.sizes if len({place[name] for place in at}) > 1]
    row = axis_row(plan, site, axes[0]) if len(axes) == 1 else None
    return [] if row is None else [row]


def _at(plan: Plan, site: str) -> list[Action]:
    """The rows that act on a module, or on the nearest one around it."""
    while site and site in plan.model.sites:
        if found := [one for one in plan.rows_at(site) if one.acts]:
            return found
        site = site.rpartition(".")[0]
    return []
