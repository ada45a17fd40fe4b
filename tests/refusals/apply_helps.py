"""Apply the help text of a message to a schedule, as its words say."""

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
ABOVE_WORDS, BELOW_WORDS = ("first", "above"), ("below", "at the end", "too", "behind it")


@dataclass(frozen=True)
class AppliedHelp:
    """A schedule and command options after one help was applied."""

    help: str
    text: str
    options: tuple[str, ...] = ()


def applied_helps(text: str, diagnostic: Mapping[str, Any]) -> Iterator[AppliedHelp]:
    """Yield the schedule with each help applied that says what to write."""
    load_all()
    position = diagnostic["at"]
    for help_ in diagnostic["helps"]:
        if "drop the row" in help_:
            continue
        for option in re.findall(r"`--(mesh|knob) (\w+=\d+)`", help_):
            yield AppliedHelp(help_, text, (f"--{option[0]}", option[1]))
        size = MAY_BE.search(help_)
        if size and re.search(rf"mesh\([^)]*\b{size[1]}=", text):
            yield AppliedHelp(help_, text, ("--mesh", f"{size[1]}={size[2]}"))
        for fragment in QUOTED.findall(help_) if position["line"] else ():
            new_text = _apply_help(text, position, help_, fragment)
            if new_text is not None and "..." not in fragment:
                yield AppliedHelp(help_, new_text)


def _apply_help(text: str, position: Mapping[str, Any], help_: str, fragment: str) -> str | None:
    """Insert a fragment where the help says; None if that cannot be decided."""
    lines = text.split("\n")
    row_index, start, end = position["line"] - 1, position["col"] - 1, position["end_col"] - 1
    line = lines[row_index]
    marked = line[start:end]
    row = _parse_row(fragment)
    if row is not None:
        indent = line[: len(line) - len(line.lstrip())]
        if any(word in help_ for word in ABOVE_WORDS):
            lines.insert(row_index, indent + fragment)
        elif any(word in help_ for word in BELOW_WORDS):
            lines.append(indent + fragment)
        elif isinstance(row, n.Rule) or "leave the selector out" in help_:
            lines[row_index] = indent + fragment
        elif row.call.name.text == marked.partition("(")[0]:
            lines[row_index] = line[:start] + fragment + line[end:]
        else:
            return None
    elif help_.startswith("did you mean"):
        value = marked.partition("=")[2] if "=" in marked and "=" not in fragment else None
        mended = f"{fragment}={value}" if value is not None else fragment
        if marked.partition(":")[1] and fragment.startswith(":"):
            mended = marked.partition(":")[0] + fragment
        lines[row_index] = line[:start] + mended + line[end:]
    elif re.fullmatch(r"\w+=[\w*\[\], ]+", fragment) and marked.endswith(")"):
        lines[row_index] = line[:start] + _set_argument(marked, fragment) + line[end:]
    elif help_.startswith("choose one of") and "=" not in marked and "(" not in marked:
        lines[row_index] = line[:start] + fragment + line[end:]
    elif re.match(r'(step "|schedule )', fragment):
        matches = [
            k for k, text_line in enumerate(lines) if text_line.startswith(fragment.split()[0])
        ]
        if matches:
            lines[matches[0]] = fragment
        else:  # a step around the marked row and all rows after it
            lines = [*lines[:row_index], fragment, *lines[row_index:], "}"]
    else:
        return None
    return "\n".join(lines)


def _parse_row(fragment: str) -> n.Rule | n.Do | None:
    """Parse a fragment as a row with a registered verb; None if it is not one."""
    try:
        items = parse(Source("help", f"schedule 1\n\n{fragment}\n")).items
    except Refusal:
        return None
    row = items[0] if len(items) == 1 else None
    is_known = isinstance(row, n.Rule | n.Do) and row.call.name.text in registry()
    return row if is_known and isinstance(row, n.Rule | n.Do) else None


def _set_argument(call: str, keyword: str) -> str:
    """Return a call with the keyword argument set or replaced."""
    name = keyword.partition("=")[0]
    changed = re.sub(rf"\b{name}=(\([^)]*\)|\[[^\]]*\]|[^,)]+)", keyword, call)
    if changed != call:
        return changed
    return f"{call[:-1]}{'' if call.endswith('()') else ', '}{keyword})"
