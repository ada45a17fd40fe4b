"""Fabrics by strides beside all graphs in which each host has as many links, each way."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlang.passes.planner.fabric import Traffic, choose_strides, link_seconds

HOSTS, DEGREE = 6, 2
Link = tuple[int, int]
Way = tuple[Link, ...]
ALL = tuple(range(HOSTS))


def choices(inward: tuple[int, ...] = (0,) * HOSTS, host: int = 0) -> Iterator[tuple[Link, ...]]:
    """All sets of links in which so many leave each host and so many come in."""
    if host == HOSTS:
        yield ()
        return
    for ends in combinations([k for k in ALL if k != host and inward[k] < DEGREE], DEGREE):
        left = tuple(count + (k in ends) for k, count in enumerate(inward))
        if all(count + HOSTS - 1 - host - (k > host) >= DEGREE for k, count in enumerate(left)):
            yield from (((*((host, k) for k in ends), *more)) for more in choices(left, host + 1))


Rings = tuple[Way, ...]  # no two of which have a link in common


@dataclass(frozen=True)
class Graph:
    """Links, the shortest way between each two hosts, and all that may go round groups of hosts."""

    links: tuple[Link, ...]
    ways: dict[Link, Way]
    rings: dict[tuple[int, ...], list[Rings]]

    def seconds(self, traffic: Traffic) -> float:
        """Seconds of the fullest link of one byte a second, with the best rings of each group; all
        else as `fabric.seconds` deals traffic out."""
        sizes = {**traffic.rings}
        if traffic.all_reduced:
            sizes[ALL] = sizes.get(ALL, 0.0) + 2 * (HOSTS - 1) / HOSTS * traffic.all_reduced
        every = product(*(self.rings[group] for group in sizes))
        return min(self._seconds(traffic, sizes, dict(zip(sizes, rings))) for rings in every)

    def _seconds(
        self, traffic: Traffic, sizes: dict[tuple[int, ...], float], rings: dict[object, Rings]
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


def known(links: tuple[Link, ...]) -> Graph | None:
    """The graph of links, where all hosts reach each other."""
    near: dict[int, list[int]] = defaultdict(list)
    for a, b in links:
        near[a].append(b)
    for a, ends in near.items():
        ends.sort(key=lambda b: (b - a) % HOSTS)  # the nearest first, as strides are
    ways: dict[Link, Way] = {}
    for source in ALL:
        met: dict[int, Way] = {source: ()}
        queue = deque([source])
        while queue:
            at = queue.popleft()
            for there in near[at]:
                if there not in met:
                    met[there] = (*met[at], (at, there))
                    queue.append(there)
        if len(met) < HOSTS:
            return None
        ways |= {(source, target): way for target, way in met.items() if way}
    return Graph(links, ways, {group: apart([*around(near, group)]) for group in GROUPS})


def around(near: dict[int, list[int]], group: tuple[int, ...], *met: int) -> Iterator[Way]:
    """All rings that go once through just these hosts."""
    met = met or group[:1]
    if len(met) == len(group):
        if met[0] in near[met[-1]]:
            yield tuple(zip(met, (*met[1:], met[0])))
        return
    for there in near[met[-1]]:
        if there in group and there not in met:
            yield from around(near, group, *met, there)


def apart(rings: list[Way]) -> list[Rings]:
    """Each ring, and each two without a common link; no ring where there is none."""
    two = [(a, b) for a, b in combinations(rings, 2) if not {*a} & {*b}]
    return [*two, *((one,) for one in rings)] or [()]


def strided(*chosen: int) -> tuple[Link, ...]:
    """The links of strides."""
    return tuple(sorted((k, (k + stride) % HOSTS) for k in ALL for stride in chosen))


MESSAGES = st.dictionaries(
    st.sampled_from([(a, b) for a in ALL for b in ALL if a != b]),
    st.integers(1, 50).map(float),
    max_size=8,
)
EVERY = {(a, b): 1.0 for a in ALL for b in ALL if a != b}
STAGES = {(k, k + step): 1.0 for step in (1, -1) for k in ALL if k + step in ALL}
NEXT = {(k, (k + 3) % HOSTS): 1.0 for k in ALL}
HALVES: dict[tuple[int, ...], float] = {(0, 2, 4): 4.0, (1, 3, 5): 4.0}
FEW = {(1, 5): 1.0, (5, 0): 1.0, (0, 2): 1.0, (1, 3): 1.0}
PAIRS: dict[tuple[int, ...], float] = {(0, 3): 4.0, (1, 4): 4.0, (2, 5): 4.0}


@given(messages=MESSAGES, reduced=st.integers(0, 50))
@settings(max_examples=20)
def test_strides_are_priced_as_other_graphs_are(messages: dict[Link, float], reduced: int) -> None:
    """The same way for each message; rings over all of a graph's links are no slower."""
    for chosen in combinations(range(1, HOSTS), DEGREE):
        graph, alone = known(strided(*chosen)), Traffic(0.0, messages)
        if graph is None:
            continue
        assert graph.seconds(alone) == link_seconds(HOSTS, chosen, alone, 1.0)
        both = Traffic(float(reduced), messages, HALVES)
        assert graph.seconds(both) <= link_seconds(HOSTS, chosen, both, 1.0) * (1 + 1e-9)


SENT = [
    (Traffic(6.0, {}), 1.0),
    (Traffic(6.0, STAGES), 1.0),
    (Traffic(0.0, {}, HALVES), 1.0),
    (Traffic(0.0, {}, PAIRS), 1.0),
    (Traffic(0.0, NEXT, HALVES), 1.0),
    (Traffic(0.0, STAGES, PAIRS), 1.0),
    (Traffic(6.0, EVERY), 1.1),
    (Traffic(0.0, EVERY), 1.2),
    (Traffic(0.0, FEW), 2.0),
]


def test_no_graph_is_quicker_for_what_plans_send() -> None:
    """Of all labelled graphs; where all send to all, one that is no strides is a fifth quicker,
    and for few messages that do not go equally far, twice as quick."""
    every = [*choices()]
    assert len(every) == len({*every}) == 7570  # OEIS A007107
    graphs = [one for one in map(known, every) if one is not None]
    for traffic, share in SENT:
        least = min(graph.seconds(traffic) for graph in graphs)
        assert choose_strides(HOSTS, DEGREE, traffic, 1.0)[1] == pytest.approx(share * least)
