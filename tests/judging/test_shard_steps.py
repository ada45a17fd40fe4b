"""Optimizers whose step reads full tensors, computed from shards; steps that go wrong later."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from schedlang import TrainingProgram, verify_program
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.report import Report
from schedlang.runtime.launch.pool import Pool
from tests.judging.catches.collectives import (
    CopyToSplit,
    ReduceFromSplit,
    average_grads,
    gather_all,
    shard_param,
    world_size,
)
from tests.judging.net import batch_part

WIDTH = 8
SHARDED = {"0.weight": 0, "0.bias": 0, "2.weight": 1}  # dims of column and row shards


def numbers(seed: int) -> dict[str, Tensor]:
    """Return a batch of rows of floats, and targets of the same shape."""
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(6, WIDTH, generator=draw) for name in ("input", "y")}


def squared(output: Any, batch: Any) -> Tensor:
    """Return the mean squared error."""
    return F.mse_loss(output, batch["y"])


def autocast_backward(module: nn.Module, batch: Any) -> Tensor:
    """Run forward and backward of this rank's part of a batch in bfloat16; return the loss."""
    part = batch_part(batch, dist.get_rank(), world_size())
    with torch.autocast("cpu", torch.bfloat16):
        value = squared(module(part["input"]).float(), part)
    value.backward()
    return value


def layers() -> nn.Module:
    """Return two layers."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def judge_program(pool: Pool, program: Any, **options: Any) -> Report:
    """Return the verdict on two ranks."""
    torch.manual_seed(0)
    inputs = {"model": layers(), "batch": numbers, "loss": squared, "ranks": 2, "pool": pool}
    return verify_program(program, **inputs, **options)


def on_ranks() -> bool:
    """Whether this is a rank, and not the process of the original."""
    return dist.is_initialized() and world_size() > 1


# ---- Tensor parallel layers, and optimizers that read full matrices.


def orthogonal(step: Tensor, weight: Tensor) -> Tensor:
    """Return the nearest orthogonal matrix, as Muon does."""
    if step.dim() < 2:
        return step
    out = step / step.norm()
    for _ in range(5):
        out = 1.5 * out - 0.5 * out @ out.T @ out
    return out


def trusted(step: Tensor, weight: Tensor) -> Tensor:
    """Return a step as long as the weight, as in LARS and LAMB."""
    return step * (weight.norm() / step.norm())


def factored(step: Tensor, weight: Tensor) -> Tensor:
    """Return a step over means of rows and columns, as in Adafactor."""
    if step.dim() < 2:
        return step
    rows, columns = (step.square().mean(dim, keepdim=True) for dim in (1, 0))
    return step / (rows * columns / rows.mean()).sqrt()


class MatrixOptimizer(torch.optim.Optimizer):
    """Steps by a function of the full gradient, which shards gather or do not."""

    def __init__(self, named: Any, rule: Any, gathers: bool) -> None:
        self.named, self.rule, self.gathers = list(named), rule, gathers
        super().__init__([p for _, p in self.named], {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Step every parameter."""
        for name, p in self.named:
            dim = SHARDED.get(name) if self.gathers and on_ranks() else None
            full = [t if dim is None else gather_all(t, dim) for t in (p.grad, p.detach())]
            change = self.rule(*full)
            if dim is not None:
                change = change.chunk(world_size(), dim)[dist.get_rank()]
            p.add_(change, alpha=-0.05)


def split(rule: Any, gathers: bool) -> Any:
    """Return tensor parallel layers with an optimizer."""

    def program(model: Any) -> TrainingProgram:
        for name, dim in SHARDED.items():
            shard_param(model[int(name[0])], name[2:], dim)
        first, last = model[0], model[2]

        def step(batch: Any) -> Tensor:
            inner = first(CopyToSplit.apply(batch["input"])).tanh()
            output = ReduceFromSplit.apply(F.linear(inner, last.weight)) + last.bias
            value = squared(output, batch)
            value.backward()
            return value

        optimizer = partial(MatrixOptimizer, rule=rule, gathers=gathers)
        return TrainingProgram(model, step, world_loss="same", optimizer=optimizer)

    return program


@pytest.mark.parametrize("rule", [orthogonal, trusted, factored])
def test_a_step_that_is_computed_from_shards(rule: Any, pool: Pool) -> None:
    """Optimizers that gather pass; those that step each rank's shard alone are told so."""
    report = judge_program(pool, split(rule, gathers=True))
    assert report.ok, str(report)
    report = judge_program(pool, split(rule, gathers=False))
    text = "each rank computes the optimizer's step from its own shard"
    assert [head for head, said in report.localised if text in said] == ["parameters"], str(report)
    assert "`0.weight`" in report.localised[0][1] and "`2.bias`" not in report.localised[0][1]


def test_in_a_low_dtype_a_step_from_shards_is_named(pool: Pool) -> None:
    """A low dtype finds shards as a whole, and tells steps from shards as float64 does."""
    assert judge_program(pool, split(orthogonal, gathers=True), dtype="bfloat16").ok
    report = judge_program(pool, split(factored, gathers=False), dtype="bfloat16")
    assert report.exit_code == 1 and "from its own shard" in report.localised[0][1], str(report)


def test_copies_that_are_not_a_number_alike(pool: Pool) -> None:
    """Where the original itself overflows, ranks hold the same NaN: undecided, not wrong."""
    report = judge_program(pool, split(factored, gathers=True), dtype="float16")
    assert report.exit_code == 3 and "the original itself is not finite" in str(report), str(report)


# ---- Flat shards of FSDP.


def flat_shards(optimizer: Any, synchronised: bool = True) -> Any:
    """Return a program with FSDP1 and two microbatches."""

    def program(model: Any) -> TrainingProgram:
        module = FullyShardedDataParallel(
            model, use_orig_params=True, device_id=torch.device("cpu")
        )

        def step(batch: Any) -> Tensor:
            local = batch_part(batch, dist.get_rank(), world_size())
            if synchronised:
                value = squared(module(local["input"]), local)
                value.backward()
                return value
            with module.no_sync():
                value = squared(module(local["input"]), local)
                value.backward()
            return value

        return TrainingProgram(module, step, optimizer=optimizer)

    return program


def test_adafactor_of_flat_shards(pool: Pool) -> None:
    """Adafactor of torch sees flat shards under FSDP1: no rows, no columns."""
    factory = lambda named: torch.optim.Adafactor([p for _, p in named])  # noqa: E731
    report = judge_program(pool, flat_shards(factory))
    assert "from its own shard" in report.localised[0][1], str(report)


def test_a_norm_of_flat_shards(pool: Pool) -> None:
    """torch's own clipping measures what a rank holds of FSDP1's flat parameters."""

    def program(model: Any) -> TrainingProgram:
        made = flat_shards(None)(model)
        clip = lambda most: nn.utils.clip_grad_norm_(made.module.parameters(), most)  # noqa: E731
        return TrainingProgram(made.module, made.step, clip=clip)

    report = judge_program(pool, program)
    text = "it sums the squares of what rank 0 holds, and no other"
    assert dict(report.localised) == {"gradient norm": text}, str(report)


def test_gradients_that_are_never_reduced(pool: Pool) -> None:
    """FSDP1 leaves full gradients after `no_sync`; no optimizer can step them."""
    with pytest.raises(Refusal) as refused:
        judge_program(pool, flat_shards(None, synchronised=False))
    assert refused.value.diagnostic.code == "S762" and "no_sync" in str(refused.value)


# ---- ZeRO by hand: each rank steps a part of one flat tensor.


class FlatSlices(torch.optim.Optimizer):
    """Adam on this rank's slice of all parameters; the slices are gathered."""

    def __init__(self, named: Any, mistake: str) -> None:
        self.list, self.count = [p for _, p in named], 0
        self.mistake = mistake if on_ranks() else ""
        super().__init__(self.list, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Step the slice, and copy all slices back."""
        if self.mistake == "raises":
            raise ValueError("no slices")
        self.count += 1
        ranks, rank = (world_size(), dist.get_rank()) if on_ranks() else (1, 0)
        weights, grads = (
            torch.cat([t.reshape(-1) for t in tensors]).chunk(ranks)[rank]
            for tensors in (self.list, [p.grad for p in self.list])
        )
        if self.count == 1 or self.mistake == "moments are lost":
            self.moments = torch.zeros_like(grads), torch.zeros_like(grads)
        first, second = self.moments
        first.mul_(0.9).add_(grads, alpha=0.1)
        second.mul_(0.99).addcmul_(grads, grads, value=0.01)
        scale = [1 - decay**self.count for decay in (0.9, 0.99)]
        new = weights - 0.01 * (first / scale[0]) / ((second / scale[1]).sqrt() + 1e-8)
        if on_ranks():
            parts = gather_all(new).chunk(ranks)
            new = torch.cat(parts[::-1] if self.mistake == "order" else parts)
        for p, part in zip(self.list, new.split([p.numel() for p in self.list])):
            p.copy_(part.reshape(p.shape))


def sliced(mistake: str) -> Any:
    """Return a program with averaged gradients and sliced optimizer state."""

    def program(model: Any) -> TrainingProgram:
        def step(batch: Any) -> Tensor:
            local = batch_part(batch, dist.get_rank(), world_size())
            value = squared(model(local["input"]), local)
            value.backward()
            average_grads(model)
            return value

        return TrainingProgram(model, step, optimizer=partial(FlatSlices, mistake=mistake))

    return program


@pytest.mark.parametrize(
    "mistake, said",
    [
        ("", ""),
        ("order", "4 of 4 (`2.bias`, `2.weight`, `0.bias`, `0.weight`): they hold new values of"),
        ("moments are lost", "step 2 is the first wrong one, and its batch is right with the"),
    ],
)
def test_slices_of_one_flat_tensor(mistake: str, said: str, pool: Pool) -> None:
    """Slices pass; slices that are gathered in another order or lose their state are told."""
    report = judge_program(pool, sliced(mistake))
    assert report.ok != bool(mistake) and said in "".join(t for _, t in report.localised), str(
        report
    )


def test_an_optimizer_that_raises(pool: Pool) -> None:
    """An error in a step of the user's optimizer is a refusal at its line, on ranks and here."""
    with pytest.raises(Refusal) as refused:
        judge_program(pool, sliced("raises"))
    assert refused.value.diagnostic.code == "S762"
    assert "`optimizer` raises ValueError: no slices on rank" in " ".join(
        str(refused.value).split()
    )

    class Reducing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for p in self.param_groups[0]["params"]:
                dist.all_reduce(p.grad)

    def program(model: Any) -> TrainingProgram:
        made = sliced("")(model)
        optimizer = lambda named: Reducing([p for _, p in named])  # noqa: E731
        return TrainingProgram(made.module, made.step, optimizer=optimizer)

    with pytest.raises(Refusal) as refused:
        judge_program(pool, program)
    assert "in the process of the original, which has no ranks" in " ".join(
        str(refused.value).split()
    )
