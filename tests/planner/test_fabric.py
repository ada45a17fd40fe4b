"""Direct-connect fabrics: TopoOpt's way beside every fabric of eight nodes."""

from __future__ import annotations

from math import gcd

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlang.passes.planner.fabric import Demand, Fabric, all_fabrics, spread, strides, topology

NODES = 8


def _demand(summed: float, pairs: dict[tuple[int, int], float]) -> Demand:
    sent = np.zeros((NODES, NODES))
    for ends, size in pairs.items():
        sent[ends] = size
    return Demand(summed, sent)


RING = {(k, (k + 1) % NODES): 4.0 for k in range(NODES)}  # a pipeline's sends
HALVES = {(k, (k + 4) % NODES): 8.0 for k in range(NODES)}
HOT = {(0, 5): 40.0, (5, 0): 40.0, (2, 7): 30.0}
ALL = {(a, b): 1.0 for a in range(NODES) for b in range(NODES) if a != b}  # experts


@pytest.mark.parametrize("pairs", [RING, HALVES, HOT, ALL], ids=["ring", "halves", "hot", "all"])
@pytest.mark.parametrize("summed", [0.0, 10.0, 1000.0])
def test_beside_every_fabric(summed: float, pairs: dict[tuple[int, int], float]) -> None:
    """With two ports at each of 8 nodes, beside all 531 fabrics of rings and perfect matchings:
    as quick as the quickest; where all send to all and nothing is summed within a quarter."""
    demand = _demand(summed, pairs)
    best = min(one.seconds(demand, 1.0) for one in all_fabrics(NODES, 2))
    found = topology(demand, 2, 1.0).seconds(demand, 1.0)
    assert best <= found <= best * (1.25 if pairs is ALL and not summed else 1)


def test_three_ports() -> None:
    """Ports are divided between a sum and a hot pair; of 6 nodes no fabric of 3 ports is better."""
    sent = np.zeros((6, 6))
    sent[0, 3] = sent[3, 0] = sent[1, 5] = 50.0
    demand = Demand(60.0, sent)
    found = topology(demand, 3, 1.0)
    assert found.rings and found.pairs
    best = min(one.seconds(demand, 1.0) for one in all_fabrics(6, 3))
    assert found.seconds(demand, 1.0) <= 1.2 * best


@given(st.integers(2, 40))
def test_every_stride_visits_all_nodes(nodes: int) -> None:
    """A ring of each stride goes through all nodes once, and no other stride does."""
    for step in range(1, nodes):
        visited = {k * step % nodes for k in range(nodes)}
        assert (len(visited) == nodes) == (step in strides(nodes)) == (gcd(step, nodes) == 1)


@settings(deadline=None)
@given(st.integers(3, 24), st.integers(1, 4), st.floats(1, 1e9))
def test_sums_alone(nodes: int, degree: int, size: float) -> None:
    """Rings share a sum: the closed form of a ring, over the number of rings."""
    demand = Demand(size, np.zeros((nodes, nodes)))
    made = Fabric(nodes, spread(strides(nodes), degree), ())
    ring = 2 * size * (nodes - 1) / nodes
    assert made.seconds(demand, 2.0) == pytest.approx(ring / len(made.rings) / 2.0)
    assert topology(demand, degree, 2.0).seconds(demand, 2.0) <= made.seconds(demand, 2.0) * 1.0001


def test_who_is_cut_off() -> None:
    """A demand that no way serves takes for ever."""
    apart = Fabric(4, (), (((0, 1), (2, 3)),))
    demand = Demand(0.0, np.eye(4)[[2, 3, 0, 1]])
    assert apart.seconds(demand, 1.0) == float("inf")
    assert Fabric(4, (1,), ()).seconds(demand, 1.0) == 2.0
