"""diff: two schedules for one model, compared action by action."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from schedlang.diagnostics.tables import terminal_columns, wrap_lines
from schedlang.verbs.exits import bad_option, show_json
from schedlang.verbs.options import AsJson, Common, verb

if TYPE_CHECKING:
    from schedlang.verbs.inputs import PlannedSchedule


@verb
def diff(
    old: Annotated[Path, typer.Argument(help="A schedule, or a saved plan.", metavar="A")],
    new: Annotated[
        Path, typer.Argument(help="Another schedule or plan for the same model.", metavar="B")
    ],
    *,
    common: Common,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print tables for a pull request.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a page into this file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare two schedules by what they do and what they cost, not by their lines.

    The costs are peak bytes of a step by class, bytes sent, and the bubble of the pipeline.
    Instead of a schedule you can give a plan that `plan --out` saved.  `--knob` and `--mesh` are
    for schedules only.
    """
    from schedlang.passes.simulate.account import compare_accounts
    from schedlang.verbs.inputs import account_costs, check_folders, write_output
    from schedlang.viz.diff import compare, diff_page, format_markdown

    check_folders(html=html)
    first, second = _plan_both((old, new), common)
    difference = compare(first.plan, second.plan)
    costs = compare_accounts(account_costs(first, memory=True), account_costs(second, memory=True))
    names = (old.name, new.name) if old.name != new.name else (str(old), str(new))
    if html is not None:
        write_output(html, diff_page(names, difference, costs))
    if as_json:
        show_json({**difference.to_json(), "costs": [cost.to_json() for cost in costs]})
        return
    if markdown:
        print(format_markdown(names, difference, costs))
        return
    print(wrap_lines("\n".join(map(str, (difference, *costs))), terminal_columns()))


def _plan_both(files: tuple[Path, Path], common: Common) -> list[PlannedSchedule]:
    """Plan both sides; refuses S109 settings that apply to neither."""
    from schedlang.verbs.inputs import is_saved_plan, load_saved_plan, plan_schedule

    kept = [is_saved_plan(file) for file in files]
    if all(kept) and (common.knob or common.mesh):
        title = "a saved plan has its own settings: `--knob` and `--mesh` are for schedules"
        bad_option(title, "leave them out, or give a schedule instead of a plan")
    return [
        load_saved_plan(file, common.model)
        if is_saved
        else plan_schedule(file, common.model, common.knob, common.mesh)
        for file, is_saved in zip(files, kept, strict=True)
    ]
