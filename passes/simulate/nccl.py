"""Time of collectives as NCCL chooses them: the quickest of its algorithms and protocols.

The model is that of NCCL's own tuner (src/graph/tuning.cc of NCCL 2.28, NVIDIA), told anew: each
algorithm with each protocol takes its latency, and the bytes over what it moves in a second.  What
a ring moves is given, as measured, in place of NCCL's search for channels; the tuner's corrections
of trees at medium sizes are left out.

* How ranks lie, and what carries their messages.
* Collectives: rings, trees, sums by the switch.
* Messages: of one rank to another, of all to all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

# -- ranks and fabric ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fabric:
    """Carriers of messages, in bytes a second that are reached.

    link      of a rank within its node
    network   of a rank to other nodes
    low       most that the protocol of low latency moves within a node
    reducing  bytes a second of a sum that the node's switch makes; 0: it makes none
    plateau   how much longer a ring over nodes takes to start once its chunks are full
    """

    link: float
    network: float
    low: float
    reducing: float = 0.0
    plateau: float = 1.0

    def ring(self, ranks: Ranks) -> float:
        """Bytes a second along a ring: nodes are left by as many ways as the emptiest has ranks."""
        if ranks.nodes == 1:
            return self.link
        return min(self.link, self.network * ranks.each)


@dataclass(frozen=True)
class Ranks:
    """Ranks that meet: how many, on how many nodes, and of the node that has fewest how many."""

    count: int
    nodes: int = 1
    each: int = 1


# seconds of each protocol (low, low128, simple): before anything moves, and of each step within
# and between nodes
BASE = {"tree": (6.8e-6, 14e-6, 8.4e-6), "ring": (6.6e-6, 14e-6, 8.4e-6)}
WITHIN = {"tree": (0.6e-6, 1.25e-6, 4e-6), "ring": (0.6e-6, 1.9e-6, 3.4e-6)}
BETWEEN = {"tree": (5e-6, 8.5e-6, 14e-6), "ring": (2.7e-6, 4e-6, 14e-6)}
POST = (1e-6, 1e-6, 3e-6)  # of a step of a ring over nodes, at least
LOW_FAR = 20.4e9  # bytes a second, most that the protocol of low latency moves over nodes
SWITCH, SWITCH_FAR = 25e-6, 18e-6  # seconds before a switch sums, and of a step between nodes
FEW = 4  # ranks for which a switch sums no quicker than a ring (NVIDIA/nccl #1455)
FULL = 64 * 16  # bytes of each rank from which on a ring's chunks are full, on 16 channels


# -- collectives -----------------------------------------------------------------------------------


def seconds(op: str, size: float, ranks: Ranks, fabric: Fabric) -> float:
    """Seconds of a collective, or of one message.

    `size` is that of the whole tensor: what all have after an all_gather, what each has before a
    reduce_scatter and sends in an all_to_all.  An operation of another name counts as a broadcast.
    """
    if ranks.count < 2:
        return 0.0
    if op == "send":
        return _message(size, 1.0, ranks, fabric)
    if op == "all_to_all":
        return _exchange(size, ranks, fabric)
    return min(_ways(op, size, ranks, fabric))


def _ways(op: str, size: float, ranks: Ranks, fabric: Fabric) -> Iterator[float]:
    yield from _rings(op, size, ranks, fabric)
    if op == "all_reduce":
        yield from _trees(size, ranks, fabric)
        if fabric.reducing and ranks.each > FEW:
            yield _switch(size, ranks, fabric)


def _rings(op: str, size: float, ranks: Ranks, fabric: Fabric) -> Iterator[float]:
    """Each rank passes on what it was given, once or twice around."""
    n, nodes = ranks.count, ranks.nodes
    steps, far = {
        "all_reduce": (2 * (n - 1), 2 * (nodes - 1)),
        "all_gather": (n - 1, nodes - 1),
        "reduce_scatter": (n - 1, nodes - 1),
    }.get(op, (n, nodes - 1))
    full = fabric.ring(ranks)
    low = min(full / 2, fabric.low if nodes == 1 else LOW_FAR)
    for protocol, moved in enumerate((low, full * 0.92, full)):
        step = WITHIN["ring"][protocol]
        if nodes > 1:
            step = max(step, POST[protocol])
        latency = (
            BASE["ring"][protocol] + (steps - far) * step + far * _between("ring", ranks)[protocol]
        )
        if op == "all_reduce" and nodes > 1 and protocol == 2 and size / n >= FULL:
            latency *= fabric.plateau
        yield latency + size * steps / n / moved


def _trees(size: float, ranks: Ranks, fabric: Fabric) -> Iterator[float]:
    """Sums go up two trees over nodes and down again, in chains within a node."""
    full = fabric.ring(ranks) * 0.92
    low = min(full / 3.8, fabric.low if ranks.nodes == 1 else LOW_FAR)
    wide = full * (7 / 9 if ranks.nodes == 1 else 120 / 128)
    inside = math.ceil(ranks.count / ranks.nodes) - 1
    depth = math.floor(math.log2(ranks.nodes))
    for protocol, moved in enumerate((low, wide, full)):
        steps = inside * WITHIN["tree"][protocol] + depth * _between("tree", ranks)[protocol]
        yield BASE["tree"][protocol] + 2 * steps + 2 * size / moved


def _between(kind: str, ranks: Ranks) -> tuple[float, float, float]:
    """Seconds of a step between nodes; with one rank in each nothing hides it."""
    return BETWEEN["tree" if ranks.count == ranks.nodes else kind]


def _switch(size: float, ranks: Ranks, fabric: Fabric) -> float:
    """Switches sum within nodes, and a tree over nodes: two of them just exchange."""
    if ranks.nodes == 1:
        return SWITCH + size / fabric.reducing
    out = fabric.network * ranks.each / (1 if ranks.nodes == 2 else 2)
    depth = math.floor(math.log2(ranks.nodes))
    return SWITCH + 2 * depth * SWITCH_FAR + size / min(fabric.reducing, out)


# -- messages --------------------------------------------------------------------------------------


def _message(size: float, share: float, ranks: Ranks, fabric: Fabric) -> float:
    """One message to a neighbour, of the simple protocol."""
    far = ranks.nodes > 1
    step = BETWEEN["tree"][2] if far else WITHIN["ring"][2]
    return BASE["ring"][2] + step + size * share / (fabric.network if far else fabric.link)


def _exchange(size: float, ranks: Ranks, fabric: Fabric) -> float:
    """Every rank sends each other one its part; those of other nodes by its own way out."""
    inside = _message(size, (ranks.each - 1) / ranks.count, Ranks(2), fabric)
    if ranks.nodes == 1:
        return inside
    # peers take turns by nodes: each turn has the start of a message
    turns = (ranks.nodes - 1) * WITHIN["ring"][2]
    away = _message(size, (ranks.count - ranks.each) / ranks.count, Ranks(2, 2), fabric)
    return max(inside, away) + turns
