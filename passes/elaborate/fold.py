"""Many names of modules as one short text, and as few patterns of the language."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

Key = TypeVar("Key")


def folded(sites: Sequence[str]) -> str:
    """transformer.h.*.mlp for sites that differ in numbers only; else the first and a count."""
    if len(sites) == 1:
        return sites[0] or "the model"
    rows = [site.split(".") for site in sites]
    if len({len(row) for row in rows}) == 1:
        merged = [_segment(column) for column in zip(*rows)]
        if all(merged):
            return ".".join(merged)
    return f"{sites[0] or 'the model'} and {len(sites) - 1} more"


def _segment(column: Sequence[str]) -> str:
    """One segment of all names: the same, or `*` for numbers; empty if they differ otherwise."""
    if len(set(column)) == 1:
        return column[0]
    return "*" if all(name.isdigit() for name in column) else ""


def shape_of(site: str) -> str:
    """The name with every number replaced: equal for modules that stand alike in other layers."""
    return ".".join("*" if part.isdigit() else part for part in site.split("."))


def alike(
    sites: Iterable[str], key: Callable[[str], Key]
) -> Mapping[tuple[str, Key], tuple[str, ...]]:
    """Sites that stand alike and have equal keys, in the order of the first of each."""
    found: dict[tuple[str, Key], list[str]] = {}
    for site in sites:
        found.setdefault((shape_of(site), key(site)), []).append(site)
    return {place: tuple(group) for place, group in found.items()}


def pattern(group: Sequence[str], everyone: Iterable[str]) -> str:
    """One text for sites that stand alike: `h.*` if they are all that stand so among `everyone`.

    Otherwise their numbers as a slice, `h[0:6]`, `h[0:6:2]` or `h[1, 5]`.
    """
    if len(group) == 1:
        return group[0] or "the model"
    shape = shape_of(group[0])
    if len(group) == sum(1 for site in everyone if shape_of(site) == shape):
        return shape
    columns = [list(dict.fromkeys(column)) for column in zip(*(s.split(".") for s in group))]
    if math.prod(map(len, columns)) != len(group):
        return f"{group[0]} and {len(group) - 1} more"
    text = ""
    for numbers in columns:
        dot = "." if text else ""
        text += dot + numbers[0] if len(numbers) == 1 else _slice([int(n) for n in numbers])
    return text


def _slice(numbers: Sequence[int]) -> str:
    """Numbers as the language writes them: `[2:5]`, `[0:8:2]`, `[1, 5, 6]`."""
    step = numbers[1] - numbers[0]
    if step > 0 and list(numbers) == list(range(numbers[0], numbers[-1] + 1, step)):
        end = numbers[-1] + 1
        if len(numbers) > 2 or step == 1:
            return f"[{numbers[0]}:{end}]" if step == 1 else f"[{numbers[0]}:{end}:{step}]"
    return f"[{', '.join(map(str, numbers))}]"
