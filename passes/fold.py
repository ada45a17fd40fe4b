"""Many names of modules as one short text."""

from __future__ import annotations

from collections.abc import Sequence


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
