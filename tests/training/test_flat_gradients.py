"""Flat gradients: one tensor for all gradients of a sum, kept from step to step; cost beside
torch."""

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


def make_parameters(*names: str) -> LocalParameters:
    """Return parameters of two numbers each."""
    return LocalParameters({name: nn.Parameter(torch.ones(2)) for name in names})


def test_who_gets_no_gradient_has_none() -> None:
    """An unused parameter has no gradient; a gradient of zeros is one."""
    params = make_parameters("used", "zero", "unused")
    gradients = FlatGradients(list(params.values()))
    for _ in range(2):
        gradients.zero()
        (3 * params["used"] + 0 * params["zero"]).sum().backward()
        gradients.drop_unwritten()
        assert params["used"].grad is not None and params["used"].grad.tolist() == [3, 3]
        assert params["zero"].grad is not None and params["zero"].grad.tolist() == [0, 0]
        assert params["unused"].grad is None
        assert gradients.collect().tolist() == [3, 3, 0, 0, 0, 0, 1, 1, 0]


def test_gradients_lie_where_they_lay() -> None:
    """A step allocates no memory for gradients, and copies in those that a user assigned."""
    params = make_parameters("a", "b")
    gradients = FlatGradients(list(params.values()))
    gradients.zero()
    address = gradients.collect().data_ptr()
    gradients.zero()
    (params["a"] + params["b"]).sum().backward()
    params["b"].grad = torch.tensor([5.0, 6.0])
    assert (
        gradients.collect().tolist() == [1, 1, 5, 6, 1, 1]
        and gradients.collect().data_ptr() == address
    )
    assert gradients.is_in_place()


def test_one_tensor_for_each_sum_of_replicas() -> None:
    """Parameters with a second sum have no flat tensor in it; the first sum has one."""
    params = make_parameters("a", "b", "c")
    group = Group(("dp",), (0, 1), 0)
    sums = [
        GradientReduction(group, ("b",), "tied"),
        GradientReduction(group, ("a", "b", "c"), "replicas"),
    ]
    params.flatten(sums)
    (bucket,) = params.buckets(("a", "b", "c"), None)
    assert isinstance(bucket, FlatGradients) and bucket.parameters == list(params.values())
    assert params.buckets(("b",), None) == [[params["b"]]]


@pytest.mark.parametrize("most", [8, 16, 24, 32, 40, None])
def test_ranks_of_one_sum_have_the_same_buckets(
    most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two stages share tied parameters beside their own ones; both send equal buckets."""
    monkeypatch.setattr(gradient, "BUCKET_BYTES", most or gradient.BUCKET_BYTES)
    tied, sent = ("a", "b", "c"), []
    for names in (("x", *tied), (*tied, "y", "z"), ("x", "y", *tied, "z")):
        params = make_parameters(*names)
        group = Group(("pp",), (0, 1), 0)
        params.flatten(
            [GradientReduction(group, tied, "tied"), GradientReduction(group, names, "replicas")]
        )
        buckets = [
            bucket.parameters if isinstance(bucket, FlatGradients) else bucket
            for bucket in params.buckets(tied, None)
        ]
        sent.append(
            [[name for name in names if any(params[name] is p for p in b)] for b in buckets]
        )
    assert sent[0] == sent[1] == sent[2]


def sum_on_rank(rank: int) -> list[list[float] | None]:
    """Train two steps where both ranks, the first, the second, and no rank use a parameter."""
    params = make_parameters("both", "first", "second", "none")
    group = Group(("dp",), (0, 1), rank, dist.group.WORLD)
    sums = [GradientReduction(group, tuple(params), "replicas")]
    params.flatten(sums)
    for _ in range(2):
        params.zero()
        (params["both"] * (rank + 1) + params["second" if rank else "first"] * 10).sum().backward()
        sum_gradients(params, sums)
    return [None if p.grad is None else p.grad.tolist() for p in params.values()]


def test_sums_of_what_some_ranks_have() -> None:
    """A gradient of one rank reaches all; a gradient that no rank has stays None."""
    for gradients in run_ranks(2, sum_on_rank):
        assert gradients == [[3, 3], [10, 10], [10, 10], None]


@pytest.mark.parametrize("row", ["one", "overlapped", "dp", "1f1b", "tp", "overlapped-dropout"])
def test_a_step_costs_what_it_does_by_hand(pool: Pool, row: str) -> None:
    """At most 10% more Python calls than hand-written torch, no more collectives, and no more
    tensor bytes on the fullest rank, between steps or at their peak."""
    sizes: Any = steps.ROWS[row].fitted(steps.Sizes())
    wider = 0 if unavailable() else 1  # bytes are counted by compiled code
    measured = pool.run(steps.measure_row, sizes.ranks, row, sizes, 0, wider)
    cost, peer = steps.fullest_rank(measured)
    assert cost.calls <= 1.1 * peer.calls, (cost, peer)
    assert cost.collectives <= peer.collectives, (cost, peer)
    assert cost.live <= peer.live, (cost, peer)
    assert cost.peak <= peer.peak, (cost, peer)
    assert not wider or 0 < peer.live < peer.peak


@pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "it is there")
def test_bytes_of_tensors_are_counted() -> None:
    """Live bytes, their peak, and bytes that other threads free."""
    counted = Allocated()
    initial = counted.now()
    tensors = [torch.ones(1000, dtype=torch.float64) for _ in range(3)]
    assert counted.now() - initial == 24_000
    counted.anew()
    thread = threading.Thread(target=tensors.clear)
    thread.start()
    thread.join()
    assert counted.now() == initial and counted.peak() - initial == 24_000
    counted.anew()
    result = torch.ones(500) + 1
    assert counted.peak() - initial >= 4_000 > counted.now() - initial == result.nbytes
