"""Gradient buckets of a chosen size, summed during the backward: calls, bytes, results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.plan import Plan
from schedlang.passes.lower.build import build
from schedlang.passes.simulate.account import account
from schedlang.runtime.float64 import Float64
from schedlang.runtime.grad_reduction import gradient
from schedlang.runtime.modes import enter_modes
from schedlang.runtime.pipeline import overlapped_reduction
from schedlang.runtime.storage.offloaded_gradients import in_backward
from tests.engine.threads import Threads
from tests.proofs import adamw, assert_near, make_plan, train_on_ranks, train_sequential
from tests.ranks import run_ranks

WIDTH, LAYERS = 8, 5
LAYER = WIDTH * WIDTH * 8  # bytes of one layer in float64


class Net(nn.Module):
    """A chain of layers."""

    def __init__(self, layers: int = LAYERS, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """x[rows, width] -> the mean of squares"""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x**2).mean()


class SharedLayer(Net):
    """A net whose last layer is its first one."""

    def forward(self, x: Tensor) -> Tensor:
        """x[rows, width] -> the mean of squares"""
        for layer in (*self.layers, self.layers[0]):
            x = torch.tanh(layer(x))
        return (x**2).mean()


def batch(seed: int = 0, rows: int = 8) -> dict[str, Tensor]:
    """Return random rows."""
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)}


BATCHES = [batch(seed) for seed in range(3)]


def planned_sums(plan: Plan, inputs: Any) -> list[int]:
    """Return the bytes of each gradient sum in the plan."""
    collectives = account(plan, inputs).collectives or ()
    return [
        collective.bytes
        for collective in collectives
        for _ in range(collective.count)
        if collective.what == "grads"
    ]


@pytest.mark.parametrize("layers, calls", [(1, 5), (2, 3), (3, 2), (5, 1), (100, 1)])
def test_calls_follow_the_bucket(layers: int, calls: int) -> None:
    """Five equal layers, in buckets of so many layers."""
    rows = f"zero(stage=0, over=dp, bucket={layers * LAYER / 1024}KiB)"
    assert len(planned_sums(make_plan(Net().double(), rows, "dp=2"), batch())) == calls


def test_200_small_tensors_leave_as_one() -> None:
    """A bucket of 64 MiB takes all tensors; one of 1 KiB takes a few."""
    net = Net(200, 4)
    inputs = {"x": torch.zeros(4, 4)}
    one_bucket = planned_sums(
        make_plan(net, "zero(stage=0, over=dp, bucket=64MiB)", "dp=2"), inputs
    )
    assert one_bucket == [200 * (4 * 4 + 1) * 4]  # and one flag for each: has any rank a gradient?
    small_buckets = planned_sums(
        make_plan(net, "zero(stage=0, over=dp, bucket=1KiB)", "dp=2"), inputs
    )
    assert len(small_buckets) == 200 / (1024 // (4 * 4 * 4)) + 0.5


def record_sums(rank: int, plan: Plan, steps: int) -> list[list[tuple[int, int]]]:
    """On this rank, by step: return the bytes of each sum, and the gradients ready before it."""
    torch.set_num_threads(1)
    ready: list[int] = [0]
    sums: list[list[tuple[int, int]]] = []
    original = overlapped_reduction.begin_bucket

    def begin_one(group: Any, members: Any) -> Any:
        parameters = getattr(members, "parameters", members)
        sums[-1].append((sum(p.numel() * 8 for p in parameters), ready[0]))
        return original(group, members)

    def added(_: Any) -> None:
        ready[0] += 1

    with enter_modes(Float64()):
        program = build(plan, batch())
        for parameter in program.assembly.parameters.values():
            parameter.register_post_accumulate_grad_hook(in_backward(added))
        overlapped_reduction.begin_bucket = begin_one  # type: ignore[assignment]
        try:
            for seed in range(steps):
                sums.append([])
                ready[0] = 0
                program.train_step(batch(seed))
        finally:
            overlapped_reduction.begin_bucket = original
    return sums


def test_sums_begin_in_the_backward() -> None:
    """From the second step on each bucket is sent when it is full, the last layers first; with
    several microbatches only the last backward sends."""
    rows = f"zero(stage=0, over=dp, bucket={2 * LAYER / 1024}KiB)\noverlap(gradients)\n"
    plan = make_plan(Net().double(), rows + 'pipeline(order="GPipe", micro=2)', "dp=2")
    for first, second in run_ranks(2, record_sums, plan, 2):
        assert [ready for _, ready in first] == [10, 10, 10]
        assert second == [(LAYER, 6), (2 * LAYER, 8), (2 * LAYER, 10)]


@pytest.mark.parametrize("net", [Net, SharedLayer])
@pytest.mark.parametrize("micro", [1, 2])
def test_results_are_those_of_one_process(threads: Threads, net: type[Net], micro: int) -> None:
    """Losses, norms, gradients, parameters and moments over three steps."""
    rows = f"zero(stage=0, over=dp, bucket={LAYER / 1024}KiB)\noverlap(gradients)\n"
    plan = make_plan(net().double(), f'{rows}pipeline(order="GPipe", micro={micro})', "dp=2")
    results = train_on_ranks(threads, plan, BATCHES, adamw, clip=0.5)
    assert_near(results, train_sequential(plan.model.model, BATCHES, adamw, clip=0.5))


def test_a_gradient_that_changes_later_is_no_silent_mistake() -> None:
    """Adding to a gradient whose sum has begun ends the step with an error."""
    weight = nn.Parameter(torch.ones(3))
    group = gradient.Group(("dp",), (0, 1), 0)
    sums = [gradient.GradientReduction(group, ("w",), "replicas")]
    reduction = overlapped_reduction.OverlappedReduction({"w": weight}, sums, {"w": frozenset([0])})
    for step in range(2):
        reduction.prepare(0, True)
        (weight * 2).sum().backward()
        if step:
            assert weight.grad is not None
            weight.grad.add_(1)
            with pytest.raises(RuntimeError, match="changed after its sum"):
                reduction.finish()
        else:
            reduction.finish()


@pytest.mark.parametrize(
    "row, code",
    [
        ("zero(stage=1, over=dp, bucket=25MiB)", "S306"),
        ("zero(stage=0, over=dp, bucket=0KiB)", "S304"),
    ],
)
def test_refusals(row: str, code: str) -> None:
    """Slices have no buckets, and a bucket is not empty."""
    with pytest.raises(Refusal, match=code):
        make_plan(Net(), row, "dp=2")
