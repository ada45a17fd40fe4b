"""Hover and definition: a verb's manual, a declaration and its line, the modules of a selector."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schedlang.diagnostics import codes
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import text_of
from schedlang.editors.complete import roots_of
from schedlang.editors.outline import Outline
from schedlang.editors.place import PATH, Place, declared, place, used_file
from schedlang.ir.primitive import load_all, registry
from schedlang.language import manual

# -- definition ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A place in a file: its path (None: the same file), its offset and the text it lies in."""

    file: Path | None
    offset: int
    text: str


def definition(text: str, offset: int, file: Path) -> Target | None:
    """Find the declaration of the name at `offset` of `file`; None if there is none."""
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


# -- hover -----------------------------------------------------------------------------------------


MOST = 6  # modules that are listed one by one
Rows = Sequence[Mapping[str, Any]]  # the lines of `plan --json` that stand on the cursor's line


def hover(text: str, offset: int, outline: Outline | None = None, rows: Rows = ()) -> str:
    """Describe the word at `offset`, as Markdown; empty where nothing is known."""
    load_all()
    start, end = _around(text, offset, PATH.removesuffix("*"))
    word = text[start:end]
    name = re.search(r"\w*$", text[:offset])
    bare = (name[0] if name else "") + re.match(r"\w*", text[offset:])[0]  # type: ignore[index]
    here = place(text, start)
    if text[end : end + 1] == "(" and bare in registry():
        page = manual.explain(registry()[bare])
        return f"```text\n{page.rstrip()}\n```" + _placed(rows)
    if bare.upper() in codes.CODES:
        return codes.explain(bare.upper())
    selected = outline is not None and not here.call and _selects(here)
    if outline is not None and selected and _modules(word, here, outline):
        return _modules(word, here, outline) + _placed(rows)
    for one in declared(text):
        if one.name == bare and one.kind != "step":
            return f"```sched\n{one.line}\n```"
    return ""


def _around(text: str, offset: int, chars: str) -> tuple[int, int]:
    """The longest run of some characters around an offset."""
    start = end = offset
    while start > 0 and re.fullmatch(chars, text[start - 1]):
        start -= 1
    while end < len(text) and re.fullmatch(chars, text[end]):
        end += 1
    return start, end


def _selects(here: Place) -> bool:
    """Tell whether a selector may begin at a place."""
    return here.statement == "" or re.search(r"(?:,|\bat|\bexcept)\s*$", here.statement) is not None


def _modules(word: str, here: Place, outline: Outline) -> str:
    """Describe the modules of a selector."""
    try:
        found = outline.select(word.strip(","), roots_of(here, outline))
    except Refusal:
        return ""
    listed = [f"- `{fqn or 'the model'}`: {outline.said(fqn)}" for fqn in found[:MOST]]
    more = [f"- and {len(found) - MOST} more"] if len(found) > MOST else []
    number = f"{len(found)} modules" if len(found) != 1 else "1 module"
    return "\n".join([f"**{number}**", "", *listed, *more]) if found else ""


def _placed(rows: Rows) -> str:
    """Describe layouts and collectives of rows in the plan."""
    said = []
    for row in rows:
        sent = [
            f"{c['count']} {c['kind']} over {', '.join(c['axes'])} ({c['what']})"
            for c in row["collectives"]
        ]
        told = "; ".join([*([f"`{row['said']}`"] if row["said"] else []), *sent])
        said.append(f"- `{row['pattern']}` {row['do']}: {told or 'planned'}")
    return "\n\n**In the plan**\n\n" + "\n".join(said) if said else ""
