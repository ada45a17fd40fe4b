"""A picture of a timeline: one self-contained SVG, light and dark, safe for colour blindness."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

import numpy as np

from schedlang.cost import Number
from schedlang.timeline.durations import Costs
from schedlang.timeline.looks import fill, label, levels, named, shaded, word
from schedlang.timeline.needs import dependencies
from schedlang.timeline.table import UNIT, Kind, Timeline
from schedlang.timeline.timing import Timing, timing

ROW, BLOCK, UNIT_WIDTH, LEFT, TOP = 26, 22, 24.0, 58, 30
MOST_BLOCKS = 4000  # beyond this many, blocks of a kind are one path without words
STYLE = (
    ".t text{font:11px system-ui,sans-serif;fill:#1f2328}.t .op{fill:#111;text-anchor:middle}"
    ".t .lane{fill:#eef1f4}.t rect.b,.t path.b{stroke:#fff;stroke-width:.7}"
    ".t path.k{stroke:#111}.t .bg{fill:#fff}"
    ".t .way{fill:none;stroke:#57606a;stroke-width:.8}.t .way.back{stroke-dasharray:3 2}"
    ".t .r{fill:none;stroke:#111;stroke-width:1}"
    "@media(prefers-color-scheme:dark){.t text{fill:#e6edf3}.t .op{fill:#111}"
    ".t .lane{fill:#22272e}.t rect.b,.t path.b{stroke:#0d1117}.t .way{stroke:#9198a1}"
    ".t path.k{stroke:#e6edf3}.t .bg{fill:#0d1117}}"
)
HATCH = (
    '<defs><pattern id="replica" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><path d="M0 0V6" stroke="#111" stroke-width="1.6" '
    'stroke-opacity=".45"/></pattern></defs>'
)
# drawn upwards or downwards from the middle of a lane where an operation takes no time
SHAPES = {
    Kind.EVICT: "M{x} {a}l5 9h-10z", Kind.OFFLOAD: "M{x} {a}l5 9h-10z",
    Kind.GIVE: "M{x} {a}l5 9h-10z", Kind.LOAD: "M{x} {b}l5 -9h-10z",
    Kind.RELOAD: "M{x} {b}l5 -9h-10z", Kind.HOLD: "M{x} {b}l5 -9h-10z",
    Kind.STEP: "M{x} {a}l6 7l-6 7l-6 -7z", Kind.BARRIER: "M{x} {top}v22",
}  # fmt: skip
OTHER_SHAPE = "M{x} {a}l3 4l-3 4l-3 -4z"


def svg(
    timeline: Timeline,
    cost: Costs = UNIT,
    transfer: Number = 0.0,
    title: str = "",
    widest: float = 4000.0,
    ranks: int | None = None,
    unit: float = UNIT_WIDTH,
    *,
    transfers: bool = False,
    who: str = "rank ",
) -> str:
    """The operations of every rank over time, as SVG text; see `drawn`."""
    times = {"": timing(timeline, cost, transfer)}
    return drawn(
        times, title=title, widest=widest, ranks=ranks, unit=unit, transfers=transfers, who=who
    )


def drawn(
    layers: Mapping[str, Timing],
    *,
    title: str = "",
    widest: float = 4000.0,
    ranks: int | None = None,
    unit: float = UNIT_WIDTH,
    transfers: bool = False,
    who: str = "rank ",
) -> str:
    """Timings of one pipeline, each rank's bars under each other and named, as SVG text.

    A block is named by its microbatch (and slice). On a rank with several stages later stages are
    fainter; blocks of the second replica are hatched. Operations that take no time are marks:
    a triangle up where activations leave, down where they come back, a diamond for an update.
    A unit of cost is `unit` points wide, or less where all would be more than `widest`. `ranks`:
    only the first so many are drawn, at their times among all. `transfers`: lines from where a
    value is made to where it is used. `who`: what stands before a lane's number, as `pp=`.
    """
    first = next(iter(layers.values()))
    lanes = first.timeline.ranks if ranks is None else min(ranks, first.timeline.ranks)
    end = max(float(max(times.makespan for times in layers.values())), 1e-9)
    scale = min(unit, widest / end)
    step = ROW * len(layers) + 6 * (len(layers) > 1)
    left = LEFT + 60 * any(layers)
    width, height = left + end * scale + 10, TOP + lanes * step + 26
    text = title or f"bubble {float(first.bubble):.1%}, {end:g} units"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="t" viewBox="0 0 {width:.0f} {height}" '
        f'width="{width:.0f}" height="{height}" role="img" aria-label="{escape(text)}">',
        f"<style>{STYLE}</style>",
        f'<rect class="bg" width="{width:.0f}" height="{height}"/>',
        HATCH if any(times.timeline.replicas > 1 for times in layers.values()) else "",
        f'<text x="{left}" y="18">{escape(text)}</text>',
    ]
    for place, (name, times) in enumerate(layers.items()):
        tops = [TOP + rank * step + place * ROW for rank in range(lanes)]
        for rank, y in enumerate(tops):
            lane = f"{who}{rank}" if not place else ""
            parts += _lane(lane, name, y, left, end * scale)
        parts += _layer(times, scale, tops, left)
        parts += _lines(times, scale, tops, left) if transfers else ()
    kinds = np.unique(np.concatenate([times.timeline.kind for times in layers.values()]))
    several = first.timeline.replicas > 1
    parts += _legend([Kind(k) for k in kinds.tolist()], several, left, TOP + lanes * step + 6)
    return "\n".join([*filter(None, parts), "</svg>"]) + "\n"


def _lane(who: str, name: str, y: int, left: int, wide: float) -> Iterator[str]:
    if who:
        yield f'<text x="4" y="{y + 16}">{who}</text>'
    if name:
        yield f'<text x="{LEFT}" y="{y + 16}">{escape(name)}</text>'
    yield f'<rect class="lane" x="{left}" y="{y}" width="{wide:.1f}" height="{BLOCK}"/>'


def _layer(times: Timing, scale: float, tops: Sequence[int], left: int) -> Iterator[str]:
    """Blocks first, then marks above them."""
    t = times.timeline
    seen = (times.end > times.start) & (t.rank < len(tops))
    if np.count_nonzero(seen) > MOST_BLOCKS:
        yield from _paths(times, scale, tops, left)
    else:
        yield from _blocks(times, scale, tops, left)
    marks = np.flatnonzero((times.end <= times.start) & (t.rank < len(tops)))
    for row in marks.tolist():
        kind = Kind(int(t.kind[row]))
        if kind in (Kind.F, Kind.B, Kind.I, Kind.W):
            continue
        y, x = tops[int(t.rank[row])], left + float(times.start[row]) * scale
        shape = SHAPES.get(kind, OTHER_SHAPE).format(x=f"{x:.1f}", a=y + 4, b=y + 18, top=y)
        yield f'<path class="k" d="{shape}" fill="{fill(kind)}">{_title(t, row)}</path>'


def _title(t: Timeline, row: int) -> str:
    names = ("kind", "stage", "replica", "microbatch", "slice", "version")
    return f"<title>{named(t, *(int(getattr(t, name)[row]) for name in names))}</title>"


def _blocks(times: Timing, scale: float, tops: Sequence[int], left: int) -> Iterator[str]:
    t, level = times.timeline, levels(times.timeline)
    most, slices = int(level.max(initial=0)), t.slices
    columns = (t.rank, t.kind, t.replica, t.microbatch, t.slice, level, times.start, times.end)
    for row, (rank, kind, replica, microbatch, part, high, start, end) in enumerate(
        zip(*(c.tolist() for c in columns))
    ):
        wide = (end - start) * scale
        if wide <= 0 or rank >= len(tops):
            continue
        x, y = left + start * scale, tops[rank]
        box = f'x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{BLOCK}"'
        yield (f'<rect class="b" {box} fill="{shaded(Kind(kind), high, most)}">'
               f"{_title(t, row)}</rect>")  # fmt: skip
        if replica:
            yield f'<rect {box} fill="url(#replica)" pointer-events="none"/>'
        words = label(microbatch, part, slices)
        if wide >= 6.5 * len(words) + 4:
            yield f'<text class="op" x="{x + wide / 2:.1f}" y="{y + 15}">{words}</text>'


def _paths(times: Timing, scale: float, tops: Sequence[int], left: int) -> Iterator[str]:
    """All blocks of one kind, stage's place and replica as one path: large timelines stay small."""
    t, level = times.timeline, levels(times.timeline)
    most = int(level.max(initial=0))
    shown = (times.end > times.start) & (t.rank < len(tops))
    sorts = np.stack([t.kind, level, t.replica], axis=1)
    x = np.round(left + times.start * scale, 2)
    wide = np.round((times.end - times.start) * scale, 2)
    top = np.array(tops)
    for kind, high, replica in np.unique(sorts[shown], axis=0).tolist():
        rows = shown & (sorts == (kind, high, replica)).all(axis=1)
        pieces = zip(x[rows].tolist(), top[t.rank[rows]].tolist(), wide[rows].tolist())
        path = "".join(f"M{a:g} {y}h{w:g}v{BLOCK}h-{w:g}z" for a, y, w in pieces)
        yield f'<path d="{path}" fill="{shaded(Kind(kind), high, most)}"/>'
        if replica:
            yield f'<path d="{path}" fill="url(#replica)"/>'


def _lines(times: Timing, scale: float, tops: Sequence[int], left: int) -> Iterator[str]:
    """Transfers between ranks, from the end of what makes to the start of what uses."""
    t = times.timeline
    made, used = dependencies(t)
    apart = (t.rank[made] != t.rank[used]) & (np.maximum(t.rank[made], t.rank[used]) < len(tops))
    found: dict[str, list[str]] = {"way": [], "way back": []}
    for a, b in zip(made[apart].tolist(), used[apart].tolist()):
        kind = "way" if t.kind[a] == Kind.F else "way back"
        x1, x2 = left + float(times.end[a]) * scale, left + float(times.start[b]) * scale
        y1, y2 = tops[int(t.rank[a])], tops[int(t.rank[b])]
        down = y2 > y1
        found[kind].append(f"M{x1:.1f} {y1 + BLOCK * down}L{x2:.1f} {y2 + BLOCK * (not down)}")
    for kind, lines in found.items():
        if lines:
            yield f'<path class="{kind}" d="{"".join(lines)}"/>'


def _legend(kinds: Sequence[Kind], hatched: bool, left: int, y: int) -> Iterator[str]:
    x = float(left)
    for kind in kinds:
        yield f'<rect x="{x:.0f}" y="{y}" width="12" height="12" fill="{fill(kind)}"/>'
        yield f'<text x="{x + 16:.0f}" y="{y + 10}">{word(kind)}</text>'
        x += 32 + 6.5 * len(word(kind))
    if hatched:
        yield f'<rect class="r" x="{x:.0f}" y="{y}" width="12" height="12"/>'
        yield f'<rect x="{x:.0f}" y="{y}" width="12" height="12" fill="url(#replica)"/>'
        yield f'<text x="{x + 16:.0f}" y="{y + 10}">second replica</text>'
