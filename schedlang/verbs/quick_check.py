"""Checks of schedules without their models, for `check FILE` before any option is parsed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from schedlang.diagnostics.tables import message_columns
from schedlang.verbs.exits import HOLDS, exit_code_of, show_json

if TYPE_CHECKING:
    from schedlang.diagnostics.diagnostic import Diagnostic
    from schedlang.passes.elaborate.state import Settings


def collect_warnings(files: Sequence[Path], settings: Settings) -> list[Diagnostic]:
    """Return the warnings of schedules; refuse all mistakes of all files at once."""
    from schedlang.diagnostics.diagnostic import Refusal
    from schedlang.language.syntax import parse, read
    from schedlang.passes.elaborate.expand import expand
    from schedlang.passes.elaborate.lint import lint

    problems: list[Diagnostic] = []
    warnings: list[Diagnostic] = []
    for file in files:
        try:
            tree = parse(read(file))
            warnings += lint(tree, expand(tree, None, settings))
        except Refusal as refusal:
            problems += refusal.diagnostics
    if problems:
        raise Refusal(*problems, *warnings)
    return warnings


def show_warnings(warnings: Sequence[Diagnostic]) -> None:
    """Print each warning, framed, on standard error."""
    for warning in warnings:
        print(warning.render(message_columns(sys.stderr)) + "\n", file=sys.stderr)


def run_quick_check(args: Sequence[str]) -> int | None:
    """Return the exit code of `check` for these words, if they are files and `--json` only; else
    None.

    Editors and hooks check every file that is saved: this path avoids the packages that parse
    options, which take longer to import than the check itself.
    """
    as_json = "--json" in args
    files = [Path(arg) for arg in args if arg != "--json"]
    if not files or any(arg.startswith("-") for arg in args if arg != "--json"):
        return None

    def run() -> int:
        from schedlang.verbs.inputs import parse_settings

        warnings = collect_warnings(files, parse_settings(None, None))
        if as_json:
            show_json({"exit": HOLDS, "diagnostics": [warning.to_json() for warning in warnings]})
            return HOLDS
        show_warnings(warnings)
        for file in files:
            print(f"{file}: holds")
        return HOLDS

    return exit_code_of(run, as_json)
