"""The fewest rows of a drawn schedule that still end as it does."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

OPTION = re.compile(r"(, |(?<=\())(?!over=|stage=|order=)\w+=(\w+|\[.*?\])(?=[,)])")
Same = Callable[[str], bool]


def least(text: str, same: Same) -> str:
    """The first smaller text that ends the same, again and again until none does."""
    while (found := next(filter(same, _smaller(text)), None)) is not None:
        text = found
    return text


def _smaller(text: str) -> Iterator[str]:
    """Without one row; with one row's choices left out; with an axis of a smaller size."""
    lines = text.split("\n")
    rows = [k for k, line in enumerate(lines) if re.match(r"\s+.*\w\(.*\)", line)]
    for k in rows if len(rows) > 1 else ():
        yield "\n".join([*lines[:k], *lines[k + 1 :]])
    for k in rows:
        if (plain := OPTION.sub("", lines[k])) != lines[k]:
            yield "\n".join([*lines[:k], plain, *lines[k + 1 :]])
    for axis, size in re.findall(r"(?<=[(\s])(\w+)=(\d)(?=[,)])", lines[_mesh(lines)]):
        if int(size) > 1:
            less = lines[_mesh(lines)].replace(f"{axis}={size}", f"{axis}={int(size) - 1}")
            yield "\n".join([*lines[: _mesh(lines)], less, *lines[_mesh(lines) + 1 :]])


def _mesh(lines: list[str]) -> int:
    return next((k for k, line in enumerate(lines) if line.startswith("mesh(")), 0)
