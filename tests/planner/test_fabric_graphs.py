"""Stride fabrics against all directed graphs with the same number of links per host: of six hosts
by pricing each graph, of eight hosts by a bound that holds for any graph."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, combinations, count, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlang.passes.planner.fabric import Traffic, choose_strides, link_seconds

HOSTS, DEGREE = 6, 2
Link = tuple[int, int]
Route = tuple[Link, ...]
ALL = tuple(range(HOSTS))


def all_link_sets(
    inward: tuple[int, ...] = (0,) * HOSTS, host: int = 0
) -> Iterator[tuple[Link, ...]]:
    """Yield all sets of links with DEGREE outgoing and incoming links for each host."""
    if host == HOSTS:
        yield ()
        return
    for ends in combinations([k for k in ALL if k != host and inward[k] < DEGREE], DEGREE):
        inward_after = tuple(count + (k in ends) for k, count in enumerate(inward))
        if all(
            count + HOSTS - 1 - host - (k > host) >= DEGREE for k, count in enumerate(inward_after)
        ):
            yield from (
                ((*((host, k) for k in ends), *others))
                for others in all_link_sets(inward_after, host + 1)
            )


RingSet = tuple[Route, ...]  # no two of which have a link in common


@dataclass(frozen=True)
class Graph:
    """Links, the shortest route between each two hosts, and all sets of rings over groups."""

    links: tuple[Link, ...]
    ways: dict[Link, Route]
    rings: dict[tuple[int, ...], list[RingSet]]

    def seconds(self, traffic: Traffic) -> float:
        """Return the seconds of the most loaded link at one byte a second, with the best rings of
        each group; other traffic is routed as `fabric.seconds` does."""
        sizes = {**traffic.rings}
        if traffic.all_reduced:
            sizes[ALL] = sizes.get(ALL, 0.0) + 2 * (HOSTS - 1) / HOSTS * traffic.all_reduced
        ring_choices = product(*(self.rings[group] for group in sizes))
        return min(self._seconds(traffic, sizes, dict(zip(sizes, rings))) for rings in ring_choices)

    def _seconds(
        self, traffic: Traffic, sizes: dict[tuple[int, ...], float], rings: dict[object, RingSet]
    ) -> float:
        load, messages = dict.fromkeys(self.links, 0.0), defaultdict(float, traffic.messages)
        for group, size in sizes.items():
            for link in chain(*rings[group]):
                load[link] += size / len(rings[group])
            for pair in () if rings[group] else zip(group, (*group[1:], group[0])):
                messages[pair] += size
        for pair, size in messages.items():
            for link in self.ways[pair]:
                load[link] += size
        return max(load.values())


GROUPS = (ALL, (0, 2, 4), (1, 3, 5), (0, 3), (1, 4), (2, 5))


def graph_of(links: tuple[Link, ...]) -> Graph | None:
    """Return the graph of links, or None if some hosts cannot reach each other."""
    neighbours: dict[int, list[int]] = defaultdict(list)
    for a, b in links:
        neighbours[a].append(b)
    for a, ends in neighbours.items():
        ends.sort(key=lambda b: (b - a) % HOSTS)  # the nearest first, as for strides
    ways: dict[Link, Route] = {}
    for source in ALL:
        routes: dict[int, Route] = {source: ()}
        queue = deque([source])
        while queue:
            host = queue.popleft()
            for neighbour in neighbours[host]:
                if neighbour not in routes:
                    routes[neighbour] = (*routes[host], (host, neighbour))
                    queue.append(neighbour)
        if len(routes) < HOSTS:
            return None
        ways |= {(source, target): route for target, route in routes.items() if route}
    return Graph(
        links, ways, {group: disjoint_rings([*rings_over(neighbours, group)]) for group in GROUPS}
    )


def rings_over(
    neighbours: dict[int, list[int]], group: tuple[int, ...], *visited: int
) -> Iterator[Route]:
    """Yield all rings that visit each host of the group once, and no other."""
    visited = visited or group[:1]
    if len(visited) == len(group):
        if visited[0] in neighbours[visited[-1]]:
            yield tuple(zip(visited, (*visited[1:], visited[0])))
        return
    for neighbour in neighbours[visited[-1]]:
        if neighbour in group and neighbour not in visited:
            yield from rings_over(neighbours, group, *visited, neighbour)


def disjoint_rings(rings: list[Route]) -> list[RingSet]:
    """Return each ring, and each two without a common link; `[()]` if there is none."""
    disjoint = [(a, b) for a, b in combinations(rings, 2) if not {*a} & {*b}]
    return [*disjoint, *((ring,) for ring in rings)] or [()]


def stride_links(*strides: int) -> tuple[Link, ...]:
    """Return the links of strides."""
    return tuple(sorted((k, (k + stride) % HOSTS) for k in ALL for stride in strides))


MESSAGES = st.dictionaries(
    st.sampled_from([(a, b) for a in ALL for b in ALL if a != b]),
    st.integers(1, 50).map(float),
    max_size=8,
)
ALL_PAIRS = {(a, b): 1.0 for a in ALL for b in ALL if a != b}
STAGES = {(k, k + step): 1.0 for step in (1, -1) for k in ALL if k + step in ALL}
NEXT = {(k, (k + 3) % HOSTS): 1.0 for k in ALL}
HALVES: dict[tuple[int, ...], float] = {(0, 2, 4): 4.0, (1, 3, 5): 4.0}
FEW = {(1, 5): 1.0, (5, 0): 1.0, (0, 2): 1.0, (1, 3): 1.0}
PAIRS: dict[tuple[int, ...], float] = {(0, 3): 4.0, (1, 4): 4.0, (2, 5): 4.0}


@given(messages=MESSAGES, reduced=st.integers(0, 50))
@settings(max_examples=20)
def test_strides_are_priced_as_other_graphs_are(messages: dict[Link, float], reduced: int) -> None:
    """Messages take the same routes; rings over any links of the graph are no slower."""
    for strides in combinations(range(1, HOSTS), DEGREE):
        graph, messages_only = graph_of(stride_links(*strides)), Traffic(0.0, messages)
        if graph is None:
            continue
        assert graph.seconds(messages_only) == link_seconds(HOSTS, strides, messages_only, 1.0)
        with_rings = Traffic(float(reduced), messages, HALVES)
        assert graph.seconds(with_rings) <= link_seconds(HOSTS, strides, with_rings, 1.0) * (
            1 + 1e-9
        )


SENT = [
    (Traffic(6.0, {}), 1.0),
    (Traffic(6.0, STAGES), 1.0),
    (Traffic(0.0, {}, HALVES), 1.0),
    (Traffic(0.0, {}, PAIRS), 1.0),
    (Traffic(0.0, NEXT, HALVES), 1.0),
    (Traffic(0.0, STAGES, PAIRS), 1.0),
    (Traffic(6.0, ALL_PAIRS), 1.1),
    (Traffic(0.0, ALL_PAIRS), 1.2),
    (Traffic(0.0, FEW), 2.0),
]


def test_no_graph_is_quicker_for_what_plans_send() -> None:
    """Strides are the best graphs for common traffic; for all-to-all another graph is a fifth
    quicker, and for a few irregular messages twice as quick."""
    link_sets = [*all_link_sets()]
    assert len(link_sets) == len({*link_sets}) == 7570  # OEIS A007107
    graphs = [candidate for candidate in map(graph_of, link_sets) if candidate is not None]
    for traffic, share in SENT:
        least_time = min(graph.seconds(traffic) for graph in graphs)
        assert choose_strides(HOSTS, DEGREE, traffic, 1.0)[1] == pytest.approx(share * least_time)
    for traffic, _ in SENT:
        bound = least_seconds(HOSTS, DEGREE, traffic)
        assert min(graph.seconds(traffic) for graph in graphs) >= bound * (1 - 1e-9)


# -- any graph -------------------------------------------------------------------------------------


def least_seconds(hosts: int, degree: int, traffic: Traffic) -> float:
    """Bound the seconds of the most loaded link from below, for any graph in which each host has
    `degree` links in and out, any rings and any routes.

    Each host is in one group at most, and all messages have one size; a message is not divided.  A
    group is served by some number of rings without a common link, each of which takes a link of
    each host.  The hosts of a group that is not all of them keep a link to the others.
    """
    rings = dict(traffic.rings)
    if traffic.all_reduced:
        rings[tuple(range(hosts))] = 2 * (hosts - 1) / hosts * traffic.all_reduced
    group, size = max(rings.items(), key=lambda item: item[1], default=((), 0.0))
    most_rings = min(degree - (len(group) < hosts), disjoint_cycles(len(group)))
    unit = max(traffic.messages.values(), default=1.0)
    sent = [[b for a, b in traffic.messages if a == host] for host in range(hosts)]
    hops = max(
        sum(least_hops(len(ends), degree) for ends in sent) / hosts, max(len(ends) for ends in sent)
    )

    def carried(seconds: float, count: int) -> float:
        """Messages that the links of a host can carry beside so many rings."""
        beside = (seconds - size / count) / unit + 1e-9
        return count * (beside // 1) + (degree - count) * (seconds / unit + 1e-9) // 1

    def least(rings_used: int) -> float:
        ring = size / rings_used
        steps = (step + part for step in count() for part in sorted({0.0, ring / unit % 1}))
        return next(
            step * unit
            for step in steps
            if step * unit >= ring - 1e-9 and carried(step * unit, rings_used) >= hops
        )

    return min(map(least, range(1, most_rings + 1)))


def disjoint_cycles(hosts: int) -> int:
    """Most rings over all of so many hosts without a common link (Tillson 1980)."""
    return hosts - 2 if hosts in (4, 6) else max(1, hosts - 1)


def least_hops(ends: int, degree: int) -> int:
    """Fewest hops from a host to so many others: `degree` are one hop away, its square two, .."""
    hops, reached = 0, 0
    for distance in count(1):
        step = min(ends - reached, degree**distance)
        hops, reached = hops + distance * step, reached + step
        if reached == ends:
            return hops
    raise AssertionError


EIGHT = range(8)
STAGES_OF_8 = {(k, k + step): 1.0 for step in (1, -1) for k in EIGHT if k + step in EIGHT}
ALL_PAIRS_OF_8 = {(a, b): 1.0 for a in EIGHT for b in EIGHT if a != b}
SPACED: dict[tuple[int, ...], float] = {(0, 2, 4, 6): 4.0, (1, 3, 5, 7): 4.0}
CONSECUTIVE: dict[tuple[int, ...], float] = {(0, 1, 2, 3): 4.0, (4, 5, 6, 7): 4.0}
PAIRS_OF_8: dict[tuple[int, ...], float] = {(k, k + 4): 4.0 for k in range(4)}


@pytest.mark.parametrize(
    ("traffic", "shares"),  # of the bound, with two, three and four links
    [
        (Traffic(8.0, {}), (1, 1, 1)),
        (Traffic(8.0, STAGES_OF_8), (1, 1, 1)),
        (Traffic(0.0, STAGES_OF_8), (1, 1, 1)),
        (Traffic(0.0, {}, SPACED), (1, 1, 1)),
        (Traffic(0.0, {}, PAIRS_OF_8), (1, 1, 1)),
        (Traffic(0.0, ALL_PAIRS_OF_8), (1, 1, 1)),
        (Traffic(8.0, ALL_PAIRS_OF_8), (1, 30 / 26, 46 / 39)),
        (Traffic(0.0, {}, CONSECUTIVE), (1, 2, 2)),
        (Traffic(0.0, STAGES_OF_8, PAIRS_OF_8), (5 / 4, 1, 1)),
    ],
)
def test_no_graph_of_eight_hosts_is_quicker(traffic: Traffic, shares: tuple[float, ...]) -> None:
    """Strides reach the bound of any graph of eight hosts for what plans send alone; all-reduce and
    all-to-all together are within a fifth, rings over consecutive hosts within a factor of two."""
    for degree, share in zip((2, 3, 4), shares):
        bound = least_seconds(8, degree, traffic)
        assert choose_strides(8, degree, traffic, 1.0)[1] == pytest.approx(share * bound)
