"""why: which rows act on a module, and what a collective is for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from schedlang.verbs.exits import bad_option, show_json
from schedlang.verbs.options import AsJson, Common, verb


@verb
def why(
    file: Annotated[Path, typer.Argument(help="A schedule.", metavar="FILE")],
    name: Annotated[
        str | None, typer.Argument(help="A module or a parameter.", metavar="FQN")
    ] = None,
    *,
    collective: Annotated[
        int | None,
        typer.Option(
            "--collective",
            metavar="N",
            help="Explain the collective with this number of `--collectives`.",
        ),
    ] = None,
    collectives: Annotated[
        bool,
        typer.Option(
            "--collectives", help="List everything that ranks send in a step, with numbers."
        ),
    ] = False,
    common: Common,
    as_json: AsJson = False,
) -> None:
    """Show which rows act on a module or parameter, or why ranks send something to each other."""
    from schedlang.verbs.inputs import account_costs, plan_schedule
    from schedlang.viz.why import explain_collective, explain_rows, list_collectives

    if (name is not None) + (collective is not None) + collectives != 1:
        title = "`why` needs either a module or a collective"
        bad_option(
            title, "`why FILE transformer.h.0`, `why FILE --collectives`, `why FILE --collective 3`"
        )
    planned = plan_schedule(file, common.model, common.knob, common.mesh)
    if name is not None:
        text = explain_rows(planned.plan, planned.tree, name)
    elif collective is None:
        text = list_collectives(account_costs(planned))
    else:
        text = explain_collective(planned.plan, planned.tree, account_costs(planned), collective)
    show_json({"why": text.split("\n")}) if as_json else print(text)
