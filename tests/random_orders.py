"""Random timelines: any placement, replicas, order and split of backwards that can run."""

from __future__ import annotations

import random
from collections.abc import Sequence

from schedlang.pipeline.timeline.table import Edge, Kind, Op, Timeline, timeline_from_rows

Homes = Sequence[Sequence[int]]  # [replica][stage] -> rank


def dependencies(op: Op, edges: Sequence[Edge], unsplit: bool) -> list[Op]:
    """The operations that must end before this one, with backwards split or not."""
    backward_kind = Kind.B if unsplit else Kind.I
    if op.kind is Kind.F:
        return [op._replace(stage=s) for s, d in edges if d == op.stage]
    if op.kind is Kind.W:
        return [op._replace(kind=Kind.I)]
    after = [op._replace(kind=backward_kind, stage=d) for s, d in edges if s == op.stage]
    return [op._replace(kind=Kind.F), *after]


def random_timeline(
    rng: random.Random, homes: Homes, micro: int, edges: Sequence[Edge], split: float = 0.5
) -> Timeline:
    """A random order of a random kind of backward of every stage and microbatch."""
    ranks = max(max(row) for row in homes) + 1
    replica_of = [m % len(homes) for m in range(micro)]  # every replica gets microbatches
    rng.shuffle(replica_of)
    unsplit = rng.random() >= split
    kinds = (Kind.F, Kind.B) if unsplit else (Kind.F, Kind.I, Kind.W)
    pending = [
        Op(kind, stage, m, replica_of[m])
        for m in range(micro)
        for stage in range(len(homes[0]))
        for kind in kinds
    ]
    weight = {op: rng.random() for op in pending}
    finished: set[Op] = set()
    rows: list[list[Op]] = [[] for _ in range(ranks)]
    while pending:
        ready = [op for op in pending if finished.issuperset(dependencies(op, edges, unsplit))]
        op = max(ready, key=weight.__getitem__)
        pending.remove(op)
        finished.add(op)
        rows[homes[op.replica][op.stage]].append(op)
    return timeline_from_rows(rows, edges)
