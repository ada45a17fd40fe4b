"""check: syntax, names, domains and arguments of schedules, without a model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from schedlang.verbs.outcome import AsJson, Knobs, MeshSizes, show_json, verb


@verb
def check(
    files: Annotated[list[Path], typer.Argument(help="Schedule files.", metavar="FILE...")],
    knob: Knobs = None,
    mesh: MeshSizes = None,
    as_json: AsJson = False,
) -> None:
    """Check syntax, names, domains and arguments; needs neither torch nor the model.

    What depends on the model (selectors, shapes) is checked by `plan` and `verify`.
    """
    from schedlang.diagnostic import Diagnostic, Refusal
    from schedlang.passes.expand import expand
    from schedlang.passes.lint import lint
    from schedlang.syntax import parse, read
    from schedlang.verbs.settings import settings

    given = settings(knob, mesh)
    problems: list[Diagnostic] = []
    warnings: list[Diagnostic] = []
    for file in files:
        try:
            tree = parse(read(file))
            expand(tree, None, given)
            warnings += lint(tree)
        except Refusal as refusal:
            problems += refusal.diagnostics
    if problems:
        raise Refusal(*problems, *warnings)
    if as_json:
        show_json({"exit": 0, "diagnostics": [d.to_json() for d in warnings]})
        return
    for warning in warnings:
        print(warning.render() + "\n", file=sys.stderr)
    for file in files:
        print(f"{file}: holds")
