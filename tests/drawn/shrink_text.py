"""Shrink the text of a schedule while its outcome stays the same."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

OPTION = re.compile(r"(, |(?<=\())(?!over=|stage=|order=)\w+=(\w+|\[.*?\])(?=[,)])")
Same = Callable[[str], bool]


def shrink_text(text: str, same: Same) -> str:
    """Replace the text by the first smaller one with the same outcome, until there is none."""
    while (smaller := next(filter(same, _smaller_texts(text)), None)) is not None:
        text = smaller
    return text


def _smaller_texts(text: str) -> Iterator[str]:
    """Yield texts without one row, without one row's options, with a smaller axis."""
    lines = text.split("\n")
    rows = [k for k, line in enumerate(lines) if re.match(r"\s+.*\w\(.*\)", line)]
    for k in rows if len(rows) > 1 else ():
        yield "\n".join([*lines[:k], *lines[k + 1 :]])
    for k in rows:
        if (stripped := OPTION.sub("", lines[k])) != lines[k]:
            yield "\n".join([*lines[:k], stripped, *lines[k + 1 :]])
    for axis, size in re.findall(r"(?<=[(\s])(\w+)=(\d)(?=[,)])", lines[_mesh_line(lines)]):
        if int(size) > 1:
            smaller_mesh = lines[_mesh_line(lines)].replace(
                f"{axis}={size}", f"{axis}={int(size) - 1}"
            )
            yield "\n".join(
                [*lines[: _mesh_line(lines)], smaller_mesh, *lines[_mesh_line(lines) + 1 :]]
            )


def _mesh_line(lines: list[str]) -> int:
    return next((k for k, line in enumerate(lines) if line.startswith("mesh(")), 0)
