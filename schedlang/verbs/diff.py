"""diff: two schedules for one model, compared action by action."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from schedlang.verbs.outcome import AsJson, Knobs, MeshSizes, Model, show_json, verb


@verb
def diff(
    old: Annotated[Path, typer.Argument(help="A schedule.", metavar="A")],
    new: Annotated[Path, typer.Argument(help="Another for the same model.", metavar="B")],
    model: Model = None,
    knob: Knobs = None,
    mesh: MeshSizes = None,
    as_json: AsJson = False,
) -> None:
    """Compare two schedules by what they do, not by their lines; and what each costs.

    Knobs and axis sizes are set in both.
    """
    from schedlang.passes.delta import delta
    from schedlang.passes.diff import compare
    from schedlang.verbs.files import accounted, planned

    first, second = planned(old, model, knob, mesh), planned(new, model, knob, mesh)
    found = compare(first.plan, second.plan)
    costs = delta(accounted(first), accounted(second))
    if as_json:
        show_json({**found.to_json(), "costs": [cost.to_json() for cost in costs]})
        return
    print(found)
    for cost in costs:
        print(cost)
