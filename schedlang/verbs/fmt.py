"""fmt: rewrite schedules in their one canonical form."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from schedlang.diagnostics.source import read_bytes
from schedlang.verbs.exits import FAILS, show_json
from schedlang.verbs.options import AsJson, verb


@verb
def fmt(
    files: Annotated[list[Path], typer.Argument(help="Schedule files.", metavar="FILE")],
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit 1 if a file would change.")
    ] = False,
    upgrade: Annotated[
        bool, typer.Option("--upgrade", help="Rewrite older editions of the language.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Format schedules in place: one style, no options.  Comments are kept.

    Files are written only if every file can be read.  `--upgrade` first rewrites files of an older
    edition (`schedule 1` names the edition) for this schedlang, and lists the changes.
    """
    from schedlang.diagnostics.diagnostic import Diagnostic, Refusal
    from schedlang.language import printer
    from schedlang.language.grammar import UpgradedSource, upgrade_source
    from schedlang.language.syntax import read
    from schedlang.verbs.inputs import write_text

    formatted: dict[Path, tuple[str, str]] = {}
    notes: dict[Path, list[str]] = {}  # the changes of an upgrade
    problems: list[Diagnostic] = []
    for file in files:
        try:
            source = read(file)
            newer = upgrade_source(source) if upgrade else UpgradedSource(source)
            formatted[file] = (source.text, printer.fmt(newer.source))
            notes[file] = [change.description for change in newer.changes]
        except Refusal as refusal:
            problems += refusal.diagnostics
    if problems:
        raise Refusal(*problems)
    changed = [file for file, (before, after) in formatted.items() if _differs(file, before, after)]
    for file in changed if not check else ():
        write_text(file, formatted[file][1])
    code = FAILS if check and changed else 0
    if as_json:
        upgrades = {str(file): note for file, note in notes.items() if note}
        show_json({"exit": code, "changed": [str(f) for f in changed], "upgraded": upgrades})
    else:
        for file in changed:
            print(f"{'would format' if check else 'formatted'} {file}")
            for note in notes[file]:
                print(f"  {note}")
    raise typer.Exit(code)


def _differs(file: Path, before: str, after: str) -> bool:
    """Return whether the bytes would change; line ends and a byte order mark count, too."""
    return before != after or read_bytes(file) != after.encode()
