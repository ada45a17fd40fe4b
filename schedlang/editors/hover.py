"""Hover: a verb's manual, a declaration's line, the modules of a selector and how they lie."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from schedlang import codes, manual
from schedlang.diagnostic import Refusal
from schedlang.editors.complete import roots_of
from schedlang.editors.declared import declared
from schedlang.editors.outline import Outline
from schedlang.editors.place import PATH, Place, place
from schedlang.primitive import load_all, registry

MOST = 6  # modules that are listed one by one
Rows = Sequence[Mapping[str, Any]]  # the lines of `plan --json` that stand on the cursor's line


def hover(text: str, offset: int, outline: Outline | None = None, rows: Rows = ()) -> str:
    """What is known of the word at `offset`, as Markdown; empty where nothing is."""
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
    """Whether a selector may begin where a place is."""
    return here.statement == "" or re.search(r"(?:,|\bat|\bexcept)\s*$", here.statement) is not None


def _modules(word: str, here: Place, outline: Outline) -> str:
    """What a selector names."""
    try:
        found = outline.select(word.strip(","), roots_of(here, outline))
    except Refusal:
        return ""
    listed = [f"- `{fqn or 'the model'}`: {outline.said(fqn)}" for fqn in found[:MOST]]
    more = [f"- and {len(found) - MOST} more"] if len(found) > MOST else []
    number = f"{len(found)} modules" if len(found) != 1 else "1 module"
    return "\n".join([f"**{number}**", "", *listed, *more]) if found else ""


def _placed(rows: Rows) -> str:
    """How the plan lays out what a row names, and what it sends."""
    said = []
    for row in rows:
        sent = [f"{c['count']} {c['kind']} over {', '.join(c['axes'])} ({c['what']})"
                for c in row["collectives"]]  # fmt: skip
        told = "; ".join([*([f"`{row['said']}`"] if row["said"] else []), *sent])
        said.append(f"- `{row['pattern']}` {row['do']}: {told or 'planned'}")
    return "\n\n**In the plan**\n\n" + "\n".join(said) if said else ""
