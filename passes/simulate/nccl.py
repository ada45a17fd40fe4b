"""Time of collectives as NCCL chooses them: the quickest of its algorithms and protocols.

The model follows NCCL's own tuner (src/graph/tuning.cc of NCCL 2.28, NVIDIA): each algorithm with
each protocol takes its latency, and bytes over bandwidth.  The bandwidth of a ring is given, as
measured, in place of NCCL's search for channels; the tuner's corrections of trees at medium sizes
are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

# -- ranks and links -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fabric:
    """Bandwidths of links, in bytes a second that are reached.

    link      of a rank within its node
    network   of a rank to other nodes
    low       maximum of the low-latency protocol within a node
    reducing  of a reduction by the node's switch; 0 where it has none
    plateau   how much longer a ring over nodes takes to start once its chunks are full
    """

    link: float
    network: float
    low: float
    reducing: float = 0.0
    plateau: float = 1.0

    def ring(self, ranks: Ranks) -> float:
        """Return the bandwidth of a ring: it leaves each node over as many links as the smallest
        has ranks."""
        if ranks.nodes == 1:
            return self.link
        return min(self.link, self.network * ranks.each)


@dataclass(frozen=True)
class Ranks:
    """Ranks of a collective: how many, on how many nodes, and the fewest of them on one node."""

    count: int
    nodes: int = 1
    each: int = 1


# seconds of each protocol (low, low128, simple): before the first byte, and of each step within
# and between nodes
BASE_LATENCY = {"tree": (6.8e-6, 14e-6, 8.4e-6), "ring": (6.6e-6, 14e-6, 8.4e-6)}
STEP_WITHIN = {"tree": (0.6e-6, 1.25e-6, 4e-6), "ring": (0.6e-6, 1.9e-6, 3.4e-6)}
STEP_BETWEEN = {"tree": (5e-6, 8.5e-6, 14e-6), "ring": (2.7e-6, 4e-6, 14e-6)}
MIN_RING_STEP = (1e-6, 1e-6, 3e-6)  # minimal seconds of a step of a ring over nodes
LOW_NETWORK_RATE = 20.4e9  # bytes a second, maximum of the low-latency protocol over nodes
SWITCH, SWITCH_FAR = 25e-6, 18e-6  # seconds before a switch reduces, and of a step between nodes
SWITCH_MIN_RANKS = 4  # up to so many ranks a switch is no quicker than a ring (NVIDIA/nccl #1455)
FULL_CHUNK = 64 * 16  # bytes of each rank from which a ring's chunks are full, on 16 channels


# -- collectives -----------------------------------------------------------------------------------


def collective_seconds(op: str, size: float, ranks: Ranks, fabric: Fabric) -> float:
    """Seconds of a collective, or of one message.

    `size` is that of the full tensor: the result of an all_gather, the input of a reduce_scatter,
    all that one rank sends in an all_to_all.  An operation of another name counts as a broadcast.
    """
    if ranks.count < 2:
        return 0.0
    if op == "send":
        return _message(size, 1.0, ranks, fabric)
    if op == "all_to_all":
        return _exchange(size, ranks, fabric)
    return min(_algorithms(op, size, ranks, fabric))


def _algorithms(op: str, size: float, ranks: Ranks, fabric: Fabric) -> Iterator[float]:
    yield from _rings(op, size, ranks, fabric)
    if op == "all_reduce":
        yield from _trees(size, ranks, fabric)
        if fabric.reducing and ranks.each > SWITCH_MIN_RANKS:
            yield _switch(size, ranks, fabric)


def _rings(op: str, size: float, ranks: Ranks, fabric: Fabric) -> Iterator[float]:
    """Yield the seconds of rings, with each protocol: data goes around once or twice."""
    n, nodes = ranks.count, ranks.nodes
    steps, between_nodes = {
        "all_reduce": (2 * (n - 1), 2 * (nodes - 1)),
        "all_gather": (n - 1, nodes - 1),
        "reduce_scatter": (n - 1, nodes - 1),
    }.get(op, (n, nodes - 1))
    full = fabric.ring(ranks)
    low_rate = min(full / 2, fabric.low if nodes == 1 else LOW_NETWORK_RATE)
    for protocol, rate in enumerate((low_rate, full * 0.92, full)):
        step = STEP_WITHIN["ring"][protocol]
        if nodes > 1:
            step = max(step, MIN_RING_STEP[protocol])
        latency = (
            BASE_LATENCY["ring"][protocol]
            + (steps - between_nodes) * step
            + between_nodes * _between("ring", ranks)[protocol]
        )
        if op == "all_reduce" and nodes > 1 and protocol == 2 and size / n >= FULL_CHUNK:
            latency *= fabric.plateau
        yield latency + size * steps / n / rate


def _trees(size: float, ranks: Ranks, fabric: Fabric) -> Iterator[float]:
    """Yield the seconds of two trees over nodes, up and down, with chains within a node."""
    full_rate = fabric.ring(ranks) * 0.92
    low_rate = min(full_rate / 3.8, fabric.low if ranks.nodes == 1 else LOW_NETWORK_RATE)
    middle_rate = full_rate * (7 / 9 if ranks.nodes == 1 else 120 / 128)
    inside = math.ceil(ranks.count / ranks.nodes) - 1
    depth = math.floor(math.log2(ranks.nodes))
    for protocol, rate in enumerate((low_rate, middle_rate, full_rate)):
        steps = inside * STEP_WITHIN["tree"][protocol] + depth * _between("tree", ranks)[protocol]
        yield BASE_LATENCY["tree"][protocol] + 2 * steps + 2 * size / rate


def _between(kind: str, ranks: Ranks) -> tuple[float, float, float]:
    """Return the seconds of a step between nodes; with one rank in each nothing hides it."""
    return STEP_BETWEEN["tree" if ranks.count == ranks.nodes else kind]


def _switch(size: float, ranks: Ranks, fabric: Fabric) -> float:
    """Seconds with switches that reduce within nodes, and a tree over nodes; two nodes just
    exchange."""
    if ranks.nodes == 1:
        return SWITCH + size / fabric.reducing
    network_rate = fabric.network * ranks.each / (1 if ranks.nodes == 2 else 2)
    depth = math.floor(math.log2(ranks.nodes))
    return SWITCH + 2 * depth * SWITCH_FAR + size / min(fabric.reducing, network_rate)


# -- messages --------------------------------------------------------------------------------------


def _message(size: float, share: float, ranks: Ranks, fabric: Fabric) -> float:
    """Seconds of one message to a neighbour, with the simple protocol."""
    is_remote = ranks.nodes > 1
    step = STEP_BETWEEN["tree"][2] if is_remote else STEP_WITHIN["ring"][2]
    return (
        BASE_LATENCY["ring"][2]
        + step
        + size * share / (fabric.network if is_remote else fabric.link)
    )


def _exchange(size: float, ranks: Ranks, fabric: Fabric) -> float:
    """Seconds of an all-to-all; each rank has its own network link."""
    local = _message(size, (ranks.each - 1) / ranks.count, Ranks(2), fabric)
    if ranks.nodes == 1:
        return local
    # peers take turns by nodes: each turn has the start of a message
    turn_seconds = (ranks.nodes - 1) * STEP_WITHIN["ring"][2]
    remote = _message(size, (ranks.count - ranks.each) / ranks.count, Ranks(2, 2), fabric)
    return max(local, remote) + turn_seconds
