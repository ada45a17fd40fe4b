"""Sizes that ranks do not divide: what is padded, what several ranks hold, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from schedlang.ir.placement import EVEN, Uneven

Rule = Literal["pad", "replicate"]
MOST_SHOWN = 8


@dataclass(frozen=True)
class Cut:
    """A dim to be split: its blocks, into how many heads each may be cut, and by which rule.

    `heads` None: between any two elements.
    """

    blocks: tuple[int, ...]
    heads: int | None
    rule: Rule | None

    @property
    def units(self) -> tuple[int, ...]:
        """For each block into how many pieces it may be cut."""
        return tuple(self.heads or block for block in self.blocks)

    def even(self, ranks: int) -> bool:
        """Do the ranks divide every block, between its heads?"""
        return all(count % ranks == 0 for count in self.units)

    def uneven(self, ranks: int) -> Uneven | None:
        """How the dim lies on the ranks; None where the rule does not fit the sizes."""
        if self.even(ranks) or ranks == 1:
            return EVEN
        if self.rule == "pad":
            wide = {Fraction(-(-n // ranks) * ranks, n) for n in self.units}
            return Uneven(wide.pop()) if len(wide) == 1 and min(self.units) > 1 else None
        if self.rule == "replicate" and self.heads and ranks % self.heads == 0:
            return Uneven(Fraction(ranks // self.heads), ranks // self.heads)
        return None

    def fitting(self) -> list[int]:
        """The numbers of ranks, up to 1024, that divide it evenly."""
        return [n for n in range(2, 1025) if self.even(n)]


def some(numbers: Sequence[int]) -> str:
    """The first of some numbers."""
    shown = ", ".join(map(str, numbers[:MOST_SHOWN]))
    return shown if len(numbers) <= MOST_SHOWN else f"{shown}, ..."


def remedy(heads: int | None, ranks: int, splits_out: bool) -> tuple[tuple[str, str], ...]:
    """The arguments of the first of `remedies`, names and values."""
    rule = "pad" if heads != 1 else None
    if heads and splits_out and ranks % heads == 0:
        rule = "replicate"
    count = (("heads", str(heads)),) if heads else ()
    return (*count, ("uneven", rule)) if rule is not None else ()


def remedies(row: str, heads: int | None, ranks: int, splits_out: bool) -> list[str]:
    """Rows that make heads, or any sizes, fit; `row` is the call without its closing bracket."""
    count = f", heads={heads}" if heads else ""
    found = []
    if heads and splits_out and ranks % heads == 0:
        found.append(f"let several ranks hold one head: `{row}{count}, uneven=replicate)`")
    if heads != 1:
        found.append(f"pad with zeros: `{row}{count}, uneven=pad)`")
    return found


def blocks_of(blocks: object, size: int) -> tuple[str, ...]:
    """What may be written in the place of blocks that do not make up a dim."""
    if isinstance(blocks, int):
        fit = [n for n in range(1, size + 1) if size % n == 0]
        return (f"`blocks` may be {some(fit)}, or sizes that add up to {size}: `blocks=[...]`",)
    return (f"the sizes must add up to {size}, or a number of equal blocks divide it: `blocks=2`",)
