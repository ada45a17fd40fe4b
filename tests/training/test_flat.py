"""Tests of gradients that lie together from step to step, and of what a step costs beside torch."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from schedlang.runtime.comm.collectives import Group
from schedlang.runtime.grad_reduction import gradient
from schedlang.runtime.grad_reduction.gradient import (
    FlatGradients,
    GradientReduction,
    LocalParameters,
    sum_gradients,
)
from schedlang.runtime.launch.pool import Pool
from schedlang.testing.accelerator import unavailable
from tests.benchmarks import steps
from tests.benchmarks.allocated import Allocated
from tests.ranks import run_ranks


def parameters(*names: str) -> LocalParameters:
    """Each of two numbers."""
    return LocalParameters({name: nn.Parameter(torch.ones(2)) for name in names})


def test_who_gets_no_gradient_has_none() -> None:
    """Zeros to add to are no gradient; a gradient of zeros is one."""
    held = parameters("used", "zero", "unused")
    one = FlatGradients(list(held.values()))
    for _ in range(2):
        one.zero()
        (3 * held["used"] + 0 * held["zero"]).sum().backward()
        one.drop_unwritten()
        assert held["used"].grad is not None and held["used"].grad.tolist() == [3, 3]
        assert held["zero"].grad is not None and held["zero"].grad.tolist() == [0, 0]
        assert held["unused"].grad is None
        assert one.collect().tolist() == [3, 3, 0, 0, 0, 0, 1, 1, 0]


def test_gradients_lie_where_they_lay() -> None:
    """A step makes no memory for gradients, and takes over what others put in their place."""
    held = parameters("a", "b")
    one = FlatGradients(list(held.values()))
    one.zero()
    before = one.collect().data_ptr()
    one.zero()
    (held["a"] + held["b"]).sum().backward()
    held["b"].grad = torch.tensor([5.0, 6.0])
    assert one.collect().tolist() == [1, 1, 5, 6, 1, 1] and one.collect().data_ptr() == before
    assert one.is_in_place()


def test_one_tensor_for_each_sum_of_replicas() -> None:
    """What is summed over others as well is put together for that; the rest of its sum is not."""
    held = parameters("a", "b", "c")
    group = Group(("dp",), (0, 1), 0)
    sums = [
        GradientReduction(group, ("b",), "tied"),
        GradientReduction(group, ("a", "b", "c"), "replicas"),
    ]
    held.flatten(sums)
    (one,) = held.buckets(("a", "b", "c"), None)
    assert isinstance(one, FlatGradients) and one.parameters == list(held.values())
    assert held.buckets(("b",), None) == [[held["b"]]]


@pytest.mark.parametrize("most", [8, 16, 24, 32, 40, None])
def test_ranks_of_one_sum_have_the_same_buckets(
    most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two stages share tied parameters, and lay them together with others of their own: what they
    send each other is cut in the same places all the same."""
    monkeypatch.setattr(gradient, "BUCKET_BYTES", most or gradient.BUCKET_BYTES)
    tied, sent = ("a", "b", "c"), []
    for own in (("x", *tied), (*tied, "y", "z"), ("x", "y", *tied, "z")):
        held = parameters(*own)
        group = Group(("pp",), (0, 1), 0)
        held.flatten(
            [GradientReduction(group, tied, "tied"), GradientReduction(group, own, "replicas")]
        )
        found = [
            one.parameters if isinstance(one, FlatGradients) else one
            for one in held.buckets(tied, None)
        ]
        sent.append([[name for name in own if any(held[name] is p for p in b)] for b in found])
    assert sent[0] == sent[1] == sent[2]


def _summed(rank: int) -> list[list[float] | None]:
    """Two steps of parameters that both ranks, the first, the second, and no rank use."""
    held = parameters("both", "first", "second", "none")
    group = Group(("dp",), (0, 1), rank, dist.group.WORLD)
    sums = [GradientReduction(group, tuple(held), "replicas")]
    held.flatten(sums)
    for _ in range(2):
        held.zero()
        (held["both"] * (rank + 1) + held["second" if rank else "first"] * 10).sum().backward()
        sum_gradients(held, sums)
    return [None if p.grad is None else p.grad.tolist() for p in held.values()]


def test_sums_of_what_some_ranks_have() -> None:
    """A gradient of one rank alone comes to all; what no rank has nobody gets."""
    for found in run_ranks(2, _summed):
        assert found == [[3, 3], [10, 10], [10, 10], None]


@pytest.mark.parametrize("row", ["one", "overlapped", "dp", "1f1b", "tp", "overlapped-dropout"])
def test_a_step_costs_what_it_does_by_hand(pool: Pool, row: str) -> None:
    """A tenth more calls of Python than hand-written torch at most, no more collectives, and on the
    fullest rank no more bytes of tensors, between steps or at their peak."""
    sizes: Any = steps.ROWS[row].fitted(steps.Sizes())
    wider = 0 if unavailable() else 1  # bytes are counted by compiled code
    found = pool.run(steps.measured, sizes.ranks, row, sizes, 0, wider)
    ours, peer = steps.fullest(found)
    assert ours.calls <= 1.1 * peer.calls, (ours, peer)
    assert ours.collectives <= peer.collectives, (ours, peer)
    assert ours.live <= peer.live, (ours, peer)
    assert ours.peak <= peer.peak, (ours, peer)
    assert not wider or 0 < peer.live < peer.peak


@pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "it is there")
def test_bytes_of_tensors_are_counted() -> None:
    """All that live, at most at once, and what is given back in whatever thread."""
    counted = Allocated()
    before = counted.now()
    held = [torch.ones(1000, dtype=torch.float64) for _ in range(3)]
    assert counted.now() - before == 24_000
    counted.anew()
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert counted.now() == before and counted.peak() - before == 24_000
    counted.anew()
    again = torch.ones(500) + 1
    assert counted.peak() - before >= 4_000 > counted.now() - before == again.nbytes
