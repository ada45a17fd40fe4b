"""Direct-connect fabrics beside a plan: rings by strides, routes, and plans that suit each other.

TopoOpt (Wang et al., NSDI 2023) wires each host to `degree` others.  An all-reduce may go round any
ring over the hosts, so rings are chosen whose strides carry the other messages well too: a stride
that has no factor in common with the number of hosts makes a ring (TotientPerms).

* Strides, and what a set of them makes of the traffic.
* The best set, by all of them or by one after the other.
* Plan and fabric in turns.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Generic, TypeVar

Strides = tuple[int, ...]
Messages = Mapping[tuple[int, int], float]  # bytes from a host to another


@dataclass(frozen=True)
class Traffic:
    """Bytes of a step: `reduced` by an all-reduce over all hosts, and messages between pairs."""

    reduced: float
    messages: Messages


def strides(hosts: int) -> Strides:
    """Strides that make a ring over so many hosts: those with no factor in common with them."""
    return tuple(k for k in range(1, hosts) if math.gcd(k, hosts) == 1)


def seconds(hosts: int, chosen: Strides, traffic: Traffic, link: float) -> float:
    """Seconds of the fullest link: the all-reduce is dealt out to all rings, messages take the
    shortest ways.

    A host has one link of `link` bytes a second for each stride.
    """
    ring = 2 * (hosts - 1) / hosts * traffic.reduced / len(chosen)
    load = {(host, stride): ring for host in range(hosts) for stride in chosen}
    for (source, target), size in traffic.messages.items():
        at = source
        for stride in routes(hosts, chosen)[(target - source) % hosts]:
            load[at, stride] += size
            at = (at + stride) % hosts
    return max(load.values()) / link


@lru_cache(4096)
def routes(hosts: int, chosen: Strides) -> tuple[Strides, ...]:
    """A shortest way to the host at each distance, as strides; the first found, in their order."""
    found: dict[int, Strides] = {0: ()}
    queue = deque([0])
    while queue:
        at = queue.popleft()
        for stride in chosen:
            there = (at + stride) % hosts
            if there not in found:
                found[there] = (*found[at], stride)
                queue.append(there)
    return tuple(found[distance] for distance in range(hosts))


def wired(hosts: int, degree: int, traffic: Traffic, link: float) -> tuple[Strides, float]:
    """The strides whose step is shortest, of all sets of so many, with its seconds."""
    sets = combinations(strides(hosts), degree)
    return min(((s, seconds(hosts, s, traffic, link)) for s in sets), key=lambda one: one[1])


def wired_in_turn(hosts: int, degree: int, traffic: Traffic, link: float) -> tuple[Strides, float]:
    """Strides chosen one after the other, each the one that helps most: for many hosts."""
    chosen: Strides = ()
    for _ in range(degree):
        left = [k for k in strides(hosts) if k not in chosen]
        more = ((*chosen, k) for k in left)
        chosen = min(more, key=lambda s: seconds(hosts, tuple(sorted(s)), traffic, link))
        chosen = tuple(sorted(chosen))
    return chosen, seconds(hosts, chosen, traffic, link)


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
