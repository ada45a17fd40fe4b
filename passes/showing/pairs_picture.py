"""Communication of a step as SVG: bytes from rank to rank, and what sends them."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

from schedlang.amounts import size
from schedlang.passes.costs.pairs import Pairs, pairs
from schedlang.passes.showing.words_at import say

if TYPE_CHECKING:
    from schedlang.passes.costs.sent import Collective
    from schedlang.passes.showing.show import View

# one hue, from the ground's lightness away: told apart by lightness alone
LIGHT = ("#e3eef8", "#b5d4ea", "#7fb6dc", "#4b97cf")
DARK = ("#15293b", "#1d4768", "#2a6c9f", "#6bb5e8")
WORDS = ("#e6edf3", "#e6edf3", "#ffffff", "#111111")  # on the dark ones
STYLE = (
    "".join(f".p .h{k}{{fill:{fill}}}.p .w{k}{{fill:#111}}" for k, fill in enumerate(LIGHT))
    + ".p .c,.p .w{text-anchor:middle;font-size:11px}.p .w{font-size:10px}"
    + "@media(prefers-color-scheme:dark){"
    + "".join(f".p .h{k}{{fill:{fill}}}" for k, fill in enumerate(DARK))
    + "".join(f".p .w{k}{{fill:{fill}}}" for k, fill in enumerate(WORDS))
    + "}"
)
MARGIN, HEAD, SIDE, CELL, WORDY = 24, 44, 420.0, 56.0, 50.0
LIST, BAR, MOST_SORTS, SORT = 660, 430.0, 8, 32
MOST_CELLS = 16  # rows and columns; beyond, cells are not told apart when pointed at
Sort = tuple[str, str]  # kind, axes


@dataclass(frozen=True)
class Matrix:
    """Where the cells of a matrix lie, and how dark they are."""

    sums: Pairs
    y: int

    @property
    def cell(self) -> float:
        """Points from one cell to the next."""
        return min(CELL, SIDE / len(self.sums.names))

    @property
    def left(self) -> float:
        """Where the first column begins: right of the names."""
        return max(96.0, MARGIN + 36 + 7.0 * self._longest)

    @property
    def _longest(self) -> int:
        return max(len(name) for name in self.sums.names) if self.cell >= 24 else 0

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The bytes at which shades begin: equal steps of the logarithm from least to most."""
        there = self.sums.bytes[self.sums.bytes > 0]
        low, high = math.log(there.min()), math.log(there.max())
        count = len(LIGHT) if high - low > 0.7 else 1
        edges = (math.floor(math.exp(low + (high - low) * k / count)) for k in range(count))
        return tuple(dict.fromkeys(edges))

    def shade(self, value: float) -> int:
        """The shade of so many bytes."""
        lowest = len(LIGHT) - len(self.starts)
        return lowest + sum(value >= start for start in self.starts[1:])

    def every(self, room: int) -> int:
        """Of how many rows or columns one can be named that needs so many points."""
        return math.ceil(room / self.cell)


def between(view: View, y: int) -> tuple[list[str], int]:
    """The matrix of ranks and the sorts of collectives, from `y` down; their height."""
    plan, found = view.plan, view.account.collectives
    if not found or plan.mesh.world < 2:
        return [], 0
    sums = pairs(plan.mesh, plan.cuts[0].axis if plan.cuts else "", found)
    if not sums.bytes.any():
        return [], 0
    drawn = Matrix(sums, y + HEAD)
    sorts, low = _sorts(view, found, y)
    parts = [say(MARGIN, y, "sent in a step", "t"), *_legend(drawn, y), *_names(drawn)]
    parts += [*_cells(drawn), *sorts]
    high = HEAD + drawn.cell * len(sums.names)
    if sums.ranks < plan.mesh.world:
        high += 18
        words = f"the first {sums.ranks} of {plan.mesh.world} ranks"
        parts.append(say(drawn.left, y + high - 4, words, "s"))
    return parts, round(max(high, low)) + 34


def _legend(drawn: Matrix, y: int) -> Iterator[str]:
    x = 150.0
    for start, following in zip(drawn.starts, (*drawn.starts[1:], 1)):
        words = f"from {size(start)}" if start else f"below {size(following)}"
        kind = f"h{drawn.shade(start + 0.5)}"
        yield f'<rect class="{kind}" x="{x:.0f}" y="{y - 10}" width="12" height="12"/>'
        yield say(x + 17, y, words)
        x += 34 + 6.6 * len(words)


def _names(drawn: Matrix) -> Iterator[str]:
    """What rows and columns are."""
    sums, wide = drawn.sums, drawn.cell
    whose = "a rank" if sums.each == 1 else f"{sums.each} ranks"
    yield say(MARGIN, drawn.y - 22, f"each row is {whose} and what goes to each column", "s")
    for place, name in enumerate(sums.names):
        middle = (place + 0.5) * wide
        if place % drawn.every(20) == 0:
            yield say(MARGIN, drawn.y + middle + 4, str(place), "m")
            if drawn.cell >= 24:
                yield say(MARGIN + 26, drawn.y + middle + 4, name, "s")
            yield say(drawn.left + middle, drawn.y - 5, str(place), "c")


def _cells(drawn: Matrix) -> Iterator[str]:
    """Cells of what is sent, with the bytes written on them where there is room."""
    sums, wide = drawn.sums, drawn.cell
    side = wide * len(sums.names)
    yield f'<rect class="z" x="{drawn.left:.1f}" y="{drawn.y}" width="{side:g}" height="{side:g}"/>'
    if len(sums.names) > MOST_CELLS:
        yield from _runs(drawn)
        return
    for row, column in zip(*(found.tolist() for found in sums.bytes.nonzero())):
        value = float(sums.bytes[row, column])
        x, y, words = drawn.left + column * wide, drawn.y + row * wide, size(round(value))
        said = html.escape(f"{sums.names[row]} to {sums.names[column]}: {words}")
        shade = drawn.shade(value)
        yield (f'<rect class="h{shade}" x="{x:.1f}" y="{y:.1f}" width="{wide - 1:.1f}" '
               f'height="{wide - 1:.1f}"><title>{said}</title></rect>')  # fmt: skip
        if wide >= WORDY:
            yield say(x + wide / 2, y + wide / 2 + 3, words, f"w w{shade}")


def _runs(drawn: Matrix) -> Iterator[str]:
    """Of many ranks: neighbours of a shade as one piece, and all of a shade as one path."""
    wide, paths = drawn.cell, [""] * len(LIGHT)
    for row, values in enumerate(drawn.sums.bytes.tolist()):
        shades = enumerate(drawn.shade(value) if value else -1 for value in values)
        for shade, run in groupby(shades, key=lambda pair: pair[1]):
            places = [place for place, _ in run]
            if shade >= 0:
                x, y = drawn.left + places[0] * wide, drawn.y + row * wide
                long = len(places) * wide
                paths[shade] += f"M{x:.1f} {y:.1f}h{long:.1f}v{wide:.1f}h-{long:.1f}z"
    yield from (f'<path class="h{k}" d="{path}"/>' for k, path in enumerate(paths) if path)


def _sorts(view: View, found: Sequence[Collective], y: int) -> tuple[list[str], int]:
    """What one rank takes part in, at the place where that is most, as bars; their height."""
    places = sorted({one.place or 0 for one in view.account.classes or ()}) or [0]
    sums: dict[Sort, tuple[int, int]] = {}
    for key in dict.fromkeys(_sort(one) for one in found):
        sums[key] = max((_total(view.account.at(p), key) for p in places), key=lambda s: s[1])
    shown = sorted(sums.items(), key=lambda item: -item[1][1])[:MOST_SORTS]
    most = max(total for _, (_, total) in shown) or 1
    parts = [say(LIST, y, "collectives of a rank", "t")]
    for place, ((kind, axes), (count, total)) in enumerate(shown):
        top, wide = y + 24 + place * SORT, max(1.0, BAR * total / most)
        parts.append(say(LIST, top, f"{kind} over {axes}: {count}, {size(total)} in all", "s"))
        parts.append(f'<rect class="h3" x="{LIST}" y="{top + 5}" width="{wide:.1f}" height="9"/>')
    rest = len(sums) - len(shown)
    if rest:
        words = f"and {rest} more sort{'s' * (rest > 1)}"
        parts.append(say(LIST, y + 24 + len(shown) * SORT, words, "s"))
    return parts, 24 + (len(shown) + (rest > 0)) * SORT


def _sort(one: Collective) -> Sort:
    return one.kind, ", ".join(one.axes)


def _total(found: Sequence[Collective], key: Sort) -> tuple[int, int]:
    mine = [one for one in found if _sort(one) == key]
    return sum(one.count for one in mine), sum(one.total for one in mine)
