"""Proof of a timeline before it runs: complete, in a possible order, its messages matched."""

from __future__ import annotations

from typing import Any

import numpy as np

from schedlang.pipeline.cost import UNIT_COST, Cost, Number
from schedlang.pipeline.timeline.memory import held
from schedlang.pipeline.timeline.messages import Messages, messages
from schedlang.pipeline.timeline.needs import (
    ASIDE,
    GROUPS,
    Places,
    barriers,
    dependencies,
    describe,
)
from schedlang.pipeline.timeline.sharded_weights import check_shards
from schedlang.pipeline.timeline.simulation import Clock, Needs, never_ends
from schedlang.pipeline.timeline.table import AWAY, Kind, Rows, Timeline, TimelineError
from schedlang.pipeline.timeline.versions import check_versions, weight_copies


def check(
    timeline: Timeline,
    *,
    complete: bool = True,
    rendezvous: bool = False,
    memory: Number | None = None,
    cost: Cost = UNIT_COST,
    versions: int | None = None,
) -> None:
    """Raise TimelineError unless every operation is there once, in a possible order, and it ends.

    Each microbatch goes through one replica; each (stage, microbatch, slice) has one F and one B or
    one I and one W, all rows of a stage on one rank, F first and I before W, slices forward in
    order and backward in reverse; what is evicted or offloaded comes back before its backward. A
    timeline without backwards is an evaluation. Weights are read in versions that a STEP has made.
    Transfers, if any, are matched in the order in which they were sent.

    complete    False allows (stage, microbatch) pairs to be missing
    rendezvous  a send does not return before its receive is posted, as with NCCL
    memory      the most activations that a rank may hold, in M_B at `cost`
    versions    the most versions of a stage's weights that are kept, the newest included
    """
    t = timeline
    if any(int(c.min(initial=0)) < 0 for c in (t.stage, t.replica, t.microbatch, t.slice)):
        raise TimelineError("stages, replicas, microbatches and slices are counted from 0")
    _one_home(t)
    table = Places(t)
    forward, backward, weight = (table.rows_of(*kinds) for kinds in GROUPS)
    _complete(table, forward, backward, weight, complete)
    _in_order(table, forward, backward, weight)
    check_versions(t)
    _kept(t, versions)
    check_shards(t)
    made, used = dependencies(t)
    apart = t.rank[made] != t.rank[used]
    mail = messages(t, made[apart], used[apart])
    _ends(t, made, used, apart, mail, rendezvous)
    if memory is not None:
        _fits(t, memory, cost)


def _one_home(t: Timeline) -> None:
    """All rows of a stage of a replica are on one rank."""
    own = np.flatnonzero((t.homes[t.replica, t.stage] != t.rank) & ~np.isin(t.kind, AWAY))
    own = own[t.kind[own] != Kind.BARRIER]
    if len(own):
        row = int(own[0])
        home = int(t.homes[t.replica[row], t.stage[row]])
        raise TimelineError(
            f"{describe(t, row)} is not with the other operations of its stage, which are on rank "
            f"{home}: all must be on the same rank"
        )


def _complete(table: Places, forward: Rows, backward: Rows, weight: Rows, complete: bool) -> None:
    """Every operation is there once, each microbatch on one replica."""
    through: Any = (forward >= 0).any(axis=(1, 3)) | (backward >= 0).any(axis=(1, 3))
    if (through.sum(axis=0) > 1).any():
        several = int(np.argmax(through.sum(axis=0) > 1))
        replicas = " and ".join(map(str, np.flatnonzero(through[:, several]).tolist()))
        raise TimelineError(
            f"microbatch {several} goes through replicas {replicas}, not through one"
        )
    through[0] |= ~through.any(axis=0)
    wanted = np.broadcast_to(through[:, None, :, None], forward.shape)
    if complete and (wanted & (forward < 0)).any():
        raise TimelineError(f"{table.name(np.argmax(wanted & (forward < 0)))} has no forward")
    trained = bool((backward >= 0).any())
    if trained and ((backward >= 0) != (forward >= 0)).any():
        which = table.name(np.argmax((backward >= 0) != (forward >= 0)))
        raise TimelineError(f"{which} has a forward without a backward, or the reverse")
    split = np.where(backward >= 0, table.t.kind[backward] == Kind.I, False)
    if (split != (weight >= 0)).any():
        which = table.name(np.argmax(split != (weight >= 0)))
        raise TimelineError(f"{which} has an input gradient without a weight gradient, or reverse")


def _in_order(table: Places, forward: Rows, backward: Rows, weight: Rows) -> None:
    """Check that a rank's own inputs come before the rows that need them."""
    _stand(table, forward, backward, "F before B")
    _stand(table, backward, weight, "I before W")
    _stand(table, forward[..., :-1], forward[..., 1:], "slices forward in order")
    _stand(table, backward[..., 1:], backward[..., :-1], "slices backward in reverse order")
    there = set(np.flatnonzero(np.bincount(table.t.kind, minlength=len(Kind))).tolist())
    rows = {kind: table.rows_of(kind) for kinds in ASIDE for kind in kinds if kind in there}
    for first, then in (kinds for kinds in ASIDE if len(kinds) == 2):
        if first in rows or then in rows:
            gone, back = (rows.get(k, np.full(table.shape, -1)) for k in (first, then))
            _together(table, gone, back, first, then)
    for kind, mine in rows.items():
        for name, other in (("forward", forward), ("backward", backward)):
            alone = (mine >= 0) & (other < 0)
            if alone.any():
                row = describe(table.t, int(mine[alone].ravel()[0]))
                raise TimelineError(f"{row} belongs to a {name} that is not there")
        _stand(table, forward, mine, f"F before {kind.name}")
        _stand(table, mine, backward, f"{kind.name} before B")
    if Kind.RECOMPUTE in rows:
        for kind in (Kind.LOAD, Kind.RELOAD):
            if kind in rows:
                _stand(table, rows[kind], rows[Kind.RECOMPUTE], f"{kind.name} before RECOMPUTE")


def _stand(table: Places, first: Rows, then: Rows, what: str) -> None:
    """Check that, where both exist, the first comes before the second."""
    wrong = (first >= 0) & (then >= 0) & (first > then)
    if wrong.any():
        k = int(np.argmax(wrong))
        a, b = describe(table.t, int(first.flat[k])), describe(table.t, int(then.flat[k]))
        raise TimelineError(f"{b} waits for {a}, which stands later: {what}, on the same rank")


def _together(table: Places, gone: Rows, back: Rows, first: Kind, then: Kind) -> None:
    """Check that what leaves returns later from the same partner."""
    t = table.t
    lone = (gone >= 0) != (back >= 0)
    if lone.any():
        k = int(np.argmax(lone))
        row = max(int(gone.flat[k]), int(back.flat[k]))
        other = then if gone.flat[k] >= 0 else first
        raise TimelineError(f"{describe(t, row)} has no {other.name}")
    _stand(table, gone, back, f"{first.name} before {then.name}")
    if first is not Kind.EVICT:
        return
    evict, load = gone[gone >= 0], back[gone >= 0]
    for rows in (evict, load):
        strange = (t.peer[rows] < 0) | (t.peer[rows] >= t.ranks) | (t.peer[rows] == t.rank[rows])
        strange |= t.peer[rows] != t.peer[evict]
        if strange.any():
            row = int(rows[np.argmax(strange)])
            raise TimelineError(f"{describe(t, row)} names no partner, or another one than EVICT")


def _ends(
    t: Timeline, made: Rows, used: Rows, apart: Rows, mail: Messages | None, rendezvous: bool
) -> None:
    """Every rank comes to its end: no circle of operations that wait for each other."""
    pairs = [(made[~apart], used[~apart])]
    if mail is None:
        pairs.append((made[apart], used[apart]))
    else:
        pairs += mail.waits(rendezvous)
    if (t.kind == Kind.BARRIER).any():
        before, waits, table = barriers(t, np.zeros(len(t), dtype=bool))
        pairs += [
            (before, waits),
            (np.broadcast_to(table[0], table[1:].shape).ravel(), table[1:].ravel()),
        ]
    first, then = (np.concatenate(rows) for rows in zip(*pairs))
    live = (t.rank[first] != t.rank[then]) | (first > then)
    first, then = first[live].astype(np.int64), then[live]
    nothing = np.zeros(len(t), dtype=np.int64)
    clock = Clock(t.starts, nothing, Needs.of(len(t), first, then, nothing[: len(first)]))
    if waits_for := clock.run():
        raise TimelineError("the order never ends: " + never_ends(t, waits_for))


def _kept(t: Timeline, versions: int | None) -> None:
    """No stage keeps more versions of its weights than are allowed."""
    copies = weight_copies(t) if versions is not None else np.zeros(1)
    if versions is not None and copies.max(initial=0) > versions:
        stage = int(copies.argmax())
        raise TimelineError(
            f"stage {stage} (rank {t.stage_rank[stage]}) keeps {copies[stage]} versions of its "
            f"weights for its backwards, and the limit is {versions}"
        )


def _fits(t: Timeline, memory: Number, cost: Cost) -> None:
    """No rank ever holds more than the limit."""
    rows, ticks, tick = held(t, cost)
    unit = 1.0 if tick is None else tick
    most = int(ticks.argmax()) if len(ticks) else 0
    if len(ticks) and ticks[most] * unit > memory + (1e-9 if tick is None else 0):
        over = int(np.argmax(ticks * float(unit) > float(memory) + 1e-9))
        raise TimelineError(
            f"{describe(rows, over)} makes its rank hold {float(ticks[over] * unit):g} "
            f"microbatches' activations, and the limit is {float(memory):g}"
        )
