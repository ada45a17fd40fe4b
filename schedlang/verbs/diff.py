"""diff: two schedules for one model, compared action by action."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from schedlang.verbs.ending import show_json
from schedlang.verbs.outcome import AsJson, Knobs, MeshSizes, Model, verb


@verb
def diff(
    old: Annotated[Path, typer.Argument(help="A schedule.", metavar="A")],
    new: Annotated[Path, typer.Argument(help="Another for the same model.", metavar="B")],
    model: Model = None,
    knob: Knobs = None,
    mesh: MeshSizes = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Tables for a pull request.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a page into this file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare two schedules by what they do, not by their lines; and what each costs.

    Bytes at the peak of a step by class, bytes sent, the pipeline's bubble.  Knobs and axis sizes
    are set in both.
    """
    from schedlang.passes.costs.delta import delta
    from schedlang.passes.showing import diff_page
    from schedlang.passes.showing.diff import compare
    from schedlang.verbs.files import accounted, planned, write_text

    first, second = planned(old, model, knob, mesh), planned(new, model, knob, mesh)
    found = compare(first.plan, second.plan)
    costs = delta(accounted(first, memory=True), accounted(second, memory=True))
    names = (old.name, new.name) if old.name != new.name else (str(old), str(new))
    if html is not None:
        write_text(html, diff_page.page(names, found, costs))
    if as_json:
        show_json({**found.to_json(), "costs": [cost.to_json() for cost in costs]})
        return
    if markdown:
        print(diff_page.markdown(names, found, costs))
        return
    print(found)
    for cost in costs:
        print(cost)
