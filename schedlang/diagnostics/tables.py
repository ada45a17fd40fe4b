"""Tables and wrapped text for a terminal, small HTML tables for notebooks, and readable numbers.

A table that is too wide is printed in several parts; names are never broken.
"""

from __future__ import annotations

import html
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import TextIO


def format_bytes(count: int) -> str:
    """Format bytes: 62.7 MiB."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 999.5 or unit == "TiB":
            break
        value /= 1024
    return f"{count} B" if unit == "B" else f"{value:.3g} {unit}"


def format_seconds(time: float) -> str:
    """Format a time in seconds: 1.5 s, 20 ms, 3 us."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if time * factor >= 1:
            return f"{time * factor:.4g} {unit}"
    return f"{time * 1e6:.4g} us"


def format_count(count: int) -> str:
    """Format a count: 124.4 M."""
    for unit, factor in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return str(count)


Row = Sequence[str]
GAP = "  "
DEFAULT_COLUMNS = 80  # columns of messages without a terminal
# code marks and shapes, never broken; their spaces while wrapping
CODE, GLUE = re.compile(r"`[^`\n]*`|\[[\d, ]+\]"), "\0"


def terminal_columns(out: TextIO | None = None) -> int | None:
    """Return the columns of the terminal; None (unlimited) for other outputs."""
    return shutil.get_terminal_size().columns if (out or sys.stdout).isatty() else None


def message_columns(out: TextIO | None = None) -> int:
    """Return the columns for messages: those of the terminal, 80 for files and pipes."""
    return terminal_columns(out) or DEFAULT_COLUMNS


def wrap_text(text: str, width: int | None, indent: str = "", more: str | None = "  ") -> list[str]:
    """Wrap text between words, never inside a word or inside `code to be pasted`.

    Lines after the first are indented by `more` in addition; None: aligned with the first text.
    Existing lines of the text stay lines; lines that begin with a space are never wrapped.
    """
    if "\n" in text:
        first, *rest = text.split("\n")
        later = " " * len(indent) if more is None else indent + more
        lines = wrap_text(first, width, indent, more)
        for line in rest:
            lines += [line] if line.startswith(" ") else wrap_text(line, width, later, "")
        return lines
    if width is None or len(indent) + len(text) <= width:
        return [indent + text]
    later = " " * len(indent) if more is None else indent + more
    glued = CODE.sub(lambda match: match[0].replace(" ", GLUE), text)
    lines = textwrap.wrap(
        glued,
        max(width, 40),
        initial_indent=indent,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(GLUE, " ") for line in lines]


def wrap_lines(text: str, width: int | None) -> str:
    """Wrap the long lines of a text; continuations are indented further."""
    if width is None:
        return text
    lines = ((line.lstrip(" "), line) for line in text.split("\n"))
    return "\n".join(
        part
        for inner, line in lines
        for part in wrap_text(inner, width, " " * (len(line) - len(inner)), "    ")
    )


def column_widths(rows: Sequence[Row]) -> list[int]:
    """Return the width of each column."""
    return [max(len(cell) for cell in column) for column in zip(*rows)]


def format_row(row: Row, widths: Sequence[int]) -> str:
    """Format one line; a column that is empty everywhere takes no room."""
    return (GAP + GAP.join(cell.ljust(width) for cell, width in zip(row, widths) if width)).rstrip()


def format_table(rows: Sequence[Row], width: int | None = None, keys: int = 1) -> Iterator[str]:
    """Yield the lines of a table; a too wide one is split, each part with the first `keys`
    columns."""
    widths = column_widths(rows)
    start, count = keys, len(widths)
    while True:
        end = count
        if width is not None:
            used = sum(len(GAP) + w for w in widths[:keys] if w)
            end = start
            while end < count and (end == start or used + len(GAP) + widths[end] <= width):
                used += len(GAP) + widths[end] if widths[end] else 0
                end += 1
        part = [*range(keys), *range(start, end)]
        yield from (format_row([row[k] for k in part], [widths[k] for k in part]) for row in rows)
        if end >= count:
            return
        start = end


def html_table(title: str, rows: Sequence[Row], heads: Row = ()) -> str:
    """Format a table with a title as HTML; without `heads` the first cell of each row is its
    head."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in heads)
    body = "".join(
        "<tr>"
        + "".join(
            f"<{kind}>{html.escape(cell)}</{kind}>"
            for column, cell in enumerate(row)
            for kind in ("td" if heads or column else "th",)
        )
        + "</tr>"
        for row in rows
    )
    top = f"<tr>{head}</tr>" if heads else ""
    return f"<div><b>{html.escape(title)}</b><table>{top}{body}</table></div>"
