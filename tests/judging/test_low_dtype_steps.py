"""Mistakes of a program's own optimizer that are smaller than the roundings of its weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from schedlang import TrainingProgram
from schedlang.runtime.launch.pool import Pool
from tests.judging.catches.collectives import average_grads, world_size
from tests.judging.net import batch_part
from tests.judging.test_shard_steps import (
    SHARDED,
    autocast_backward,
    judge_program,
    on_ranks,
    split,
    squared,
)

RATE = 0.003


class Trusting(torch.optim.Optimizer):
    """LARS, whose norms of shards are summed over ranks or not."""

    def __init__(self, named: Any, sums: bool) -> None:
        self.named, self.sums = list(named), sums
        super().__init__([p for _, p in self.named], {"lr": RATE})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Step every parameter."""
        for name, p in self.named:
            assert p.grad is not None
            squares = torch.stack([t.float().square().sum() for t in (p, p.grad)])
            if self.sums and on_ranks() and name in SHARDED:
                dist.all_reduce(squares)
            weight, gradient = squares.sqrt()
            p.add_(p.grad * (weight / gradient).to(p.dtype), alpha=-RATE)


def trusting(sums: bool) -> Any:
    """Return tensor parallel layers with LARS."""
    layers = split(None, gathers=False)

    def program(model: Any) -> TrainingProgram:
        made = layers(model)
        optimizer = partial(Trusting, sums=sums)
        return TrainingProgram(made.module, made.step, world_loss="same", optimizer=optimizer)

    return program


class Keeping(torch.optim.Optimizer):
    """Adam over float32 weights, which ranks hold in one flat shard each, as ZeRO does."""

    def __init__(self, named: Any, renews: bool, flat: bool) -> None:
        self.renews, self.flat, self.kept = renews, flat, list[Tensor]()
        self.sums: list[tuple[Tensor, Tensor]] = []
        super().__init__([p for _, p in named], {"lr": RATE})

    def own(self, values: list[Tensor]) -> list[Tensor]:
        """Return what this process steps: all tensors, or a shard of them on a rank."""
        if not on_ranks() and not self.flat:
            return [value.detach().float().clone() for value in values]
        flat = torch.cat([value.detach().float().flatten() for value in values])
        count, rank = (world_size(), dist.get_rank()) if on_ranks() else (1, 0)
        return [F.pad(flat, (0, 2 - len(flat) % 2)).chunk(count)[rank]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Step the float32 weights, and round them into the parameters."""
        parameters = self.param_groups[0]["params"]
        if not self.kept or self.renews and on_ranks():
            self.kept = self.own(parameters)
        zeros = [(torch.zeros_like(t), torch.zeros_like(t)) for t in self.kept]
        self.sums = self.sums or zeros
        gradients = self.own([p.grad for p in parameters])
        for weight, gradient, (first, second) in zip(self.kept, gradients, self.sums):
            first.lerp_(gradient, 0.1)
            second.lerp_(gradient.square(), 0.01)
            weight.addcdiv_(first, second.sqrt() + 1e-6, value=-RATE)
        stepped = self.kept
        if on_ranks() or self.flat:
            parts = [self.kept[0]]
            if on_ranks():
                parts = [torch.empty_like(self.kept[0]) for _ in range(world_size())]
                dist.all_gather(parts, self.kept[0].contiguous())
            sizes = [p.numel() for p in parameters]
            stepped = list(torch.cat(parts)[: sum(sizes)].split(sizes))
        for p, value in zip(parameters, stepped):
            p.copy_(value.view_as(p))


def keeping(renews: bool, flat: bool = False) -> Any:
    """Return data parallel ranks that keep float32 weights from step to step, or do not.

    flat  the original keeps them in one tensor, too
    """

    def program(model: Any) -> TrainingProgram:
        def step(batch: Any) -> Tensor:
            part = batch_part(batch, dist.get_rank(), world_size())
            value = squared(model(part["input"]), part)
            value.backward()
            average_grads(model)
            return value

        return TrainingProgram(model, step, optimizer=partial(Keeping, renews=renews, flat=flat))

    return program


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_steps_that_bounds_hide(dtype: str, pool: Pool) -> None:
    """Norms of shards, and float32 weights that are made anew, are named; right ones pass."""
    for make, right, text in (
        (trusting, True, "from its own shard"),
        (keeping, False, "made anew"),
        (partial(keeping, flat=True), False, "made anew"),
    ):
        report = judge_program(pool, make(right), dtype=dtype)
        assert report.ok, str(report)
        report = judge_program(pool, make(not right), dtype=dtype)
        assert report.exit_code == 1 and text in report.localised[0][1], str(report)
        assert {row.kind for row in report.rows if not row.ok} == {"optimizer's step"}


class Decaying(torch.optim.Optimizer):
    """SGD with momentum and decay of float32 weights, with another decay or rate on ranks."""

    def __init__(self, named: Any, decay: float, rate: float) -> None:
        self.decay, self.rate = (decay, rate) if on_ranks() else (0.3, RATE)
        self.kept = [p.detach().float().clone() for _, p in named]
        self.sums = [torch.zeros_like(t) for t in self.kept]
        super().__init__([p for _, p in named], {"lr": RATE})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Step the float32 weights, and round them into the parameters."""
        for weight, total, p in zip(self.kept, self.sums, self.param_groups[0]["params"]):
            total.mul_(0.9).add_(p.grad.float())
            weight.mul_(1 - RATE * self.decay).sub_(self.rate * total)
            p.copy_(weight)


def decaying(wide: bool, decay: float = 0.3, rate: float = RATE) -> Any:
    """Return data parallel ranks with weights in float32, or in the dtype of the computation."""

    def program(model: Any) -> TrainingProgram:
        module = model.float() if wide else model

        def step(batch: Any) -> Tensor:
            value = autocast_backward(module, batch)
            average_grads(module)
            return value

        optimizer = partial(Decaying, decay=decay, rate=rate)
        return TrainingProgram(module, step, optimizer=optimizer)

    return program


def test_another_decay_on_ranks(pool: Pool) -> None:
    """Of float32 weights each step is known; of low ones only that nearly all differ in one way."""
    for wide in (True, False):
        assert judge_program(pool, decaying(wide), dtype="bfloat16").ok
        for decay, amount in ((0.0, "little"), (0.6, "much")):
            report = judge_program(pool, decaying(wide, decay), dtype="bfloat16")
            assert report.exit_code == 1, str(report)
            head, text = report.localised[0]
            assert head == "optimizer's step" and f"of each weight too {amount}" in text
    report = judge_program(pool, decaying(True, rate=1.02 * RATE), dtype="bfloat16")
    assert "not that of this optimizer" in dict(report.localised)["optimizer's step"], str(report)
