"""Orders of sequence slices, Seq1F1B and TeraPipe: their order, bubbles and activations."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest

from schedlang.pipeline.cost import Cost
from schedlang.pipeline.schedules import OrderError, checked_size, find_order, make_order
from schedlang.pipeline.timeline.memory import peak_activations
from schedlang.pipeline.timeline.proof import check_timeline, with_transfers
from schedlang.pipeline.timeline.simulation import simulate_timeline
from schedlang.pipeline.timeline.table import Kind


@pytest.mark.parametrize("name", ["Seq1F1B", "TeraPipe"])
@pytest.mark.parametrize("slices", [1, 2, 3, 8])
def test_sliced_orders(name: str, slices: int) -> None:
    """Every size has the closed form's idle time and activations, exactly, and ends."""
    cost = Cost(Fraction(3), Fraction(2), Fraction(5, 3))
    for ranks in (1, 2, 3, 4, 8):
        for micro in (1, 2, 3, 5, 8):
            size = checked_size(find_order(name), ranks, micro, slices=slices, cost=cost)
            t = find_order(name).make(size)
            check_timeline(with_transfers(t))
            idle = simulate_timeline(t, cost).makespan - micro * (cost.f + cost.i + cost.w)
            assert idle == find_order(name).bubble(size)
            assert peak_activations(t).max() == find_order(name).peak(size)


@pytest.mark.parametrize("name", ["Seq1F1B", "TeraPipe"])
def test_slices_in_order_and_reverse(name: str) -> None:
    """On every rank slices of a microbatch go forward in order and back in reverse, each once."""
    t = make_order(name, 4, 3, slices=4)
    for rank in range(4):
        rows = t.rows(rank)
        for microbatch in range(3):
            for kind, parts in ((Kind.F, [0, 1, 2, 3]), (Kind.B, [3, 2, 1, 0])):
                ops = [op for op in rows if op.kind is kind and op.microbatch == microbatch]
                assert [op.slice for op in ops] == parts
        assert set(Counter(rows).values()) == {1} and len(rows) == 2 * 3 * 4


def test_one_slice_is_the_old_order() -> None:
    """Seq1F1B with one slice is 1F1B, operation by operation."""
    for ranks, micro in ((1, 3), (2, 4), (4, 8), (4, 2)):
        assert make_order("Seq1F1B", ranks, micro) == make_order("1F1B", ranks, micro)


def test_orders_that_do_not_slice() -> None:
    """Slices under another order are refused with the orders that cut sequences."""
    with pytest.raises(OrderError, match="Seq1F1B, TeraPipe"):
        make_order("1F1B", 2, 4, slices=2)
