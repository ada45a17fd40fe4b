"""Pictures of a timeline: bars in the terminal, and one self-contained SVG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedlang.pipeline.timeline.simulation import COPY_KINDS, Timing, simulate_timeline
from schedlang.pipeline.timeline.table import UNIT_TIMES, Kind, Timeline, dependencies
from schedlang.viz.elements import draw_box, draw_text, svg_document

# -- colours, words, shades and labels -------------------------------------------------------------


@dataclass(frozen=True)
class Look:
    """The look of a kind of operation: its colour, its name, and the mark of one without duration.

    Marks are drawn upwards or downwards from the middle of a lane.
    """

    fill: str = "#a0a0a0"
    word: str = ""
    shape: str = "M{x} {a}l3 4l-3 4l-3 -4z"


UP, DOWN = "M{x} {a}l5 9h-10z", "M{x} {b}l5 -9h-10z"
# Okabe and Ito's palette; F, B, I and W differ in lightness or hue, also for colour-blind readers
LOOKS = {
    Kind.F: Look("#56b4e9", "forward"),
    Kind.B: Look("#e69f00", "backward"),
    Kind.I: Look("#f5d565", "input gradient"),
    Kind.W: Look("#009e73", "weight gradient"),
    Kind.RECOMPUTE: Look("#cc79a7", "forward again"),
    Kind.EVICT: Look("#d55e00", "activations leave", UP),
    Kind.HOLD: Look(word="partner's activations", shape=DOWN),
    Kind.GIVE: Look(word="partner's activations go home", shape=UP),
    Kind.LOAD: Look("#0072b2", "activations come home", DOWN),
    Kind.OFFLOAD: Look("#d55e00", "activations to the host", UP),
    Kind.RELOAD: Look("#0072b2", "activations from the host", DOWN),
    Kind.STEP: Look("#f0f0f0", "update", "M{x} {a}l6 7l-6 7l-6 -7z"),
    Kind.BARRIER: Look(word="barrier", shape="M{x} {top}v22"),
}
FAINTEST = 0.5  # share of its colour in the last stage of a rank; the rest is white


def look_of(kind: Kind) -> Look:
    """Return the look of a kind; a kind without a colour of its own has its name as words."""
    return LOOKS.get(kind) or Look(word=kind.name.lower())


def levels(timeline: Timeline) -> NDArray[np.int64]:
    """Return each row's level: the index of its stage among those of its rank and replica."""
    t = timeline
    level = np.zeros((max(1, t.replicas), max(1, t.stages)), dtype=np.int64)
    for replica, row in enumerate(t.replica_ranks):
        counts: dict[int, int] = {}
        for stage, rank in enumerate(row.tolist()):
            level[replica, stage] = counts.get(rank, 0)
            counts[rank] = counts.get(rank, 0) + 1
    row_levels: NDArray[np.int64] = level[t.replica, t.stage]
    return row_levels


def shade_of(kind: Kind, level: int, highest: int) -> str:
    """Return the colour of a block: full for the first stage of a rank, fainter for later ones.

    Mixed with white in dark mode, too: the dark words on it stay readable.
    """
    part = 1.0 - (1.0 - FAINTEST) * level / highest if highest else 1.0
    full = (int(look_of(kind).fill[k : k + 2], 16) for k in (1, 3, 5))
    return "#" + "".join(f"{round(255 - (255 - channel) * part):02x}" for channel in full)


def describe_operation(
    timeline: Timeline,
    kind: int,
    stage: int,
    replica: int,
    microbatch: int,
    part: int,
    version: int,
) -> str:
    """Describe an operation with the words that distinguish it from others."""
    if Kind(kind) in (Kind.STEP, Kind.BARRIER):
        text = f"{look_of(Kind(kind)).word}, stage {stage}"
    else:
        text = f"{look_of(Kind(kind)).word}, stage {stage}, microbatch {microbatch}"
    text += f", slice {part}" if timeline.slices > 1 else ""
    text += f", replica {replica}" if timeline.replicas > 1 else ""
    return text + (f", version {version}" if version else "")


# -- in the terminal: one bar for each rank, to scale ----------------------------------------------


IDLE = "\N{MIDDLE DOT}"
MOST_RANKS = 40
DARK = "\x1b[38;2;17;17;17m"
END = "\x1b[0m"


def draw_bars(times: Timing, width: int = 100, *, colour: bool = False) -> str:
    """Draw one line per rank: each cell has the letter of the operation in the middle of the cell.

    A wide operation also has its microbatch. Of many ranks the middle ones are left out. `colour`:
    as in the other pictures; the letters suffice without it.
    """
    t = times.timeline
    head = len(f"rank {t.ranks - 1} ")
    cells = max(10, width - head)
    scale = cells / max(float(times.end.max(initial=0.0)), 1e-12)
    ranks = list(range(t.ranks))
    half = MOST_RANKS // 2
    lines = []
    for rank in ranks if t.ranks <= MOST_RANKS else [*ranks[:half], -1, *ranks[-half:]]:
        if rank < 0:
            lines.append(f"{'..':>{head - 1}} {t.ranks - 2 * half} ranks more")
            continue
        rows = np.arange(t.starts[rank], t.starts[rank + 1])
        rows = rows[~np.isin(t.kind[rows], COPY_KINDS) & (times.end[rows] > times.start[rows])]
        edges = times.start[rows] * scale, times.end[rows] * scale
        text = "".join(_bar(t, rows, *edges, cells, colour))
        lines.append(f"{f'rank {rank}':<{head - 1}} {text}")
    return "\n".join([*lines, _legend_line(t, times, head, colour)])


def _bar(
    t: Timeline,
    rows: NDArray[np.int64],
    start: NDArray[np.float64],
    end: NDArray[np.float64],
    cells: int,
    colour: bool,
) -> Iterator[str]:
    """Yield runs of cells that belong to one operation, or to none."""
    middle = np.arange(cells) + 0.5
    index = np.searchsorted(end, middle, side="right") if len(rows) else np.zeros(cells, int)
    inside = index < len(rows)
    inside[inside] = start[index[inside]] <= middle[inside]
    owner = np.where(inside, index, -1)
    first = np.flatnonzero(np.diff(owner, prepend=-2))
    for low, high in zip(first.tolist(), [*first[1:].tolist(), cells]):
        if owner[low] < 0:
            yield IDLE * (high - low)
            continue
        row = rows[owner[low]]
        kind = Kind(int(t.kind[row]))
        text = kind.name[0] + str(int(t.microbatch[row]))
        text = text if len(text) < high - low else kind.name[0]
        yield _paint(text.ljust(high - low, "-"), kind, colour)


def _paint(text: str, kind: Kind, colour: bool) -> str:
    if not colour:
        return text
    red, green, blue = (int(look_of(kind).fill[k : k + 2], 16) for k in (1, 3, 5))
    return f"\x1b[48;2;{red};{green};{blue}m{DARK}{text.replace('-', ' ')}{END}"


def _legend_line(t: Timeline, times: Timing, head: int, colour: bool) -> str:
    kinds: Sequence[int] = np.unique(t.kind[times.end > times.start]).tolist()
    legend = [f"{_paint(Kind(k).name[0], Kind(k), colour)} {look_of(Kind(k)).word}" for k in kinds]
    return " " * head + "   ".join([*legend, f"{IDLE} idle"])


# -- as SVG: light and dark, safe for colour blindness ---------------------------------------------


ROW, BLOCK, UNIT_WIDTH, LEFT, TOP = 26, 22, 24.0, 58, 30
MOST_BLOCKS = 4000  # with more, blocks of a kind are one path without words
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


def draw_timeline(timeline: Timeline, **look: Any) -> str:
    """Draw the operations of every rank over time; `look`: the other arguments of
    `draw_timings`."""
    return draw_timings({"": simulate_timeline(timeline, UNIT_TIMES, 0.0)}, **look)


def picture_height(lanes: int, layers: int = 1) -> int:
    """Return the height in points of a picture of this number of ranks."""
    return TOP + lanes * _step(layers) + 26


def _step(layers: int) -> int:
    return ROW * layers + 6 * (layers > 1)


def draw_timings(
    layers: Mapping[str, Timing],
    *,
    title: str = "",
    widest: float = 4000.0,
    ranks: int | None = None,
    unit: float = UNIT_WIDTH,
    transfers: bool = False,
    who: str = "rank ",
    at: tuple[int, int] | None = None,
) -> str:
    """Draw timings of one pipeline as SVG text: each rank's bars below each other, with names.

    A block has its microbatch (and slice) as its label. On a rank with several stages later stages
    are fainter; blocks of the second replica are hatched. Operations without duration are marks: a
    triangle up where activations leave, down where they come back, a diamond for an update. A unit
    of cost is `unit` points wide, less if the picture would be wider than `widest`. `ranks`: draw
    only the first ranks, at their times among all. `transfers`: lines from the producer of a value
    to its consumer. `who`: the text before a lane's number, such as `pp=`. `at`: the position
    inside of another picture.
    """
    first = next(iter(layers.values()))
    lanes = first.timeline.ranks if ranks is None else min(ranks, first.timeline.ranks)
    end = max(float(max(times.makespan for times in layers.values())), 1e-9)
    scale = min(unit, widest / end)
    step = _step(len(layers))
    left = LEFT + 60 * any(layers)
    text = title or f"bubble {float(first.bubble):.1%}, {end:g} units"
    hatched = any(times.timeline.replicas > 1 for times in layers.values())
    parts = [*([HATCH] if hatched else []), draw_text(left, 18, text)]
    for index, (name, times) in enumerate(layers.items()):
        tops = [TOP + rank * step + index * ROW for rank in range(lanes)]
        for rank, y in enumerate(tops):
            lane = f"{who}{rank}" if not index else ""
            parts += _draw_lane(lane, name, y, left, end * scale)
        parts += _draw_layer(times, scale, tops, left)
        parts += _draw_transfers(times, scale, tops, left) if transfers else ()
    kinds = np.unique(np.concatenate([times.timeline.kind for times in layers.values()]))
    has_replicas = first.timeline.replicas > 1
    parts += _draw_legend(
        [Kind(k) for k in kinds.tolist()], has_replicas, left, TOP + lanes * step + 6
    )
    width, high = round(left + end * scale + 10), picture_height(lanes, len(layers))
    return svg_document("t", width, high, text, STYLE, parts, at=at)


def _draw_lane(lane: str, name: str, y: int, left: int, width: float) -> Iterator[str]:
    if lane:
        yield draw_text(4, y + 16, lane)
    if name:
        yield draw_text(LEFT, y + 16, name)
    yield draw_box(left, y, width, BLOCK, "lane")


def _draw_layer(times: Timing, scale: float, tops: Sequence[int], left: int) -> Iterator[str]:
    """Draw the blocks, then the marks above them."""
    t = times.timeline
    visible = (times.end > times.start) & (t.rank < len(tops))
    if np.count_nonzero(visible) > MOST_BLOCKS:
        yield from _draw_paths(times, scale, tops, left)
    else:
        yield from _draw_blocks(times, scale, tops, left)
    marks = np.flatnonzero((times.end <= times.start) & (t.rank < len(tops)))
    for row in marks.tolist():
        kind = Kind(int(t.kind[row]))
        if kind in (Kind.F, Kind.B, Kind.I, Kind.W):
            continue
        y, x = tops[int(t.rank[row])], left + float(times.start[row]) * scale
        shape = look_of(kind).shape.format(x=f"{x:.1f}", a=y + 4, b=y + 18, top=y)
        title = f"<title>{_block_title(t, row)}</title>"
        yield f'<path class="k" d="{shape}" fill="{look_of(kind).fill}">{title}</path>'


def _block_title(t: Timeline, row: int) -> str:
    names = ("kind", "stage", "replica", "microbatch", "slice", "version")
    return describe_operation(t, *(int(getattr(t, name)[row]) for name in names))


def _draw_blocks(times: Timing, scale: float, tops: Sequence[int], left: int) -> Iterator[str]:
    t, level = times.timeline, levels(times.timeline)
    highest, slices = int(level.max(initial=0)), t.slices
    columns = (t.rank, t.kind, t.replica, t.microbatch, t.slice, level, times.start, times.end)
    for row, (rank, kind, replica, microbatch, part, high, start, end) in enumerate(
        zip(*(c.tolist() for c in columns))
    ):
        width = (end - start) * scale
        if width <= 0 or rank >= len(tops):
            continue
        x, y = left + start * scale, tops[rank]
        look = f'fill="{shade_of(Kind(kind), high, highest)}"'
        yield draw_box(x, y, width, BLOCK, "b", look, _block_title(t, row))
        if replica:
            yield draw_box(x, y, width, BLOCK, look='fill="url(#replica)" pointer-events="none"')
        label = f"{microbatch}.{part}" if slices > 1 else str(microbatch)
        if width >= 6.5 * len(label) + 4:
            yield f'<text class="op" x="{x + width / 2:.1f}" y="{y + 15}">{label}</text>'


def _draw_paths(times: Timing, scale: float, tops: Sequence[int], left: int) -> Iterator[str]:
    """Draw all blocks of one kind, level and replica as one path, so that large timelines stay
    small."""
    t, level = times.timeline, levels(times.timeline)
    highest = int(level.max(initial=0))
    visible = (times.end > times.start) & (t.rank < len(tops))
    sorts = np.stack([t.kind, level, t.replica], axis=1)
    x = np.round(left + times.start * scale, 2)
    widths = np.round((times.end - times.start) * scale, 2)
    top = np.array(tops)
    for kind, high, replica in np.unique(sorts[visible], axis=0).tolist():
        rows = visible & (sorts == (kind, high, replica)).all(axis=1)
        boxes = zip(x[rows].tolist(), top[t.rank[rows]].tolist(), widths[rows].tolist())
        path = "".join(f"M{a:g} {y}h{w:g}v{BLOCK}h-{w:g}z" for a, y, w in boxes)
        yield f'<path d="{path}" fill="{shade_of(Kind(kind), high, highest)}"/>'
        if replica:
            yield f'<path d="{path}" fill="url(#replica)"/>'


def _draw_transfers(times: Timing, scale: float, tops: Sequence[int], left: int) -> Iterator[str]:
    """Draw transfers between ranks, from the end of the producer to the start of the consumer."""
    t = times.timeline
    src, dst = dependencies(t)
    crossing = (t.rank[src] != t.rank[dst]) & (np.maximum(t.rank[src], t.rank[dst]) < len(tops))
    paths: dict[str, list[str]] = {"way": [], "way back": []}
    for a, b in zip(src[crossing].tolist(), dst[crossing].tolist()):
        kind = "way" if t.kind[a] == Kind.F else "way back"
        x1, x2 = left + float(times.end[a]) * scale, left + float(times.start[b]) * scale
        y1, y2 = tops[int(t.rank[a])], tops[int(t.rank[b])]
        down = y2 > y1
        paths[kind].append(f"M{x1:.1f} {y1 + BLOCK * down}L{x2:.1f} {y2 + BLOCK * (not down)}")
    for kind, lines in paths.items():
        if lines:
            yield f'<path class="{kind}" d="{"".join(lines)}"/>'


def _draw_legend(kinds: Sequence[Kind], hatched: bool, left: int, y: int) -> Iterator[str]:
    x = float(left)
    for kind in kinds:
        yield draw_box(f"{x:.0f}", y, 12, 12, look=f'fill="{look_of(kind).fill}"')
        yield draw_text(x + 16, y + 10, look_of(kind).word)
        x += 32 + 6.5 * len(look_of(kind).word)
    if hatched:
        yield draw_box(f"{x:.0f}", y, 12, 12, "r")
        yield draw_box(f"{x:.0f}", y, 12, 12, look='fill="url(#replica)"')
        yield draw_text(x + 16, y + 10, "second replica")
