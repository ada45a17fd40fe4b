"""Random valid timelines for property tests, by list scheduling with random priorities."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import strategies as st

from schedlang.pipeline.timeline.table import (
    Edge,
    Kind,
    Op,
    Timeline,
    chain_edges,
    timeline_from_rows,
)

F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W  # noqa: E741
PARK = (Kind.EVICT, Kind.LOAD)
OpKinds = tuple[Kind, ...]  # the kinds of operations of a (stage, microbatch, slice) on its rank


@dataclass(frozen=True)
class Shape:
    """The operations of a timeline, without their order.

    homes      [replica][stage]: its rank
    replica    the replica of each microbatch
    ways       for each (stage, microbatch, slice), the kinds of its operations, in order
    """

    ranks: int
    edges: tuple[Edge, ...]
    homes: tuple[tuple[int, ...], ...]
    replica: tuple[int, ...]
    slices: int
    ways: dict[tuple[int, int, int], OpKinds]

    def op(self, kind: Kind, stage: int, micro: int, part: int) -> Op:
        """An operation; parked ones have the next rank as partner."""
        rank = self.homes[self.replica[micro]][stage]
        peer = (rank + 1) % self.ranks if kind in PARK else -1
        return Op(kind, stage, micro, self.replica[micro], part, peer=peer)

    def needs(self) -> dict[Op, set[Op]]:
        """The dependencies of each operation, one rule after the other."""
        dependencies: dict[Op, set[Op]] = {}
        for (s, m, j), kinds in self.ways.items():
            ops = [self.op(kind, s, m, j) for kind in kinds]
            for op in ops:
                dependencies.setdefault(op, set())
            for earlier, after in zip(ops, ops[1:]):
                dependencies[after].add(earlier)
        backward_kinds = {
            key: next((k for k in kinds if k in (B, I)), None) for key, kinds in self.ways.items()
        }
        for (s, m, j), kind in backward_kinds.items():
            for x, y in self.edges:
                if y == s:
                    dependencies[self.op(F, s, m, j)].add(self.op(F, x, m, j))
                if x == s and kind is not None:
                    successor_kind = backward_kinds[y, m, j]
                    assert successor_kind is not None
                    dependencies[self.op(kind, s, m, j)].add(self.op(successor_kind, y, m, j))
            if j > 0:
                dependencies[self.op(F, s, m, j)].add(self.op(F, s, m, j - 1))
                earlier = backward_kinds[s, m, j - 1]
                if earlier is not None and kind is not None:
                    dependencies[self.op(earlier, s, m, j - 1)].add(self.op(kind, s, m, j))
        return dependencies


def random_order(shape: Shape, seed: int) -> Timeline:
    """Schedule the operations in a random possible order."""
    rng = random.Random(seed)
    all_needs = shape.needs()
    users: dict[Op, list[Op]] = {op: [] for op in all_needs}
    for op, dependencies in all_needs.items():
        for dependency in dependencies:
            users[dependency].append(op)
    missing = {op: len(dependencies) for op, dependencies in all_needs.items()}
    weight = {op: rng.random() for op in all_needs}
    greedy = rng.random()  # sometimes by priority, sometimes any
    ready = [op for op, count in missing.items() if not count]
    rows: list[list[Op]] = [[] for _ in range(shape.ranks)]
    while ready:
        op = min(ready, key=weight.__getitem__) if rng.random() < greedy else rng.choice(ready)
        ready.remove(op)
        rows[shape.homes[op.replica][op.stage]].append(op)
        for user in users[op]:
            missing[user] -= 1
            if not missing[user]:
                ready.append(user)
    return timeline_from_rows(rows, shape.edges)


@st.composite
def shapes(
    draw: st.DrawFn,
    ranks: int = 4,
    stages: int = 5,
    micro: int = 4,
    replicas: int = 2,
    slices: int = 2,
    skips: bool = True,
    mixed: bool = True,
    aside: tuple[OpKinds, ...] = (),
) -> Shape:
    """Strategy: shapes of timelines, with sizes up to the given ones.

    `skips`: edges beside the chain of stages; `mixed`: whole and split backwards in one timeline;
    `aside`: kinds that may come between a forward and its backward, as `(Kind.EVICT, Kind.LOAD)`.
    """
    p, count, m = (draw(st.integers(1, limit)) for limit in (ranks, stages, micro))
    k, copies = draw(st.integers(1, slices)), draw(st.integers(1, replicas))
    places = st.tuples(*[st.integers(0, p - 1)] * count)
    homes = draw(st.tuples(*[places] * copies))
    edges = set(chain_edges(count))
    if skips and count > 2:
        skip_edges = draw(st.sets(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1))))
        edges |= {(a, b) for a, b in skip_edges if a < b}
    modes: list[OpKinds] = [(B,), (I, W)]
    one_mode = draw(st.sampled_from(modes))
    rng = random.Random(draw(st.integers(0, 2**16)))
    replica = tuple(rng.randrange(copies) for _ in range(m))
    if p == 1:
        aside = tuple(kinds for kinds in aside if not set(kinds) & set(PARK))
    ways = {
        (s, mb, j): (F, *(rng.choice([(), *aside])), *(rng.choice(modes) if mixed else one_mode))
        for s in range(count)
        for mb in range(m)
        for j in range(k)
    }
    return Shape(p, tuple(sorted(edges)), homes, replica, k, ways)


@st.composite
def timelines(draw: st.DrawFn, shape: st.SearchStrategy[Shape] | None = None) -> Timeline:
    """Any valid timeline, of compute operations only; `with_transfers` adds the messages."""
    drawn_shape = draw(shapes() if shape is None else shape)
    return random_order(drawn_shape, draw(st.integers(0, 2**32 - 1)))
