"""A direct-connect fabric for a plan: which nodes are linked, and which way messages go.

TopoOpt (Wang et al., NSDI 2023): rings of sums are mutable, so a node's links are spent on a few
rings that reach far (`TotientPerms`), and the rest on pairs that exchange most (matchings).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, combinations_with_replacement
from math import gcd

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Matching = tuple[tuple[int, int], ...]  # pairs of nodes, each node in one at most


@dataclass(frozen=True)
class Demand:
    """Bytes of a step: summed over all nodes, and sent from node to node [nodes, nodes]."""

    summed: float
    sent: Floats

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return len(self.sent)


@dataclass(frozen=True)
class Fabric:
    """Links of a fabric: rings, by how far their next node is, and matchings of pairs.

    Each ring takes one port of a node for sending and one for receiving; each matching takes one of
    both of the nodes in it.
    """

    nodes: int
    rings: tuple[int, ...]
    pairs: tuple[Matching, ...]

    @cached_property
    def links(self) -> Ints:
        """Parallel links from node to node [nodes, nodes]."""
        found = np.zeros((self.nodes, self.nodes), dtype=np.int64)
        here = np.arange(self.nodes)
        for step in self.rings:
            found[here, (here + step) % self.nodes] += 1
        for one, two in (pair for matching in self.pairs for pair in matching):
            found[one, two] += 1
            found[two, one] += 1
        return found

    @cached_property
    def ways(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """A shortest way from each node to each, by its nodes; () where there is none."""
        return tuple(self._from(start) for start in range(self.nodes))

    def _from(self, start: int) -> tuple[tuple[int, ...], ...]:
        ways: dict[int, tuple[int, ...]] = {start: (start,)}
        edge = [start]
        while edge:
            reached: list[int] = []
            for node in edge:
                for other in np.flatnonzero(self.links[node]).tolist():
                    if other not in ways:
                        ways[other] = (*ways[node], other)
                        reached.append(other)
            edge = reached
        return tuple(ways.get(node, ()) for node in range(self.nodes))

    def seconds(self, demand: Demand, bandwidth: float) -> float:
        """Seconds until the fullest link has sent its part of a step; infinite if one is cut off.

        Sums go round all rings at once, each with an equal share; what is sent from node to node
        goes a shortest way, over rings too.  `bandwidth` in bytes a second of a link.
        """
        load = np.zeros((self.nodes, self.nodes))
        here = np.arange(self.nodes)
        if demand.summed and not self.rings:
            return float("inf")
        for step in self.rings:
            ring = 2 * demand.summed * (self.nodes - 1) / self.nodes / len(self.rings)
            load[here, (here + step) % self.nodes] += ring
        for one, two in zip(*np.nonzero(demand.sent), strict=True):
            way = self.ways[one][two]
            if not way and one != two:
                return float("inf")
            for begin, end in zip(way, way[1:]):
                load[begin, end] += demand.sent[one, two]
        full = load[self.links > 0] / self.links[self.links > 0]
        return float(full.max(initial=0.0)) / bandwidth


def strides(nodes: int) -> list[int]:
    """How far apart the neighbours of a ring through all nodes may be: the numbers coprime to it.

    TotientPerms: a ring of sums may visit its nodes in any order, and these orders need no table.
    """
    return [step for step in range(1, nodes) if gcd(step, nodes) == 1]


def spread(steps: Sequence[int], count: int) -> tuple[int, ...]:
    """So many of some strides, each nearest to a place of a geometric row from 1 to the largest.

    With such hops any node is reached in few (TopoOpt's SelectPermutations).
    """
    if count >= len(steps):
        return tuple(steps)
    row = np.geomspace(1, max(steps), count)
    found: list[int] = []
    for place in row.tolist():
        left = [step for step in steps if step not in found]
        found.append(min(left, key=lambda step: (abs(step - place), step)))
    return tuple(sorted(found))


def topology(demand: Demand, degree: int, bandwidth: float) -> Fabric:
    """The fabric of nodes with `degree` ports for a demand, by TopoOpt's way.

    All divisions of the ports between sums and pairs are tried; pairs are matched by the bytes
    between them, which are halved where there is a link already.
    """
    nodes = demand.nodes
    tried = []
    for rings in range(1 if demand.summed else 0, degree + 1):
        chosen = spread(strides(nodes), rings) if rings else ()
        for some in {chosen, tuple(strides(nodes)[:rings])}:
            one = Fabric(nodes, some, _matchings(demand, degree - len(some)))
            tried.append((one.seconds(demand, bandwidth), len(some), one))
    return min(tried, key=lambda item: item[:2])[2]


def _matchings(demand: Demand, count: int) -> tuple[Matching, ...]:
    """Matchings of greatest weight, one after the other (Edmonds 1965, by networkx)."""
    import networkx

    left = demand.sent + demand.sent.T
    found: list[Matching] = []
    for _ in range(count):
        graph = networkx.Graph()
        for one, two in combinations(range(demand.nodes), 2):
            if left[one, two] > 0:
                graph.add_edge(one, two, weight=float(left[one, two]))
        pairs = tuple(sorted(tuple(sorted(p)) for p in networkx.max_weight_matching(graph)))
        if not pairs:
            break
        found.append(pairs)
        for one, two in pairs:
            left[one, two] /= 2
            left[two, one] /= 2
    return tuple(found)


def all_fabrics(nodes: int, degree: int) -> Iterator[Fabric]:
    """Every fabric of rings and perfect matchings with so many ports: of few nodes alone."""
    for rings in range(degree + 1):
        for steps in combinations(strides(nodes), rings):
            for pairs in combinations_with_replacement(_perfect(nodes), degree - rings):
                yield Fabric(nodes, steps, pairs)


def _perfect(nodes: int) -> list[Matching]:
    """All matchings in which each node has a pair."""

    def of(left: tuple[int, ...]) -> Iterator[Matching]:
        if not left:
            yield ()
        for place in range(1, len(left)):
            rest = left[1:place] + left[place + 1 :]
            for others in of(rest):
                yield ((left[0], left[place]), *others)

    return list(of(tuple(range(nodes))))
