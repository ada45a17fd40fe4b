"""Timelines drawn at random: any placement, replicas, order and split of backwards that can run."""

from __future__ import annotations

import random
from collections.abc import Sequence

from schedlang.pipeline.timeline.table import Edge, Kind, Op, Timeline, timeline_from_rows

Homes = Sequence[Sequence[int]]  # [replica][stage] -> rank


def needs(op: Op, edges: Sequence[Edge], whole: bool) -> list[Op]:
    """The operations that one needs to have ended; `whole`: backwards are not split."""
    back = Kind.B if whole else Kind.I
    if op.kind is Kind.F:
        return [op._replace(stage=s) for s, d in edges if d == op.stage]
    if op.kind is Kind.W:
        return [op._replace(kind=Kind.I)]
    after = [op._replace(kind=back, stage=d) for s, d in edges if s == op.stage]
    return [op._replace(kind=Kind.F), *after]


def drawn(
    rng: random.Random, homes: Homes, micro: int, edges: Sequence[Edge], split: float = 0.5
) -> Timeline:
    """A random order of a random kind of backward of every stage and microbatch."""
    ranks = max(max(row) for row in homes) + 1
    through = [m % len(homes) for m in range(micro)]  # no replica is idle
    rng.shuffle(through)
    whole = rng.random() >= split
    kinds = (Kind.F, Kind.B) if whole else (Kind.F, Kind.I, Kind.W)
    left = [
        Op(kind, stage, m, through[m])
        for m in range(micro)
        for stage in range(len(homes[0]))
        for kind in kinds
    ]
    weight = {op: rng.random() for op in left}
    done: set[Op] = set()
    rows: list[list[Op]] = [[] for _ in range(ranks)]
    while left:
        ready = [op for op in left if done.issuperset(needs(op, edges, whole))]
        op = max(ready, key=weight.__getitem__)
        left.remove(op)
        done.add(op)
        rows[homes[op.replica][op.stage]].append(op)
    return timeline_from_rows(rows, edges)
