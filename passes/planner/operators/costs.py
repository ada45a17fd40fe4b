"""Seconds of operators and of what ranks send each other, as the solver asks for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from schedlang.passes.planner.values import Kind
from schedlang.passes.simulate.machine import Cluster


class Costs(Protocol):
    """What operators and collectives take; a cluster that knows both is one."""

    def operator(self, kind: Kind, flops: float, moved: float) -> float:
        """Seconds of one operator of so many operations, that reads and writes so many bytes."""
        ...

    def collective(self, op: str, size: float, ranks: int, stride: int) -> float:
        """Seconds of one collective on a whole tensor of `size` bytes, ranks `stride` apart."""
        ...


@dataclass(frozen=True)
class Sheet:
    """A cluster by its data sheet: rooflines, and rings at full bandwidth."""

    cluster: Cluster

    def operator(self, kind: Kind, flops: float, moved: float) -> float:
        """Return the roofline's seconds (Williams et al. 2009)."""
        return max(flops / self.cluster.speed, moved / self.cluster.stream)

    def collective(self, op: str, size: float, ranks: int, stride: int) -> float:
        """Return the seconds of a ring (Thakur et al. 2005); of all_to_all each sends its part."""
        one = self.cluster
        near = ranks * stride <= one.node
        speed = one.link if near else min(one.link, one.network * max(1, one.node // stride))
        if op == "send":
            return size / speed
        share = (ranks - 1) / ranks
        rounds = {"all_reduce": 2 * share, "all_to_all": share / ranks}.get(op, share)
        return rounds * size / speed


def costs_of(cluster: Cluster) -> Costs:
    """Return the cluster itself where it tells what operators and collectives take."""
    known = hasattr(cluster, "operator") and hasattr(cluster, "collective")
    return cluster if known else Sheet(cluster)  # type: ignore[return-value]
