"""A timeline in the terminal: one bar for each rank, to scale, as wide as asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from schedlang.timeline.looks import fill, word
from schedlang.timeline.table import Kind, Timeline
from schedlang.timeline.timing import COPIES, Timing

IDLE = "\N{MIDDLE DOT}"
MOST_RANKS = 40
DARK = "\x1b[38;2;17;17;17m"
END = "\x1b[0m"


def bars(times: Timing, width: int = 100, *, colour: bool = False, ranks: str = "rank ") -> str:
    """One line per rank: each cell has the letter of what its rank does in the middle of it.

    Where an operation is wide enough its microbatch follows the letter. Of many ranks the middle
    ones are left out. `colour`: as in the other pictures; letters tell all of it without.
    """
    t = times.timeline
    head = len(f"{ranks}{t.ranks - 1} ")
    cells = max(10, width - head)
    scale = cells / max(float(times.end.max(initial=0.0)), 1e-12)
    shown = list(range(t.ranks))
    half = MOST_RANKS // 2
    lines = []
    for rank in shown if t.ranks <= MOST_RANKS else [*shown[:half], -1, *shown[-half:]]:
        if rank < 0:
            lines.append(f"{'..':>{head - 1}} {t.ranks - 2 * half} ranks more")
            continue
        rows = np.arange(t.starts[rank], t.starts[rank + 1])
        rows = rows[~np.isin(t.kind[rows], COPIES) & (times.end[rows] > times.start[rows])]
        edges = times.start[rows] * scale, times.end[rows] * scale
        text = "".join(_bar(t, rows, *edges, cells, colour))
        lines.append(f"{f'{ranks}{rank}':<{head - 1}} {text}")
    return "\n".join([*lines, _legend(t, times, head, colour)])


def _bar(
    t: Timeline, rows: NDArray[np.int64], start: NDArray[np.float64], end: NDArray[np.float64],
    cells: int, colour: bool,
) -> Iterator[str]:  # fmt: skip
    """Runs of cells that belong to one operation, or to none."""
    middle = np.arange(cells) + 0.5
    place = np.searchsorted(end, middle, side="right") if len(rows) else np.zeros(cells, int)
    there = place < len(rows)
    there[there] = start[place[there]] <= middle[there]
    owner = np.where(there, place, -1)
    first = np.flatnonzero(np.diff(owner, prepend=-2))
    for low, high in zip(first.tolist(), [*first[1:].tolist(), cells]):
        if owner[low] < 0:
            yield IDLE * (high - low)
            continue
        row = rows[owner[low]]
        kind = Kind(int(t.kind[row]))
        words = kind.name[0] + str(int(t.microbatch[row]))
        words = words if len(words) < high - low else kind.name[0]
        yield _painted(words.ljust(high - low, "-"), kind, colour)


def _painted(text: str, kind: Kind, colour: bool) -> str:
    if not colour:
        return text
    red, green, blue = (int(fill(kind)[k : k + 2], 16) for k in (1, 3, 5))
    return f"\x1b[48;2;{red};{green};{blue}m{DARK}{text.replace('-', ' ')}{END}"


def _legend(t: Timeline, times: Timing, head: int, colour: bool) -> str:
    kinds: Sequence[int] = np.unique(t.kind[times.end > times.start]).tolist()
    words = [f"{_painted(Kind(k).name[0], Kind(k), colour)} {word(Kind(k))}" for k in kinds]
    return " " * head + "   ".join([*words, f"{IDLE} idle"])
