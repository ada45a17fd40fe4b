"""Activations that ranks hold along a timeline, and activations that they move to a partner."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedlang.pipeline.cost import DEFAULT_COST, Cost
from schedlang.pipeline.timeline.simulation import (
    Ticks,
    exact_number,
    exact_ticks,
    relative_weights,
    simulate_timeline,
)
from schedlang.pipeline.timeline.table import TRANSFER_KINDS, Kind, RowIndex, Rows, Timeline

AWAY, BACK = (Kind.EVICT, Kind.OFFLOAD, Kind.GIVE), (Kind.LOAD, Kind.RELOAD, Kind.HOLD)


def peak_activations(timeline: Timeline, cost: Cost = DEFAULT_COST) -> NDArray[Any]:
    """Return the most that each rank holds, in M_B: one microbatch's activations on one rank's
    share.

    A forward makes the activations of its stage and slice, which are `1 / (v k)`; the full backward
    frees them, or the input gradient all but `cost.kept` and the weight gradient the rest. Moved
    activations count on the rank that holds them, those on the host on none. Exact where costs are.
    """
    t = with_partner_rows(timeline)
    steps, tick = _steps(t, cost)
    tops = _tops(t, steps)
    if tick is None:
        return tops.astype(np.float64)
    return np.array([int(x) * tick for x in tops.tolist()], dtype=object)


def peak_live(timeline: Timeline) -> NDArray[np.int64]:
    """Return the largest number of activations that each rank holds, in (stage, microbatch, slice).

    A forward makes one, the full backward or the weight gradient frees it; moved ones count on the
    rank that holds them, those on the host on none.
    """
    t = with_partner_rows(timeline)
    added = np.isin(t.kind, (Kind.F, *BACK)).astype(np.int64)
    return _tops(t, added - np.isin(t.kind, (Kind.B, Kind.W, *AWAY)))


def with_partner_rows(timeline: Timeline) -> Timeline:
    """Drop sends and receives, and add the partner's HOLD and GIVE."""
    added = np.isin(timeline.kind, TRANSFER_KINDS)
    return with_holds(timeline.pick(~added) if added.any() else timeline)


def _steps(t: Timeline, cost: Cost) -> tuple[Ticks, Fraction | None]:
    """Return the change that each row makes to what its rank holds."""
    unit = np.array([Fraction(1)], dtype=object)
    weights = cost.shares if cost.held is None else cost.held
    stage = unit if weights is None else relative_weights(weights, t.stages, "stages")
    part = unit if cost.slices is None else relative_weights(cost.slices, t.slices, "slices")
    share = stage[:, None] * part * Fraction(t.ranks, max(1, t.stages) * max(1, t.slices))
    kept, inputs = exact_number(cost.kept), exact_number(cost.inputs)
    change = {Kind.F: 1, Kind.B: -1, Kind.I: kept - 1, Kind.W: -kept}
    change |= dict.fromkeys(AWAY, -1) | dict.fromkeys(BACK, 1)
    recomputed = _recomputed_rows(t)
    if recomputed is None:
        table = _table([change], share)
        table_row: Any = 0
    else:
        small = {Kind.F: inputs, Kind.RECOMPUTE: 1 - inputs}
        small |= dict.fromkeys(AWAY, -inputs) | dict.fromkeys(BACK, inputs)
        table, table_row = _table([change, change | small], share), recomputed.astype(np.int64)
    ticks, tick = exact_ticks(table, len(t))
    indices = (t.stage if table.shape[2] > 1 else 0, t.slice if table.shape[3] > 1 else 0)
    return ticks[(table_row, t.kind, *indices)], tick


def _table(changes: list[dict[Kind, Any]], share: NDArray[Any]) -> NDArray[Any]:
    numbers = [[exact_number(change.get(kind, 0)) for kind in Kind] for change in changes]
    return np.asarray(np.array(numbers, dtype=object)[:, :, None, None] * share)


def _recomputed_rows(t: Timeline) -> NDArray[np.bool_] | None:
    """Return the rows whose activations are recomputed, None where there are none."""
    if not (t.kind == Kind.RECOMPUTE).any():
        return None
    table = RowIndex(t)
    recomputed: NDArray[np.bool_] = table.rows_of(Kind.RECOMPUTE)[table.where] >= 0
    return recomputed


def _tops(t: Timeline, steps: Ticks) -> Ticks:
    """Return the largest running sum of every rank."""
    tops = np.zeros(t.ranks, dtype=steps.dtype)
    if not len(t):
        return tops
    total = np.cumsum(steps)
    low = t.starts[:-1]
    full = t.starts[1:] > low
    before = np.where(low > 0, total[low - 1], 0)
    tops[full] = np.maximum.reduceat(total, low[full]) - before[full]
    return tops.clip(0)


# -- activations on a partner ----------------------------------------------------------------------


PARTNER_KIND = {Kind.EVICT: Kind.HOLD, Kind.LOAD: Kind.GIVE}


def with_holds(timeline: Timeline) -> Timeline:
    """Add HOLD for every EVICT and GIVE for every LOAD, on the partner's rank.

    All rows are sorted into the order of one possible run, at unit cost, and each partner's row
    comes right after the row that it answers: so no ranks wait in a circle, although HOLD waits. A
    timeline that has these rows already is returned unchanged.
    """
    t = timeline
    rows = np.flatnonzero(np.isin(t.kind, list(PARTNER_KIND)))
    if not len(rows) or np.isin(t.kind, list(PARTNER_KIND.values())).any():
        return t
    positions = _turns(t)
    span = int(positions.max()) + 3
    answers = {
        "kind": np.where(t.kind[rows] == Kind.EVICT, Kind.HOLD, Kind.GIVE),
        "rank": t.peer[rows],
        "peer": t.rank[rows],
    }
    slots = t.peer[rows] * span + positions[rows] + 2
    return t.with_copies(t.rank * span + positions, (rows, slots, answers))


def _turns(t: Timeline) -> Rows:
    """Return the position of each row in one order of all rows, in steps of four; transfers follow
    the row before."""
    compute = np.flatnonzero(~np.isin(t.kind, TRANSFER_KINDS))
    subset = t.pick(compute)
    start = simulate_timeline(subset).start.copy()
    for low, high in zip(subset.starts[:-1], subset.starts[1:]):
        # copies may begin before earlier rows do
        start[low:high] = np.maximum.accumulate(start[low:high])
    positions = np.empty(len(compute), dtype=np.int64)
    positions[np.lexsort((np.arange(len(compute)), start))] = 4 * np.arange(len(compute))
    before = np.searchsorted(compute, np.arange(len(t)), side="right") - 1
    same_rank = (before >= 0) & (t.rank[compute[np.maximum(before, 0)]] == t.rank)
    turns: Rows = np.where(same_rank, positions[np.maximum(before, 0)] + 1, -1)
    turns[compute] = positions
    return turns


def with_evictions(timeline: Timeline, ahead: Mapping[int, int]) -> Timeline:
    """Add EVICT after forwards of some stages, and LOAD before their backwards.

    `ahead`: stage -> how many operations of its rank before the backward the LOAD comes. The
    partner is the next rank of a ring. A microbatch that would be loaded at once is not evicted.
    HOLD and GIVE of the partners come with the transfers (`with_holds`).
    """
    evicted, backward = _pairs(timeline, ahead)
    if not len(evicted):
        return timeline
    t, partner = timeline, (timeline.rank[evicted] + 1) % timeline.ranks
    return t.with_copies(
        4 * np.arange(len(t)) + 1,
        (evicted, 4 * evicted + 2, {"kind": Kind.EVICT, "peer": partner}),
        (evicted, 4 * backward, {"kind": Kind.LOAD, "peer": partner}),
    )


def _pairs(t: Timeline, ahead: Mapping[int, int]) -> tuple[Rows, Rows]:
    """Return the forwards whose activations are evicted, and the rows before which they are
    loaded."""
    table = RowIndex(t)
    forward, backward = table.rows_of(Kind.F), table.rows_of(Kind.B, Kind.I)
    complete = (forward >= 0) & (backward >= 0)
    evicted, used = forward[complete], backward[complete]
    order = np.argsort(used, kind="stable")
    evicted, used = evicted[order], used[order]
    lead = np.array([ahead.get(stage, -1) for stage in range(t.stages)], dtype=np.int64)
    own_lead = lead[t.stage[evicted]]
    leaves = (own_lead >= 0) & (used - own_lead > evicted + 1)
    return evicted[leaves], (used - own_lead)[leaves]
