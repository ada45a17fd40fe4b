"""Memory over a step as SVG: what ranks hold, stacked by class, operation by operation."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from schedlang.amounts import size
from schedlang.memory import CLASSES, heaviest
from schedlang.passes.showing.words_at import say

if TYPE_CHECKING:
    from schedlang.memory import RankMemory

# Okabe and Ito's colours; areas lie in the order of the legend, so that nobody needs to tell them
COLOURS = dict(
    zip(CLASSES, ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#f0e442"), strict=True)
)
LEFT, WIDE, HIGH, GAP = 150.0, 900.0, 76.0, 34.0
MOST_PANELS, MOST_POINTS = 4, 300


def over_time(found: Sequence[RankMemory], axis: str, y: int) -> tuple[list[str], int]:
    """A panel for each of a few kinds of ranks, the fullest among them, from `y` down; its height.

    All have one scale of bytes, that of the fullest.  Of a long step neighbours stand together as
    the highest of them.
    """
    top = heaviest(found)
    shown = list(found[:MOST_PANELS])
    shown = shown if top in shown else [*shown[:-1], top]
    parts = [say(24, y, "bytes over a step", "t"), *_legend(y)]
    base = y + 12
    for one in shown:
        parts += _panel(one, axis, base, top.peak)
        base += round(HIGH + GAP)
    if len(shown) < len(found):
        parts.append(say(24, base + 4, f"and {len(found) - len(shown)} more kinds of ranks", "s"))
        base += 20
    return parts, base - y + 20


def _legend(y: int) -> Iterator[str]:
    x = LEFT
    for name, fill in COLOURS.items():
        yield f'<rect x="{x:.0f}" y="{y - 10}" width="12" height="12" fill="{fill}"/>'
        yield say(x + 17, y, name)
        x += 128


def _panel(one: RankMemory, axis: str, y: int, most: int) -> Iterator[str]:
    """One kind of ranks: areas, and where its peak is."""
    where = f"{axis}={one.place}" if one.place is not None else f"rank {one.first}"
    yield say(24, y + 14, where, "m")
    yield say(24, y + 30, f"{one.ranks} rank{'s' * (one.ranks > 1)}", "s")
    levels = _thinned([level for m in one.moments for level in (m.most, m.end)])
    step, scale = WIDE / max(1, len(levels) - 1), HIGH / max(1, most)
    below = [0.0] * len(levels)
    for place, name in enumerate(CLASSES):
        above = [low + level[place] for low, level in zip(below, levels)]
        if any(level[place] for level in levels):
            there = [*enumerate(above), *reversed([*enumerate(below)])]
            points = " ".join(f"{LEFT + k * step:.1f},{y + HIGH - v * scale:.1f}" for k, v in there)
            highest = max(level[place] for level in levels)
            said = html.escape(f"{name}: at most {size(highest)}")
            yield (f'<polygon points="{points}" fill="{COLOURS[name]}">'
                   f"<title>{said}</title></polygon>")  # fmt: skip
        below = above
    yield f'<path class="g" d="M{LEFT:.0f} {y + HIGH:.0f}h{WIDE:.0f}" fill="none"/>'
    at = one.moments.index(one.top) / max(1, len(one.moments) - 1)
    x = LEFT + at * WIDE
    words = f"peak {size(one.peak)} in {one.top.what}"
    yield say(min(x, LEFT + WIDE - 6.2 * len(words)), y + HIGH + 14, words, "s")


def _thinned(levels: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """At most MOST_POINTS of them: of neighbours that do not fit that with the largest sum."""
    run = -(-len(levels) // MOST_POINTS)
    return [max(levels[k : k + run], key=sum) for k in range(0, len(levels), run)]
