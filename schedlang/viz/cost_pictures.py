"""Pictures as SVG: memory over a step, and the bytes that ranks send to each other in a step."""

from __future__ import annotations

import html
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from schedlang.diagnostics.tables import format_bytes
from schedlang.ir.memory import CLASSES, find_heaviest
from schedlang.ir.mesh import Mesh
from schedlang.viz.elements import draw_box, draw_legend_entry, draw_text

if TYPE_CHECKING:
    from schedlang.ir.memory import RankMemory
    from schedlang.passes.simulate.traffic import Collective
    from schedlang.viz.show import View

# -- bytes from rank to rank -----------------------------------------------------------------------


MAX_BLOCKS = 64  # rows and columns
Bytes = NDArray[np.float64]
Ranks = NDArray[np.int64]

# share of the full tensor that each rank of a group of n sends to each other rank, times n, if each
# shard is sent directly to the ranks that need it; rings send equally much in all, but to
# neighbours. A broadcast and a reduction are counted from and to each rank of the group in turn.
SHARE = {
    "all-reduce": 2.0,
    "all-gather": 1.0,
    "reduce-scatter": 1.0,
    "all-to-all": 1.0,
    "broadcast": 1.0,
    "reduce": 1.0,
}


@dataclass(frozen=True)
class Pairs:
    """Bytes that each block of neighbouring ranks sends to each block, rows to columns.

    each    ranks of a block; the diagonal has what a block of several ranks sends inside itself
    names   of the blocks: their coordinates on the axes that distinguish them
    ranks   the number of ranks in these blocks; others are left out
    """

    bytes: Bytes
    names: tuple[str, ...]
    each: int
    ranks: int


def sum_pairs(mesh: Mesh, line: str, comms: Iterable[Collective], limit: int = MAX_BLOCKS) -> Pairs:
    """Add up what ranks send to each other; `line` is the pipeline's axis, "" without one.

    For more than `limit` ranks, ranks that agree on the slower axes form a block; if the slowest
    axis alone is longer, only the first `limit` ranks are shown.
    """
    per_block, axes = _choose_blocks(mesh, limit)
    count = min(limit, mesh.world // per_block)
    block = np.minimum(np.arange(mesh.world) // per_block, count)  # the last one: ranks left out
    total = np.zeros((count + 1, count + 1))
    sums: Counter[tuple[str, tuple[str, ...], frozenset[int] | None, int | None]] = Counter()
    for comm in comms:
        sums[comm.kind, mesh.fold(comm.axes), comm.places, comm.to] += comm.total
    for (kind, over, places, to), sent in sums.items():
        groups = _groups(mesh, over, line, places)
        if to is not None:
            target = _ranks_at_place(mesh, line, groups.ravel(), to)
            total += sent * _count_messages(block[groups.ravel()], block[target], count + 1)
        elif kind in SHARE:
            total += sent * SHARE[kind] / groups.shape[1] * _count_pairs(block[groups], count + 1)
        elif groups.shape[1] > 1:  # around a ring
            target = np.roll(groups, -1, axis=1).ravel()
            total += sent * _count_messages(block[groups.ravel()], block[target], count + 1)
    names = tuple(
        ", ".join(f"{axis}={mesh.coordinates(k * per_block)[axis]}" for axis in axes)
        for k in range(count)
    )
    return Pairs(total[:count, :count], names, per_block, count * per_block)


def _choose_blocks(mesh: Mesh, limit: int) -> tuple[int, tuple[str, ...]]:
    """Return the ranks of a block, and the axes that distinguish blocks."""
    sizes = [size for _, size in mesh.axes]
    if mesh.world > limit:
        for kept in reversed(range(1, len(sizes))):
            if 1 < math.prod(sizes[:kept]) <= limit:
                return math.prod(sizes[kept:]), tuple(n for n, _ in mesh.axes[:kept])
    return 1, tuple(name for name, size in mesh.axes if size > 1)


def _groups(mesh: Mesh, over: tuple[str, ...], line: str, places: frozenset[int] | None) -> Ranks:
    """Return the groups along some axes, one per row; only of ranks at these places of the
    pipeline."""
    coordinates = _coordinates(mesh)
    ranks = np.arange(mesh.world)
    if places is not None:
        ranks = ranks[np.isin(coordinates[line], list(places))]
    extents = {axis.partition("/")[0]: int(axis.partition("/")[2] or 0) for axis in over}
    group_index = np.zeros(len(ranks), dtype=np.int64)  # the number of each rank's group
    for axis, count in mesh.axes:
        extent = extents.get(axis, 1) or count
        group_index = group_index * count + coordinates[axis][ranks] // extent
    order = np.argsort(group_index, kind="stable")
    return ranks[order].reshape(len(np.unique(group_index)), -1)


def _coordinates(mesh: Mesh) -> dict[str, Ranks]:
    sizes = tuple(size for _, size in mesh.axes) or (1,)
    places = np.unravel_index(np.arange(mesh.world), sizes)
    return {name: coordinate for (name, _), coordinate in zip(mesh.axes, places)}


def _ranks_at_place(mesh: Mesh, line: str, ranks: Ranks, target: int) -> Ranks:
    """Return, for each rank, the rank at another place of the pipeline and else equal
    coordinates."""
    behind = math.prod(size for _, size in mesh.axes[list(mesh.sizes).index(line) + 1 :])
    position = _coordinates(mesh)[line][ranks]
    peers: Ranks = ranks + (target - position) * behind
    return peers


def _count_messages(source: Ranks, target: Ranks, blocks: int) -> Bytes:
    """Count the messages from each block to each."""
    counts = np.zeros((blocks, blocks))
    np.add.at(counts, (source, target), 1.0)
    return counts


def _count_pairs(groups: Ranks, blocks: int) -> Bytes:
    """Count the ordered pairs of different group members for each two blocks."""
    members = np.zeros((len(groups), blocks))
    np.add.at(members, (np.arange(len(groups))[:, None], groups), 1.0)
    counts: Bytes = members.T @ members - np.diag(members.sum(axis=0))
    return counts


# -- memory over a step ----------------------------------------------------------------------------


# Okabe and Ito's colours; areas are in the order of the legend, which also identifies them
COLOURS = dict(
    zip(CLASSES, ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#f0e442"), strict=True)
)
LEFT, WIDE, HIGH, GAP = 150.0, 900.0, 76.0, 34.0
MOST_PANELS, MOST_POINTS = 4, 300
NAMING = "one operation after the other: 0B2 is the backward (B) of microbatch 2 on stage 0"
NAME_DISTANCE = 56.0  # minimal points between two names below a panel


def draw_memory(memories: Sequence[RankMemory], axis: str, y: int) -> tuple[list[str], int]:
    """Draw a panel for each of a few kinds of ranks, the fullest included; return parts and height.

    All panels have the scale of the fullest. In a long step neighbouring operations are merged into
    the highest of them.
    """
    top = find_heaviest(memories)
    shown = list(memories[:MOST_PANELS])
    shown = shown if top in shown else [*shown[:-1], top]
    parts = [draw_text(24, y, "bytes over a step", "t"), *_memory_legend(y)]
    base = y + 12
    if any(_is_operation(moment.what) for memory in shown for moment in memory.moments):
        parts.append(draw_text(LEFT, y + 18, NAMING, "s"))
        base += 14
    for memory in shown:
        parts += _draw_panel(memory, axis, base, top.peak)
        base += round(HIGH + GAP)
    if len(shown) < len(memories):
        parts.append(
            draw_text(24, base + 4, f"and {len(memories) - len(shown)} more kinds of ranks", "s")
        )
        base += 20
    return parts, base - y + 20


def _memory_legend(y: int) -> Iterator[str]:
    x = LEFT
    for name, fill in COLOURS.items():
        yield draw_legend_entry(x, y, f'fill="{fill}"', name)
        x += 128


def _draw_panel(memory: RankMemory, axis: str, y: int, limit: int) -> Iterator[str]:
    """Draw one kind of ranks: areas, and the place of the peak."""
    label = f"{axis}={memory.place}" if memory.place is not None else f"rank {memory.first}"
    yield draw_text(24, y + 14, label, "m")
    yield draw_text(24, y + 30, f"{memory.ranks} rank{'s' * (memory.ranks > 1)}", "s")
    levels = [level for m in memory.moments for level in (m.most, m.end)]
    run = -(-len(levels) // MOST_POINTS)
    levels = _thin_out(levels, run)
    step, scale = WIDE / max(1, len(levels) - 1), HIGH / max(1, limit)
    base = [0.0] * len(levels)
    for index, name in enumerate(CLASSES):
        above = [low + level[index] for low, level in zip(base, levels)]
        if any(level[index] for level in levels):
            shape = [*enumerate(above), *reversed([*enumerate(base)])]
            points = " ".join(f"{LEFT + k * step:.1f},{y + HIGH - v * scale:.1f}" for k, v in shape)
            highest = max(level[index] for level in levels)
            tooltip = html.escape(f"{name}: at most {format_bytes(highest)}")
            title = f"<title>{tooltip}</title>"
            yield f'<polygon points="{points}" fill="{COLOURS[name]}">{title}</polygon>'
        base = above
    yield f'<path class="g" d="M{LEFT:.0f} {y + HIGH:.0f}h{WIDE:.0f}" fill="none"/>'
    yield from _draw_scales(
        memory, y, limit, [2 * k // run * step for k in range(len(memory.moments))]
    )


def _draw_scales(memory: RankMemory, y: int, limit: int, places: Sequence[float]) -> Iterator[str]:
    """Draw bytes at the left, names of operations below, and the peak; `places`: x of each
    moment."""
    for level in (0, limit):
        base = y + HIGH - level / max(1, limit) * HIGH
        yield f'<path class="g" d="M{LEFT - 4:.0f} {base:.1f}h4"/>'
        yield draw_text(LEFT - 8, base + 4, format_bytes(level) if level else "0", "s e")
    peak = LEFT + places[memory.moments.index(memory.top)]
    text = f"peak {format_bytes(memory.peak)} in {memory.top.what}"
    width = 6.2 * len(text)
    left = min(peak, LEFT + WIDE - width)
    free = LEFT - NAME_DISTANCE
    for offset, moment in zip(places, memory.moments, strict=True):
        x = LEFT + offset
        covered = left - NAME_DISTANCE < x < left + width
        if (
            _is_operation(moment.what)
            and x >= free + NAME_DISTANCE
            and not covered
            and x < LEFT + WIDE - 24
        ):
            yield draw_text(x, y + HIGH + 14, moment.what, "s")
            free = x
    yield f'<path class="g" d="M{peak:.1f} {y}v{HIGH:.0f}" stroke-dasharray="2 3"/>'
    yield draw_text(left, y + HIGH + 14, text, "s b")


def _is_operation(name: str) -> bool:
    """Return whether a moment is an operation that computes, not a message or the end."""
    return re.fullmatch(r"\d+[FBIW]\d+", name) is not None


def _thin_out(levels: Sequence[tuple[int, ...]], size: int) -> list[tuple[int, ...]]:
    """Keep the largest sum of each run of neighbours."""
    return [max(levels[k : k + size], key=sum) for k in range(0, len(levels), size)]


# -- communication of a step -----------------------------------------------------------------------


# one hue, away from the ground's lightness: distinguished by lightness alone
LIGHT = ("#e3eef8", "#b5d4ea", "#7fb6dc", "#4b97cf")
DARK = ("#15293b", "#1d4768", "#2a6c9f", "#6bb5e8")
WORDS = ("#e6edf3", "#e6edf3", "#ffffff", "#111111")  # words on the dark shades
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
MOST_CELLS = 16  # rows and columns; beyond this, cells have no tooltips
Sort = tuple[str, str]  # kind, axes


@dataclass(frozen=True)
class Matrix:
    """The geometry and the shades of a matrix."""

    sums: Pairs
    y: int

    @property
    def cell(self) -> float:
        """Points from one cell to the next."""
        return min(CELL, SIDE / len(self.sums.names))

    @property
    def left(self) -> float:
        """The left end of the first column, right of the names."""
        return max(96.0, MARGIN + 36 + 7.0 * self._longest)

    @property
    def _longest(self) -> int:
        return max(len(name) for name in self.sums.names) if self.cell >= 24 else 0

    @cached_property
    def shade_starts(self) -> tuple[int, ...]:
        """The bytes at which shades begin, in equal steps of the logarithm from least to most."""
        positive = self.sums.bytes[self.sums.bytes > 0]
        low, high = math.log(positive.min()), math.log(positive.max())
        count = len(LIGHT) if high - low > 0.7 else 1
        edges = (math.floor(math.exp(low + (high - low) * k / count)) for k in range(count))
        return tuple(dict.fromkeys(edges))

    def shade(self, value: float) -> int:
        """Return the shade for a number of bytes."""
        lowest = len(LIGHT) - len(self.shade_starts)
        return lowest + sum(value >= start for start in self.shade_starts[1:])

    def label_step(self, room: int) -> int:
        """Return the step between labels that need `room` points."""
        return math.ceil(room / self.cell)


def draw_traffic(view: View, y: int) -> tuple[list[str], int]:
    """Draw the matrix of ranks and the sorts of collectives, from `y` down; return parts and
    height."""
    plan, comms = view.plan, view.account.collectives
    if not comms or plan.mesh.world < 2:
        return [], 0
    sums = sum_pairs(plan.mesh, plan.cuts[0].axis if plan.cuts else "", comms)
    if not sums.bytes.any():
        return [], 0
    matrix = Matrix(sums, y + HEAD)
    sorts, low = _draw_sorts(view, comms, y)
    parts = [
        draw_text(MARGIN, y, "sent in a step", "t"),
        *_traffic_legend(matrix, y),
        *_draw_names(matrix),
    ]
    parts += [*_draw_cells(matrix), *sorts]
    high = HEAD + matrix.cell * len(sums.names)
    if sums.ranks < plan.mesh.world:
        high += 18
        text = f"the first {sums.ranks} of {plan.mesh.world} ranks"
        parts.append(draw_text(matrix.left, y + high - 4, text, "s"))
    return parts, round(max(high, low)) + 34


def _traffic_legend(matrix: Matrix, y: int) -> Iterator[str]:
    x = 150.0
    for start, following in zip(matrix.shade_starts, (*matrix.shade_starts[1:], 1)):
        text = f"from {format_bytes(start)}" if start else f"below {format_bytes(following)}"
        yield draw_legend_entry(x, y, f'class="h{matrix.shade(start + 0.5)}"', text)
        x += 34 + 6.6 * len(text)


def _draw_names(matrix: Matrix) -> Iterator[str]:
    """Label rows and columns."""
    sums, cell = matrix.sums, matrix.cell
    block_text = "a rank" if sums.each == 1 else f"{sums.each} ranks"
    yield draw_text(
        MARGIN, matrix.y - 22, f"each row is {block_text} and what goes to each column", "s"
    )
    for index, name in enumerate(sums.names):
        middle = (index + 0.5) * cell
        if index % matrix.label_step(20) == 0:
            yield draw_text(MARGIN, matrix.y + middle + 4, str(index), "m")
            if matrix.cell >= 24:
                yield draw_text(MARGIN + 26, matrix.y + middle + 4, name, "s")
            yield draw_text(matrix.left + middle, matrix.y - 5, str(index), "c")


def _draw_cells(matrix: Matrix) -> Iterator[str]:
    """Draw the cells with traffic, with the bytes in them where there is room."""
    sums, cell = matrix.sums, matrix.cell
    side = cell * len(sums.names)
    yield draw_box(matrix.left, matrix.y, f"{side:g}", f"{side:g}", "z")
    if len(sums.names) > MOST_CELLS:
        yield from _draw_runs(matrix)
        return
    for row, column in zip(*(indices.tolist() for indices in sums.bytes.nonzero())):
        value = float(sums.bytes[row, column])
        x, y, text = matrix.left + column * cell, matrix.y + row * cell, format_bytes(round(value))
        tooltip, shade = f"{sums.names[row]} to {sums.names[column]}: {text}", matrix.shade(value)
        yield draw_box(x, y, cell - 1, cell - 1, f"h{shade}", title=tooltip)
        if cell >= WORDY:
            yield draw_text(x + cell / 2, y + cell / 2 + 3, text, f"w w{shade}")


def _draw_runs(matrix: Matrix) -> Iterator[str]:
    """Draw many ranks: neighbours of equal shade as one piece, each shade as one path."""
    cell, paths = matrix.cell, [""] * len(LIGHT)
    for row, values in enumerate(matrix.sums.bytes.tolist()):
        shades = enumerate(matrix.shade(value) if value else -1 for value in values)
        for shade, group in groupby(shades, key=lambda pair: pair[1]):
            places = [column for column, _ in group]
            if shade >= 0:
                x, y = matrix.left + places[0] * cell, matrix.y + row * cell
                length = len(places) * cell
                paths[shade] += f"M{x:.1f} {y:.1f}h{length:.1f}v{cell:.1f}h-{length:.1f}z"
    yield from (f'<path class="h{k}" d="{path}"/>' for k, path in enumerate(paths) if path)


def _draw_sorts(view: View, comms: Sequence[Collective], y: int) -> tuple[list[str], int]:
    """Draw the collectives of the busiest rank as bars; return them and their height."""
    places = sorted({one.place or 0 for one in view.account.classes or ()}) or [0]
    sums: dict[Sort, tuple[int, int]] = {}
    for sort in dict.fromkeys(_sort_of(one) for one in comms):
        sums[sort] = max(
            (_total(view.account.collectives_at(p), sort) for p in places), key=lambda pair: pair[1]
        )
    shown = sorted(sums.items(), key=lambda item: -item[1][1])[:MOST_SORTS]
    largest = max(total for _, (_, total) in shown) or 1
    parts = [draw_text(LIST, y, "collectives of a rank", "t")]
    for index, ((kind, axes), (count, total)) in enumerate(shown):
        top, width = y + 24 + index * SORT, max(1.0, BAR * total / largest)
        parts.append(
            draw_text(LIST, top, f"{kind} over {axes}: {count}, {format_bytes(total)} in all", "s")
        )
        parts.append(draw_box(LIST, top + 5, width, 9, "h3"))
    rest = len(sums) - len(shown)
    if rest:
        text = f"and {rest} more sort{'s' * (rest > 1)}"
        parts.append(draw_text(LIST, y + 24 + len(shown) * SORT, text, "s"))
    return parts, 24 + (len(shown) + (rest > 0)) * SORT


def _sort_of(comm: Collective) -> Sort:
    return comm.kind, ", ".join(comm.axes)


def _total(comms: Sequence[Collective], key: Sort) -> tuple[int, int]:
    matching = [comm for comm in comms if _sort_of(comm) == key]
    return sum(comm.count for comm in matching), sum(comm.total for comm in matching)
