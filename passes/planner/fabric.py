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
    for one in sent:
        for ranks in _groups(plan, one):
            on = tuple(dict.fromkeys(map(host, ranks)))
            if len(on) < 2:
                continue
            if one.kind == "send" and one.to is not None:
                messages[on] += one.total
            elif one.kind == "all-to-all":
                for pair in ((host(a), host(b)) for a in ranks for b in ranks):
                    messages[pair] += one.total // len(ranks) * (pair[0] != pair[1])
            else:
                known = RING_COSTS.get(one.kind.replace("-", "_"))
                rings[tuple(sorted(on))] += one.total * (known(len(ranks))[1] if known else 1)
    return Traffic(0.0, {(a, b): much for (a, b), much in messages.items()}, dict(rings))


def _groups(plan: Plan, one: Collective) -> Iterator[tuple[int, ...]]:
    """Yield the ranks of each group of a collective; for sends of stages the two ends of each
    message."""
    mesh, axis = plan.mesh, plan.cuts[0].axis if plan.cuts else ""
    for ranks in mesh.groups(one.axes):
        at = {rank: mesh.coordinates(rank).get(axis, 0) for rank in ranks}
        if one.kind == "send" and one.to is not None:
            own = {place: rank for rank, place in at.items()}
            yield from ((own[place], own[one.to]) for place in one.places or ())
        else:
            yield tuple(rank for rank in ranks if one.places is None or at[rank] in one.places)


def ring_strides(hosts: int) -> Strides:
    """Return the strides that make one ring of all hosts: those without a common factor with
    `hosts`."""
    return tuple(k for k in range(1, hosts) if math.gcd(k, hosts) == 1)


def link_seconds(hosts: int, chosen: Strides, traffic: Traffic, link: float) -> float:
    """Seconds of the most loaded link.

    Rings are spread over all strides that visit exactly their hosts.  Messages take shortest
    routes, and so do rings that no stride fits.  A host has one link of `link` bytes a second for
    each stride.  Infinite where hosts cannot reach each other.
    """
    if math.gcd(hosts, *chosen) > 1:
        return math.inf
    load = {(host, stride): 0.0 for host in range(hosts) for stride in chosen}
    messages, rings = defaultdict(float, traffic.messages), defaultdict(float, traffic.rings)
    rings[tuple(range(hosts))] += 2 * (hosts - 1) / hosts * traffic.all_reduced
    for group, size in rings.items():
        around = strides_around(hosts, chosen, group)
        for stride in around:
            for host in group:
                load[host, stride] += size / len(around)
        for pair in () if around else zip(group, (*group[1:], group[0])):
            messages[pair] += size
    for (source, target), size in messages.items():
        at = source
        for stride in routes(hosts, chosen)[(target - source) % hosts]:
            load[at, stride] += size
            at = (at + stride) % hosts
    return max(load.values()) / link


def strides_around(hosts: int, chosen: Strides, group: tuple[int, ...]) -> Strides:
    """Return the strides that visit exactly these hosts: hosts at equal distances all the way
    round."""
    apart = hosts // len(group)
    if group != tuple(range(group[0], hosts, apart)) or len(group) * apart != hosts:
        return ()
    return tuple(stride for stride in chosen if math.gcd(stride, hosts) == apart)


@lru_cache(4096)
def routes(hosts: int, chosen: Strides) -> tuple[Strides, ...]:
    """Find a shortest route to the host at each distance, as strides; empty where there is none."""
    found: dict[int, Strides] = {0: ()}
    queue = deque([0])
    while queue:
        at = queue.popleft()
        for stride in chosen:
            there = (at + stride) % hosts
            if there not in found:
                found[there] = (*found[at], stride)
                queue.append(there)
    return tuple(found.get(distance, ()) for distance in range(hosts))


def choose_strides(hosts: int, degree: int, traffic: Traffic, link: float) -> tuple[Strides, float]:
    """Choose the set of `degree` strides with the shortest step, and return its seconds.

    More than `MAX_SETS` sets are not enumerated: see `choose_strides_greedily`.
    """
    if math.comb(hosts - 1, degree) > MAX_SETS:
        return choose_strides_greedily(hosts, degree, traffic, link)
    sets = combinations(range(1, hosts), degree)
    return min(((s, link_seconds(hosts, s, traffic, link)) for s in sets), key=lambda one: one[1])


def choose_strides_greedily(
    hosts: int, degree: int, traffic: Traffic, link: float
) -> tuple[Strides, float]:
    """Choose strides greedily, each the one that helps most: for many hosts."""
    chosen: Strides = ()
    for _ in range(degree):
        left = [k for k in range(1, hosts) if k not in chosen]
        more = ((*chosen, k) for k in left)
        chosen = min(more, key=lambda s: link_seconds(hosts, tuple(sorted(s)), traffic, link))
        chosen = tuple(sorted(chosen))
    return chosen, link_seconds(hosts, chosen, traffic, link)


MAX_SETS = 4000
