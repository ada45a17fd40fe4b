"""What a message offers as text, put into the schedule as its words say: the schedule after it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import Source
from schedlang.ir.primitive import load_all, registry
from schedlang.language import nodes as n
from schedlang.language.syntax import parse

QUOTED = re.compile(r"`([^`]+)`")
MAY_BE = re.compile(r"`(\w+)` may be (?:one of )?`?(\d+)")
ABOVE, BELOW = ("first", "above"), ("below", "at the end", "too", "behind it")


@dataclass(frozen=True)
class Pasted:
    """A schedule and options of the command, with what a help says done."""

    help: str
    text: str
    options: tuple[str, ...] = ()


def pasted(text: str, diagnostic: Mapping[str, Any]) -> Iterator[Pasted]:
    """Each help that says what to write, written."""
    load_all()
    place = diagnostic["at"]
    for help_ in diagnostic["helps"]:
        if "drop the row" in help_:
            continue
        for option in re.findall(r"`--(mesh|knob) (\w+=\d+)`", help_):
            yield Pasted(help_, text, (f"--{option[0]}", option[1]))
        size = MAY_BE.search(help_)
        if size and re.search(rf"mesh\([^)]*\b{size[1]}=", text):
            yield Pasted(help_, text, ("--mesh", f"{size[1]}={size[2]}"))
        for fragment in QUOTED.findall(help_) if place["line"] else ():
            made = _put(text, place, help_, fragment)
            if made is not None and "..." not in fragment:
                yield Pasted(help_, made)


def _put(text: str, place: Mapping[str, Any], help_: str, fragment: str) -> str | None:
    """The text with a fragment where it belongs; None if that cannot be told."""
    lines = text.split("\n")
    at, begin, end = place["line"] - 1, place["col"] - 1, place["end_col"] - 1
    line = lines[at]
    under = line[begin:end]
    row = _row(fragment)
    if row is not None:
        indent = line[: len(line) - len(line.lstrip())]
        if any(word in help_ for word in ABOVE):
            lines.insert(at, indent + fragment)
        elif any(word in help_ for word in BELOW):
            lines.append(indent + fragment)
        elif isinstance(row, n.Rule) or "leave the selector out" in help_:
            lines[at] = indent + fragment
        elif row.call.name.text == under.partition("(")[0]:
            lines[at] = line[:begin] + fragment + line[end:]
        else:
            return None
    elif help_.startswith("did you mean"):
        kept = under.partition("=")[2] if "=" in under and "=" not in fragment else None
        mended = f"{fragment}={kept}" if kept is not None else fragment
        if under.partition(":")[1] and fragment.startswith(":"):
            mended = under.partition(":")[0] + fragment
        lines[at] = line[:begin] + mended + line[end:]
    elif re.fullmatch(r"\w+=[\w*\[\], ]+", fragment) and under.endswith(")"):
        lines[at] = line[:begin] + _with(under, fragment) + line[end:]
    elif help_.startswith("choose one of") and "=" not in under and "(" not in under:
        lines[at] = line[:begin] + fragment + line[end:]
    elif re.match(r'(step "|schedule )', fragment):
        found = [k for k, one in enumerate(lines) if one.startswith(fragment.split()[0])]
        if found:
            lines[found[0]] = fragment
        else:  # a step for the row that is meant, and those after it
            lines = [*lines[:at], fragment, *lines[at:], "}"]
    else:
        return None
    return "\n".join(lines)


def _row(fragment: str) -> n.Rule | n.Do | None:
    """The row that a fragment is, of a verb that there is."""
    try:
        items = parse(Source("help", f"schedule 1\n\n{fragment}\n")).items
    except Refusal:
        return None
    row = items[0] if len(items) == 1 else None
    known = isinstance(row, n.Rule | n.Do) and row.call.name.text in registry()
    return row if known and isinstance(row, n.Rule | n.Do) else None


def _with(call: str, keyword: str) -> str:
    """A call with another argument, in the place of one of this name."""
    name = keyword.partition("=")[0]
    known = re.sub(rf"\b{name}=(\([^)]*\)|\[[^\]]*\]|[^,)]+)", keyword, call)
    if known != call:
        return known
    return f"{call[:-1]}{'' if call.endswith('()') else ', '}{keyword})"
