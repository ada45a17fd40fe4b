"""Direct-connect fabrics beside a plan: rings by strides, routes, and plans that suit each other.

TopoOpt (Wang et al., NSDI 2023) wires each host to `degree` others.  An all-reduce may go round any
ring over the hosts, so rings are chosen whose strides carry the other messages well too: a stride
that has no factor in common with the number of hosts makes a ring (TotientPerms).

* The traffic of a plan between hosts.
* Strides, and what a set of them makes of the traffic.
* The best set, by all of them or by one after the other.
* Plan and fabric in turns.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations
from typing import TYPE_CHECKING, Generic, TypeVar

from schedlang.passes.simulate.machine import SHARES

if TYPE_CHECKING:
    from schedlang.ir.plan import Plan as Rows
    from schedlang.passes.simulate.traffic import Collective

Strides = tuple[int, ...]
Messages = Mapping[tuple[int, int], float]  # bytes from a host to another


@dataclass(frozen=True)
class Traffic:
    """Bytes of a step: `reduced` by an all-reduce over all hosts, messages between pairs, and what
    each link of a ring over some hosts carries, in whatever order it goes round."""

    reduced: float
    messages: Messages
    rings: Mapping[tuple[int, ...], float] = field(default_factory=dict)


def traffic_of(plan: Rows, sent: Iterable[Collective], host: Callable[[int], int]) -> Traffic:
    """Bytes that an account's collectives send between hosts.

    A group of ranks goes round the hosts that it lies on once, a ring of ranks likewise; all to
    all is a message from each rank to each, and so is what stages hand on.
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
                known = SHARES.get(one.kind.replace("-", "_"))
                rings[tuple(sorted(on))] += one.total * (known(len(ranks))[1] if known else 1)
    return Traffic(0.0, {(a, b): much for (a, b), much in messages.items()}, dict(rings))


def _groups(plan: Rows, one: Collective) -> Iterator[tuple[int, ...]]:
    """The ranks of each group that joins in a collective; the ends of each message of a stage."""
    mesh, axis = plan.mesh, plan.cuts[0].axis if plan.cuts else ""
    for ranks in mesh.groups(one.axes):
        at = {rank: mesh.coordinates(rank).get(axis, 0) for rank in ranks}
        if one.kind == "send" and one.to is not None:
            own = {place: rank for rank, place in at.items()}
            yield from ((own[place], own[one.to]) for place in one.places or ())
        else:
            yield tuple(rank for rank in ranks if one.places is None or at[rank] in one.places)


def strides(hosts: int) -> Strides:
    """Strides that make one ring of so many hosts: those with no factor in common with them."""
    return tuple(k for k in range(1, hosts) if math.gcd(k, hosts) == 1)


def seconds(hosts: int, chosen: Strides, traffic: Traffic, link: float) -> float:
    """Seconds of the fullest link: rings are dealt out to all strides that go round their hosts,
    messages take the shortest ways, as do rings that no stride goes round.

    A host has one link of `link` bytes a second for each stride.  Infinite where hosts do not reach
    each other.
    """
    if math.gcd(hosts, *chosen) > 1:
        return math.inf
    load = {(host, stride): 0.0 for host in range(hosts) for stride in chosen}
    messages, rings = defaultdict(float, traffic.messages), defaultdict(float, traffic.rings)
    rings[tuple(range(hosts))] += 2 * (hosts - 1) / hosts * traffic.reduced
    for group, size in rings.items():
        around = ringed(hosts, chosen, group)
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


def ringed(hosts: int, chosen: Strides, group: tuple[int, ...]) -> Strides:
    """The strides that go round just these hosts: as far apart from each other, all the way."""
    apart = hosts // len(group)
    if group != tuple(range(group[0], hosts, apart)) or len(group) * apart != hosts:
        return ()
    return tuple(stride for stride in chosen if math.gcd(stride, hosts) == apart)


@lru_cache(4096)
def routes(hosts: int, chosen: Strides) -> tuple[Strides, ...]:
    """A shortest way to the host at each distance, as strides; the first found, in their order;
    none where there is no way."""
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


def wired(hosts: int, degree: int, traffic: Traffic, link: float) -> tuple[Strides, float]:
    """The strides whose step is shortest, of all sets of so many, with its seconds; of more than
    `SETS` sets as `wired_in_turn` finds them."""
    if math.comb(hosts - 1, degree) > SETS:
        return wired_in_turn(hosts, degree, traffic, link)
    sets = combinations(range(1, hosts), degree)
    return min(((s, seconds(hosts, s, traffic, link)) for s in sets), key=lambda one: one[1])


def wired_in_turn(hosts: int, degree: int, traffic: Traffic, link: float) -> tuple[Strides, float]:
    """Strides chosen one after the other, each the one that helps most: for many hosts."""
    chosen: Strides = ()
    for _ in range(degree):
        left = [k for k in range(1, hosts) if k not in chosen]
        more = ((*chosen, k) for k in left)
        chosen = min(more, key=lambda s: seconds(hosts, tuple(sorted(s)), traffic, link))
        chosen = tuple(sorted(chosen))
    return chosen, seconds(hosts, chosen, traffic, link)


SETS = 4000

# -- plans -----------------------------------------------------------------------------------------

Plan = TypeVar("Plan")


@dataclass(frozen=True)
class Wired(Generic[Plan]):
    """A plan and the fabric for it; `turns` are the seconds after each turn, which never rise."""

    plan: Plan
    strides: Strides
    turns: tuple[float, ...]


def in_turns(
    hosts: int,
    degree: int,
    link: float,
    plans: Sequence[tuple[Plan, float, Traffic]],
    wire: Callable[..., tuple[Strides, float]] = wired,
) -> Wired[Plan]:
    """Choose the plan for the fabric, then the fabric for the plan, until neither is better.

    plans  with seconds of computing, and the traffic of each
    The first turn is on the fabric that suits the first plan.  What is found is the best in either
    direction, and need not be the best of all pairs.
    """
    chosen, _ = wire(hosts, degree, plans[0][2], link)
    turns: list[float] = []
    while True:
        plan, computing, traffic = min(
            plans, key=lambda one: one[1] + seconds(hosts, chosen, one[2], link)
        )
        again, sent = wire(hosts, degree, traffic, link)
        before = seconds(hosts, chosen, traffic, link)
        if sent < before:
            chosen = again
        turns.append(computing + min(sent, before))
        if len(turns) > 1 and turns[-1] >= turns[-2]:
            return Wired(plan, chosen, tuple(turns))
