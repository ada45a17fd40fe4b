"""A cluster as a data sheet has it: what ranks compute and hold, and what lies between them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from schedlang.runtime.storage.footprint import Message, Work

GIB = 2**30


@dataclass(frozen=True)
class Cluster:
    """Ranks that are all alike, `node` of them in each node, numbered node by node.

    speed    floating-point operations a second, in 16 bits
    stream   bytes a second between a rank and its own memory
    link     bytes a second that a rank sends within its node, and as many receives
    network  the same to other nodes
    memory   bytes of a rank
    """

    name: str
    speed: float
    stream: float
    link: float
    network: float
    node: int
    memory: int

    # -- time ----------------------------------------------------------------------------------

    def computing(self, work: Work) -> float:
        """Seconds of operators one after the other, each bound by operations or by bytes.

        The roofline of Williams et al. 2009: what is reached at best.
        """
        return sum(
            often * max(flops / self.speed, moved / self.stream)
            for (flops, moved), often in work.operators.items()
        )

    def sending(self, message: Message) -> float:
        """Seconds of one collective or message at full bandwidth, its latency left out.

        Collectives send as rings do, which is the least there is for large tensors (Patarasuk and
        Yuan 2009).
        """
        if message.ends is not None:
            return message.bytes / self.bandwidth(message.ends)
        ranks = len(message.ranks)
        if ranks < 2:
            return 0.0
        share = SHARES[message.op](ranks) if message.op in SHARES else 1.0
        return share * message.bytes / self.bandwidth(message.ranks)

    def bandwidth(self, ranks: Sequence[int]) -> float:
        """Bytes a second along a ring of these ranks.

        Where it crosses nodes every rank of a node has its own way out, and as many rings run as
        the node with fewest has ranks.
        """
        nodes = Counter(rank // self.node for rank in ranks)
        if len(nodes) == 1:
            return self.link
        return min(self.link, self.network * min(nodes.values()))


# of the whole tensor, what one rank sends
SHARES: Final[Mapping[str, Callable[[int], float]]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
}

# data sheets of NVIDIA: dense 16-bit tensor cores, HBM, NVLink one way; the network is that of
# their DGX systems, one adapter for each GPU
CLUSTERS = {
    one.name: one
    for one in (
        Cluster("v100", 125e12, 900e9, 150e9, 6.25e9, 8, 32 * GIB),
        Cluster("a100", 312e12, 2039e9, 300e9, 25e9, 8, 80 * GIB),
        Cluster("h100", 989e12, 3350e9, 450e9, 50e9, 8, 80 * GIB),
        Cluster("h200", 989e12, 4800e9, 450e9, 50e9, 8, 140 * GIB),
    )
}


def named(device: str | None) -> tuple[Cluster | None, int | None]:
    """The cluster and the ranks of `a100x64`; None for what is not known of it."""
    found = re.fullmatch(r"(?P<name>.*?)(x(?P<ranks>\d+))?", device or "")
    assert found is not None
    ranks = found["ranks"]
    return CLUSTERS.get(found["name"].lower()), int(ranks) if ranks else None


def changed(cluster: Cluster, **given: float | None) -> Cluster:
    """The same with other figures, where there are some."""
    mine = {name: value for name, value in given.items() if value is not None}
    return replace(cluster, **mine)  # type: ignore[arg-type]
