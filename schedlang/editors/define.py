"""Definition: where the name at a cursor is declared, also in a file that the schedule uses."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from schedlang.editors.declared import declared, used_file
from schedlang.texts import text_of


@dataclass(frozen=True)
class Target:
    """A place in a file: its path (None: the same file), its offset and the text it lies in."""

    file: Path | None
    offset: int
    text: str


def definition(text: str, offset: int, file: Path) -> Target | None:
    """Where what stands at `offset` of `file` is declared; None if nowhere."""
    line = text[text.rfind("\n", 0, offset) + 1 :].split("\n", 1)[0]
    used = re.match(r'\s*use\s+"([^"]*)"', line)
    if used:
        return _in_file(file.parent / used[1], "")
    before = re.search(r"[\w.]*$", text[:offset])
    after = re.match(r"\w*", text[offset:])
    word = (before[0] if before else "") + (after[0] if after else "")
    alias, dot, name = word.rpartition(".")
    path = used_file(text, alias) if dot else None
    if path is not None:
        return _in_file(file.parent / path, name)
    for one in declared(text):
        if one.name == word and one.kind != "step":
            return Target(None, one.offset, text)
    return None


def _in_file(path: Path, name: str) -> Target | None:
    """A declaration in another file; its start where no name is asked for."""
    try:
        text = text_of(path)
    except (OSError, UnicodeDecodeError):
        return None
    if not name:
        return Target(path, 0, text)
    found = next((one for one in declared(text) if one.name == name), None)
    return Target(path, found.offset, text) if found else None
