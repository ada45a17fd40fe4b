"""Memory over a step as SVG: what ranks hold, stacked by class, operation by operation."""

from __future__ import annotations

import html
import re
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
NAMING = "one operation after the other: 0B2 is the backward (B) of microbatch 2 on stage 0"
APART = 56.0  # points between two names below a panel


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
    if any(_is_operation(moment.what) for one in shown for moment in one.moments):
        parts.append(say(LEFT, y + 18, NAMING, "s"))
        base += 14
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
    levels = [level for m in one.moments for level in (m.most, m.end)]
    run = -(-len(levels) // MOST_POINTS)
    levels = _thinned(levels, run)
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
    yield from _scales(one, y, most, [2 * k // run * step for k in range(len(one.moments))])


def _scales(one: RankMemory, y: int, most: int, places: Sequence[float]) -> Iterator[str]:
    """Bytes at the left, names of operations below, and where the peak is; `places`: of each
    moment, from the left."""
    for level in (0, most):
        base = y + HIGH - level / max(1, most) * HIGH
        yield f'<path class="g" d="M{LEFT - 4:.0f} {base:.1f}h4"/>'
        yield say(LEFT - 8, base + 4, size(level) if level else "0", "s e")
    peak = LEFT + places[one.moments.index(one.top)]
    words = f"peak {size(one.peak)} in {one.top.what}"
    wide = 6.2 * len(words)
    left = min(peak, LEFT + WIDE - wide)
    free = LEFT - APART
    for place, moment in zip(places, one.moments, strict=True):
        x = LEFT + place
        over = left - APART < x < left + wide
        if _is_operation(moment.what) and x >= free + APART and not over and x < LEFT + WIDE - 24:
            yield say(x, y + HIGH + 14, moment.what, "s")
            free = x
    yield f'<path class="g" d="M{peak:.1f} {y}v{HIGH:.0f}" stroke-dasharray="2 3"/>'
    yield say(left, y + HIGH + 14, words, "s b")


def _is_operation(what: str) -> bool:
    """Whether a moment is one that computes: no message, and neither the first nor the last."""
    return re.fullmatch(r"\d+[FBIW]\d+", what) is not None


def _thinned(levels: Sequence[tuple[int, ...]], run: int) -> list[tuple[int, ...]]:
    """Of each run of so many neighbours that with the largest sum."""
    return [max(levels[k : k + run], key=sum) for k in range(0, len(levels), run)]
