"""Sums of gradients in buckets of a chosen size, begun in the backward: calls, bytes, results."""

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
from tests.engine.threads import Threads
from tests.proofs import adamw, assert_near, planned, sequential, trained
from tests.ranks import run_ranks

WIDTH, LAYERS = 8, 5
LAYER = WIDTH * WIDTH * 8  # bytes of one, in float64


class Net(nn.Module):
    """Layers one after the other."""

    def __init__(self, layers: int = LAYERS, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """x[rows, width] -> the mean of squares"""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x**2).mean()


class Twice(Net):
    """The last layer is the first one, too."""

    def forward(self, x: Tensor) -> Tensor:
        """x[rows, width] -> the mean of squares"""
        for layer in (*self.layers, self.layers[0]):
            x = torch.tanh(layer(x))
        return (x**2).mean()


def batch(seed: int = 0, rows: int = 8) -> dict[str, Tensor]:
    """Rows that differ."""
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)}


BATCHES = [batch(seed) for seed in range(3)]


def sums_told(plan: Plan, given: Any) -> list[int]:
    """Bytes of each sum of gradients that the plan tells."""
    found = account(plan, given).collectives or ()
    return [one.bytes for one in found for _ in range(one.count) if one.what == "grads"]


@pytest.mark.parametrize("layers, calls", [(1, 5), (2, 3), (3, 2), (5, 1), (100, 1)])
def test_calls_follow_the_bucket(layers: int, calls: int) -> None:
    """Five equal layers in buckets of so many."""
    rows = f"zero(stage=0, over=dp, bucket={layers * LAYER / 1024}KiB)"
    assert len(sums_told(planned(Net().double(), rows, "dp=2"), batch())) == calls


def test_200_small_tensors_leave_as_one() -> None:
    """A fusion buffer of 64 MiB takes all of them, one of a byte none beside another."""
    net = Net(200, 4)
    given = {"x": torch.zeros(4, 4)}
    whole = sums_told(planned(net, "zero(stage=0, over=dp, bucket=64MiB)", "dp=2"), given)
    assert whole == [200 * (4 * 4 + 1) * 4]  # and a number for each: did any rank have it?
    alone = sums_told(planned(net, "zero(stage=0, over=dp, bucket=1KiB)", "dp=2"), given)
    assert len(alone) == 200 / (1024 // (4 * 4 * 4)) + 0.5


def begun(rank: int, plan: Plan, steps: int) -> list[list[tuple[int, int]]]:
    """On this rank, by step: of each sum its bytes, and the gradients made before it."""
    torch.set_num_threads(1)
    made: list[int] = [0]
    found: list[list[tuple[int, int]]] = []
    real = overlapped_reduction.begin_bucket

    def begin_one(group: Any, members: Any) -> Any:
        parts = getattr(members, "parameters", members)
        found[-1].append((sum(p.numel() * 8 for p in parts), made[0]))
        return real(group, members)

    def added(_: Any) -> None:
        made[0] += 1

    with enter_modes(Float64()):
        program = build(plan, batch())
        for parameter in program.assembly.parameters.values():
            parameter.register_post_accumulate_grad_hook(added)
        overlapped_reduction.begin_bucket = begin_one  # type: ignore[assignment]
        try:
            for seed in range(steps):
                found.append([])
                made[0] = 0
                program.train_step(batch(seed))
        finally:
            overlapped_reduction.begin_bucket = real
    return found


def test_sums_begin_in_the_backward() -> None:
    """From the second step on each bucket leaves as soon as it is full, the last layers first; of
    several microbatches the last backward alone sends."""
    rows = f"zero(stage=0, over=dp, bucket={2 * LAYER / 1024}KiB)\noverlap(gradients)\n"
    plan = planned(Net().double(), rows + 'pipeline(order="GPipe", micro=2)', "dp=2")
    for first, second in run_ranks(2, begun, plan, 2):
        assert [made for _, made in first] == [10, 10, 10]
        assert second == [(LAYER, 6), (2 * LAYER, 8), (2 * LAYER, 10)]


@pytest.mark.parametrize("net", [Net, Twice])
@pytest.mark.parametrize("micro", [1, 2])
def test_results_are_those_of_one_process(threads: Threads, net: type[Net], micro: int) -> None:
    """Losses, norms, gradients, parameters and moments over three steps."""
    rows = f"zero(stage=0, over=dp, bucket={LAYER / 1024}KiB)\noverlap(gradients)\n"
    plan = planned(net().double(), f'{rows}pipeline(order="GPipe", micro={micro})', "dp=2")
    seen = trained(threads, plan, BATCHES, adamw, clip=0.5)
    assert_near(seen, sequential(plan.model.model, BATCHES, adamw, clip=0.5))


def test_a_gradient_that_changes_later_is_no_silent_mistake() -> None:
    """What is added to a gradient whose sum has begun ends the step with an error."""
    weight = nn.Parameter(torch.ones(3))
    group = gradient.Group(("dp",), (0, 1), 0)
    sums = [gradient.GradientReduction(group, ("w",), "replicas")]
    one = overlapped_reduction.OverlappedReduction({"w": weight}, sums, {"w": frozenset([0])})
    for step in range(2):
        one.prepare(0, True)
        (weight * 2).sum().backward()
        if step:
            assert weight.grad is not None
            weight.grad.add_(1)
            with pytest.raises(RuntimeError, match="changed after its sum"):
                one.finish()
        else:
            one.finish()


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
        planned(Net(), row, "dp=2")
