"""Connect a program to the record of its rank's calls: names of modules, and rows at them.

The record (runtime/launch/rank_record.py) is read when a job dies or gets stuck.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

from schedlang.ir.plan import Action, Plan
from schedlang.passes.analyze.axis_rows import axis_row

if TYPE_CHECKING:
    from schedlang.runtime.program import Program


def begin_record() -> None:
    """Start the record of this rank, if the job writes records. Called by all ranks together."""
    from schedlang.runtime.comm import world
    from schedlang.runtime.launch import rank_record
    from schedlang.runtime.launch.recorded_calls import record_calls

    job_world, current = world.job_world(), rank_record.current_record()
    if job_world.size == 1 or job_world.is_dry_run:
        return
    record = rank_record.begin_record(job_world.rank, job_world.size)
    if record is not None and record is not current:
        record_calls(record)


def describe_program(plan: Plan, program: Program) -> None:
    """Give the record, if there is one, the modules and parameters of a program, and its steps."""
    from schedlang.runtime.launch import rank_record

    record, a = rank_record.current_record(), program.assembly
    if record is None or a.ranks.world.is_dry_run:
        return
    modules = {id(module): name for name, module in a.module.named_modules()}
    parameters = {id(parameter): name for name, parameter in a.parameters.items()}
    rank_record.name_modules(a.ranks.device.type, modules, parameters, row_finder(plan))
    step: Any = program.train_step

    @wraps(step)
    def recorded_step(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        record.end_step(program.step)
        return result

    program.train_step = recorded_step  # type: ignore[method-assign]


def row_finder(plan: Plan) -> Callable[[str, Sequence[int]], str]:
    """Return a function (name, ranks) -> text of the rows behind a collective.

    `name` is a module or parameter; without `ranks` the function names the rows at the module.
    """

    def row(whose: str, ranks: Sequence[int]) -> str:
        name = whose.partition(" ")[0]
        site = plan.model.owner(name).fqn if name in plan.model.parameters else name
        return ", ".join(
            map(_row_text, _rows_between(plan, site, ranks) if ranks else _rows_at(plan, site))
        )

    return row


def _row_text(action: Action) -> str:
    """Return a row as text: its place, and its source text."""
    span = action.span
    if not span:
        return str(action.primitive)
    line = span.source.line(span.line)
    end = span.end_col - 1 if span.end_line == span.line else len(line)
    return f"{span}  {line[span.col - 1 : end] or action.primitive}"


def _rows_between(plan: Plan, site: str, ranks: Sequence[int]) -> list[Action]:
    """Return the row of the axis along which these ranks differ."""
    if max(ranks) >= plan.mesh.world:  # a sub-job, with its own numbers of ranks
        return []
    points = [plan.mesh.coordinates(rank) for rank in ranks]
    axes = [name for name in plan.mesh.sizes if len({point[name] for point in points}) > 1]
    row = axis_row(plan, site, axes[0]) if len(axes) == 1 else None
    return [] if row is None else [row]


def _rows_at(plan: Plan, site: str) -> list[Action]:
    """Return the rows that act on a module, or on the nearest enclosing module with rows."""
    while site and site in plan.model.sites:
        if rows := [action for action in plan.rows_at(site) if action.has_effect]:
            return rows
        site = site.rpartition(".")[0]
    return []
