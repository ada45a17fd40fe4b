"""Rows of a formatted file to text: runs of rules at one depth share their columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

INDENT = "  "


@dataclass
class Row:
    """One line to be: `right` is set for a rule, whose second column is aligned with its run's."""

    depth: int
    left: str
    right: str | None = None
    comment: str | None = None

    @property
    def blank(self) -> bool:
        """An empty line."""
        return not self.left

    @property
    def opens(self) -> bool:
        """The first line of a block."""
        return self.left.endswith("{") and not self.left.startswith("#")


def lay_out(rows: list[Row]) -> str:
    """The text of all rows, each line ended."""
    return "".join(line.rstrip() + "\n" for run in _runs(rows) for line in _aligned(run))


def _runs(rows: list[Row]) -> Iterator[list[Row]]:
    """Maximal runs of rules at one depth; every other row is a run of its own."""
    run: list[Row] = []
    for row in rows:
        together = run and row.right is not None and run[-1].right is not None
        if together and row.depth == run[-1].depth:
            run.append(row)
            continue
        if run:
            yield run
        run = [row]
    if run:
        yield run


def _aligned(run: list[Row]) -> list[str]:
    width = max(len(row.left) for row in run)
    texts = []
    for row in run:
        text = row.left if row.right is None else f"{row.left:<{width}}  {row.right}"
        texts.append(INDENT * row.depth + text)
    column = max((len(t) for t, row in zip(texts, run) if row.comment), default=0)
    return [f"{t:<{column}}  {row.comment}" if row.comment else t for t, row in zip(texts, run)]
