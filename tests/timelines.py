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
Way = tuple[Kind, ...]  # what a (stage, microbatch, slice) goes through on its rank


@dataclass(frozen=True)
class Shape:
    """What a timeline is made of.

    homes      [replica][stage]: its rank
    replica    of each microbatch
    ways       of each (stage, microbatch, slice): the kinds of its operations, in order
    """

    ranks: int
    edges: tuple[Edge, ...]
    homes: tuple[tuple[int, ...], ...]
    replica: tuple[int, ...]
    slices: int
    ways: dict[tuple[int, int, int], Way]

    def op(self, kind: Kind, stage: int, micro: int, part: int) -> Op:
        """An operation, with its partner where it is parked: the next rank."""
        home = self.homes[self.replica[micro]][stage]
        peer = (home + 1) % self.ranks if kind in PARK else -1
        return Op(kind, stage, micro, self.replica[micro], part, peer=peer)

    def needs(self) -> dict[Op, set[Op]]:
        """What each operation needs, said plainly, one rule after the other."""
        found: dict[Op, set[Op]] = {}
        for (s, m, j), way in self.ways.items():
            ops = [self.op(kind, s, m, j) for kind in way]
            for op in ops:
                found.setdefault(op, set())
            for before, after in zip(ops, ops[1:]):
                found[after].add(before)
        back = {
            place: next((k for k in way if k in (B, I)), None) for place, way in self.ways.items()
        }
        for (s, m, j), kind in back.items():
            for x, y in self.edges:
                if y == s:
                    found[self.op(F, s, m, j)].add(self.op(F, x, m, j))
                if x == s and kind is not None:
                    later = back[y, m, j]
                    assert later is not None
                    found[self.op(kind, s, m, j)].add(self.op(later, y, m, j))
            if j > 0:
                found[self.op(F, s, m, j)].add(self.op(F, s, m, j - 1))
                before = back[s, m, j - 1]
                if before is not None and kind is not None:
                    found[self.op(before, s, m, j - 1)].add(self.op(kind, s, m, j))
        return found


def scheduled(shape: Shape, seed: int) -> Timeline:
    """The operations in some possible order: again and again one that is ready, at random."""
    chance = random.Random(seed)
    needs = shape.needs()
    users: dict[Op, list[Op]] = {op: [] for op in needs}
    for op, before in needs.items():
        for one in before:
            users[one].append(op)
    missing = {op: len(before) for op, before in needs.items()}
    weight = {op: chance.random() for op in needs}
    greedy = chance.random()  # sometimes by priority, sometimes any
    ready = [op for op, count in missing.items() if not count]
    rows: list[list[Op]] = [[] for _ in range(shape.ranks)]
    while ready:
        op = (
            min(ready, key=weight.__getitem__) if chance.random() < greedy else chance.choice(ready)
        )
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
    aside: tuple[Way, ...] = (),
) -> Shape:
    """What a timeline is made of, each size at most as given.

    `skips`: edges beside the chain of stages; `mixed`: whole and split backwards in one timeline;
    `aside`: what may come between a forward and its backward, as `(Kind.EVICT, Kind.LOAD)`.
    """
    p, count, m = (draw(st.integers(1, most)) for most in (ranks, stages, micro))
    k, copies = draw(st.integers(1, slices)), draw(st.integers(1, replicas))
    places = st.tuples(*[st.integers(0, p - 1)] * count)
    homes = draw(st.tuples(*[places] * copies))
    edges = set(chain_edges(count))
    if skips and count > 2:
        more = draw(st.sets(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1))))
        edges |= {(a, b) for a, b in more if a < b}
    modes: list[Way] = [(B,), (I, W)]
    pure = draw(st.sampled_from(modes))
    chance = random.Random(draw(st.integers(0, 2**16)))
    replica = tuple(chance.randrange(copies) for _ in range(m))
    if p == 1:
        aside = tuple(way for way in aside if not set(way) & set(PARK))
    ways = {
        (s, mb, j): (F, *(chance.choice([(), *aside])), *(chance.choice(modes) if mixed else pure))
        for s in range(count)
        for mb in range(m)
        for j in range(k)
    }
    return Shape(p, tuple(sorted(edges)), homes, replica, k, ways)


@st.composite
def timelines(draw: st.DrawFn, shape: st.SearchStrategy[Shape] | None = None) -> Timeline:
    """Any valid timeline, of compute operations only; `with_transfers` adds the messages."""
    made = draw(shapes() if shape is None else shape)
    return scheduled(made, draw(st.integers(0, 2**32 - 1)))
