"""A timeline as a few short strings, for programs that read it elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np

from schedlang.pipeline.timeline.memory import peak
from schedlang.pipeline.timeline.needs import barriers, dependencies
from schedlang.pipeline.timeline.simulation import COPIES
from schedlang.pipeline.timeline.table import Kind, Timeline, chain

FIRST = 40  # the character of zero: printable, and no quote or ampersand is below it
COLUMNS = {
    "kind": 0,
    "stage": 0,
    "microbatch": 0,
    "replica": 0,
    "slice": 0,
    "version": 0,
    "peer": -1,
}


def packed(timeline: Timeline) -> dict[str, Any]:
    """The compute rows of a timeline: one character a row and column.

    Columns that say nothing are left out. `rows` counts those of each rank, `edges` is left out for
    a chain of stages, `copies` are the kinds that run beside the computing of their rank, `peak`
    what each rank holds at most, in microbatches of one rank's share. `extra` are the pairs (made,
    used) that do not follow from the stages' edges, without a transfer: what a reader must be told.
    """
    t = timeline.compute()
    found: dict[str, Any] = {"rows": np.diff(t.starts).tolist(), "stages": t.stages}
    found["peak"] = [round(float(x), 6) for x in peak(timeline)]
    for name, usual in COLUMNS.items():
        column = getattr(t, name)
        if (column != usual).any():
            found[name] = "".join(map(chr, (column + (FIRST - usual)).tolist()))
    if t.edges != chain(t.stages):
        found["edges"] = t.edges
    if np.isin(t.kind, COPIES).any():
        found["copies"] = COPIES
    if extra := _extra(t):
        found["extra"] = extra
    return found


def _extra(t: Timeline) -> list[tuple[int, int]]:
    """Pairs on one rank that its order does not imply, and those of barriers."""
    made, used = dependencies(t)
    copies = np.isin(t.kind, COPIES)
    told = (t.rank[made] == t.rank[used]) & ((made > used) | copies[made])
    pairs = [(made[told], used[told])]
    if (t.kind == Kind.BARRIER).any():
        before, waits, table = barriers(t, copies)
        first = np.broadcast_to(table[0], table[1:].shape)
        pairs += [(before, waits), (first.ravel(), table[1:].ravel())]
    return [pair for a, b in pairs for pair in zip(a.tolist(), b.tolist())]
