"""Direct-connect fabrics for a plan: rings by strides, and routes (`schedlang fabric`).

TopoOpt (Wang et al., NSDI 2023) wires each host to `degree` others.  An all-reduce may use any ring
over the hosts, so rings are chosen whose strides also carry the other messages well: a stride that
has no common factor with the number of hosts makes a ring (TotientPerms).
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations
from typing import TYPE_CHECKING

from schedlang.passes.simulate.machine import RING_COSTS

if TYPE_CHECKING:
    from schedlang.ir.plan import Plan
    from schedlang.passes.simulate.traffic import Collective

Strides = tuple[int, ...]
Messages = Mapping[tuple[int, int], float]  # (source host, target host) -> bytes


@dataclass(frozen=True)
class Traffic:
    """Bytes of a step between hosts.

    all_reduced  of an all-reduce over all hosts
    messages     between pairs of hosts
    rings        hosts of a ring -> bytes on each of its links, in whatever order it visits the
                 hosts
    """

    all_reduced: float
    messages: Messages
    rings: Mapping[tuple[int, ...], float] = field(default_factory=dict)


def traffic_of(plan: Plan, sent: Iterable[Collective], host: Callable[[int], int]) -> Traffic:
    """Count the bytes that an account's collectives send between hosts.

    A group of ranks, or a ring of ranks, visits each of its hosts once.  An all-to-all is a message
    from each rank to each other rank; sends between stages are messages too.
    """
    messages: defaultdict[tuple[int, ...], float] = defaultdict(float)
    rings: defaultdict[tuple[int, ...], float] = defaultdict(float)
    for call in sent:
        for ranks in _groups(plan, call):
            hosts = tuple(dict.fromkeys(map(host, ranks)))
            if len(hosts) < 2:
                continue
            if call.kind == "send" and call.to is not None:
                messages[hosts] += call.total
            elif call.kind == "all-to-all":
                for pair in ((host(a), host(b)) for a in ranks for b in ranks):
                    messages[pair] += call.total // len(ranks) * (pair[0] != pair[1])
            else:
                cost = RING_COSTS.get(call.kind.replace("-", "_"))
                rings[tuple(sorted(hosts))] += call.total * (cost(len(ranks))[1] if cost else 1)
    return Traffic(0.0, {(a, b): size for (a, b), size in messages.items()}, dict(rings))


def _groups(plan: Plan, call: Collective) -> Iterator[tuple[int, ...]]:
    """Yield the ranks of each group of a collective; for sends of stages the two ends of each
    message."""
    mesh, axis = plan.mesh, plan.cuts[0].axis if plan.cuts else ""
    for ranks in mesh.groups(call.axes):
        pos = {rank: mesh.coordinates(rank).get(axis, 0) for rank in ranks}
        if call.kind == "send" and call.to is not None:
            rank_at = {place: rank for rank, place in pos.items()}
            yield from ((rank_at[place], rank_at[call.to]) for place in call.places or ())
        else:
            yield tuple(rank for rank in ranks if call.places is None or pos[rank] in call.places)


def ring_strides(hosts: int) -> Strides:
    """Return the strides that make one ring of all hosts: those without a common factor with
    `hosts`."""
    return tuple(k for k in range(1, hosts) if math.gcd(k, hosts) == 1)


def link_seconds(hosts: int, strides: Strides, traffic: Traffic, link: float) -> float:
    """Seconds of the most loaded link.

    Rings are spread over all strides that visit exactly their hosts.  Messages take shortest
    routes, and so do rings that no stride fits.  A host has one link of `link` bytes a second for
    each stride.  Infinite where hosts cannot reach each other.
    """
    if math.gcd(hosts, *strides) > 1:
        return math.inf
    load = {(host, stride): 0.0 for host in range(hosts) for stride in strides}
    messages, rings = defaultdict(float, traffic.messages), defaultdict(float, traffic.rings)
    rings[tuple(range(hosts))] += 2 * (hosts - 1) / hosts * traffic.all_reduced
    for group, size in rings.items():
        around = strides_around(hosts, strides, group)
        for stride in around:
            for host in group:
                load[host, stride] += size / len(around)
        for pair in () if around else zip(group, (*group[1:], group[0])):
            messages[pair] += size
    for (source, target), size in messages.items():
        current = source
        for stride in routes(hosts, strides)[(target - source) % hosts]:
            load[current, stride] += size
            current = (current + stride) % hosts
    return max(load.values()) / link


def strides_around(hosts: int, strides: Strides, group: tuple[int, ...]) -> Strides:
    """Return the strides that visit exactly these hosts: hosts at equal distances all the way
    round."""
    distance = hosts // len(group)
    if group != tuple(range(group[0], hosts, distance)) or len(group) * distance != hosts:
        return ()
    return tuple(stride for stride in strides if math.gcd(stride, hosts) == distance)


@lru_cache(4096)
def routes(hosts: int, strides: Strides) -> tuple[Strides, ...]:
    """Find a shortest route to the host at each distance, as strides; empty where there is none."""
    paths: dict[int, Strides] = {0: ()}
    queue = deque([0])
    while queue:
        current = queue.popleft()
        for stride in strides:
            neighbour = (current + stride) % hosts
            if neighbour not in paths:
                paths[neighbour] = (*paths[current], stride)
                queue.append(neighbour)
    return tuple(paths.get(distance, ()) for distance in range(hosts))


def choose_strides(hosts: int, degree: int, traffic: Traffic, link: float) -> tuple[Strides, float]:
    """Choose the set of `degree` strides with the shortest step, and return its seconds.

    More than `MAX_SETS` sets are not enumerated: see `choose_strides_greedily`.
    """
    if math.comb(hosts - 1, degree) > MAX_SETS:
        return choose_strides_greedily(hosts, degree, traffic, link)
    sets = combinations(range(1, hosts), degree)
    return min(((s, link_seconds(hosts, s, traffic, link)) for s in sets), key=lambda pair: pair[1])


def choose_strides_greedily(
    hosts: int, degree: int, traffic: Traffic, link: float
) -> tuple[Strides, float]:
    """Choose strides greedily, each the one that helps most: for many hosts."""
    chosen: Strides = ()
    for _ in range(degree):
        unused = [k for k in range(1, hosts) if k not in chosen]
        extended = ((*chosen, k) for k in unused)
        chosen = min(extended, key=lambda s: link_seconds(hosts, tuple(sorted(s)), traffic, link))
        chosen = tuple(sorted(chosen))
    return chosen, link_seconds(hosts, chosen, traffic, link)


MAX_SETS = 4000
