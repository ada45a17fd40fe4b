"""A timeline as a few short strings, for programs that read it elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedlang.timeline.needs import dependencies
from schedlang.timeline.table import Kind, Rows, Timeline

FIRST = 40  # the character of zero: printable, and no quote or ampersand is below it
COLUMNS = {
    "kind": 0, "stage": 0, "microbatch": 0, "replica": 0, "slice": 0, "version": 0, "peer": -1,
}  # fmt: skip
BACK = (Kind.B, Kind.I)


def packed(timeline: Timeline) -> dict[str, Any]:
    """The compute rows of a timeline: one character a row and column.

    Columns that say nothing are left out. `rows` counts those of each rank, `edges` is left out for
    a chain of stages. `extra` are the pairs (made, used) that do not follow from the stages' edges:
    what a reader must be told.
    """
    t = timeline.compute()
    found: dict[str, Any] = {"rows": np.diff(t.starts).tolist(), "stages": t.stages}
    for name, usual in COLUMNS.items():
        column = getattr(t, name)
        if (column != usual).any():
            found[name] = "".join(map(chr, (column + (FIRST - usual)).tolist()))
    if t.edges != tuple((s, s + 1) for s in range(t.stages - 1)):
        found["edges"] = t.edges
    extra = _extra(t)
    if len(extra):
        found["extra"] = extra.tolist()
    return found


def _extra(t: Timeline) -> NDArray[np.int64]:
    """Pairs between ranks that are neither a value nor a gradient along an edge."""
    made, used = dependencies(t)
    late = (t.rank[made] != t.rank[used]) | (made > used)
    made, used = made[late], used[late]
    plain = _along(t, made, used) & (t.rank[made] != t.rank[used])
    return np.stack([made[~plain], used[~plain]], axis=1)


def _along(t: Timeline, made: Rows, used: Rows) -> NDArray[np.bool_]:
    edges = np.zeros((t.stages, t.stages), dtype=bool)
    for source, target in t.edges:
        if max(source, target) < t.stages:
            edges[source, target] = True
    same = np.ones(len(made), dtype=bool)
    for name in ("replica", "microbatch", "slice"):
        column = getattr(t, name)
        same &= column[made] == column[used]
    forward = (t.kind[made] == Kind.F) & (t.kind[used] == Kind.F)
    forward &= edges[t.stage[made], t.stage[used]]
    backward = np.isin(t.kind[made], BACK) & np.isin(t.kind[used], BACK)
    backward &= edges[t.stage[used], t.stage[made]]
    found: NDArray[np.bool_] = same & (forward | backward)
    return found
