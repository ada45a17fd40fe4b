"""Programs with 8-bit matrix products: right scales pass, wrong ones fail."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from schedlang import TrainingProgram, verify_program
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.judge.low_dtype import FORMATS
from schedlang.passes.verify.conditioning import IN_DTYPE
from schedlang.report import Report
from schedlang.runtime.launch.pool import Pool
from tests.judging.catches.collectives import (
    CopyToSplit,
    ReduceFromSplit,
    average_grads,
    shard_param,
)

WIDTH = 32
Amax = Callable[[Tensor], Tensor]  # largest magnitudes of a tensor, in the shape of its scales


def model() -> nn.Module:
    """Return two square layers, so that transposed scales fit in shape."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def batch(seed: int) -> dict[str, Tensor]:
    """Return as many rows as columns per rank, of very different magnitude."""
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-1, 1, 2 * WIDTH)[:, None]
    return {"input": torch.randn(2 * WIDTH, WIDTH, generator=draw) * sizes}


def loss(output: Tensor, batch: Any) -> Tensor:
    """The mean square."""
    return output.square().mean()


def amax_of_all(x: Tensor) -> Tensor:
    """Return one amax for a tensor."""
    return x.abs().amax()


def amax_of_rows(x: Tensor) -> Tensor:
    """Return an amax for each row."""
    return x.abs().amax(1, keepdim=True)


def amax_of_ranks(x: Tensor) -> Tensor:
    """Return one amax over the parts of all ranks."""
    amax = amax_of_all(x)
    dist.all_reduce(amax, dist.ReduceOp.MAX)
    return amax


def amax_of_first(x: Tensor) -> Tensor:
    """Wrong: the amax of rank 0's part, which saturates other parts."""
    amax = amax_of_all(x)
    dist.broadcast(amax, 0)
    return amax


def cast(x: Tensor, amax: Amax, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """Return the tensor in eight bits, and its scales."""
    max_value = torch.finfo(dtype).max
    scale = (amax(x).float() / max_value).clamp(min=1e-12)
    return (x.float() / scale).clamp(-max_value, max_value).to(dtype), scale


def emulated(a: Tensor, b: Tensor, amax: Amax, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """Return a @ b.T in eight bits, emulated."""
    (x, s), (w, t) = cast(a, amax, dtype), cast(b, amax, dtype)
    return ((x.float() @ w.float().T) * s * t.T).to(a.dtype)


def scaled_mm(a: Tensor, b: Tensor, amax: Amax) -> Tensor:
    """Return a @ b.T in eight bits, by torch's function."""
    (x, s), (w, t) = cast(a.contiguous(), amax), cast(b.contiguous(), amax)
    return torch._scaled_mm(x, w.t(), scale_a=s, scale_b=t.t(), out_dtype=a.dtype)


def no_rescaling(a: Tensor, b: Tensor, amax: Amax) -> Tensor:
    """Wrong: one operand is not scaled back."""
    (x, s), (w, _) = cast(a, amax), cast(b, amax)
    return ((x.float() @ w.float().T) * s).to(a.dtype)


def other_format(a: Tensor, b: Tensor, amax: Amax) -> Tensor:
    """Wrong: scaled by the maximum 448 of one format, and back by the 240 of another."""
    return emulated(a, b, amax) * (448 / 240)


def scales_across(a: Tensor, b: Tensor, amax: Amax) -> Tensor:
    """Wrong: row scales are applied to columns."""
    (x, s), (w, t) = cast(a, amax), cast(b, amax)
    return ((x.float() @ w.float().T) * s.T * t).to(a.dtype)


class Product(torch.autograd.Function):
    """A linear layer's product, with the same function in forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, multiply: Any, amax: Amax) -> Tensor:
        """Rows times the weight."""
        ctx.save_for_backward(x, weight)
        ctx.how = multiply, amax
        return multiply(x, weight, amax)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        """Compute both gradients as products."""
        x, weight = ctx.saved_tensors
        multiply, amax = ctx.how
        grad_x, grad_weight = multiply(gradient, weight.T, amax), multiply(gradient.T, x.T, amax)
        return grad_x, grad_weight, None, None


def by_rows(multiply: Any = emulated, amax: Amax = amax_of_all) -> Callable[[Any], TrainingProgram]:
    """Return a program that splits rows; each rank scales its own rows."""

    def program(model: Any) -> TrainingProgram:
        rank, size = dist.get_rank(), dist.get_world_size()

        def forward(x: Tensor) -> Tensor:
            for layer in model:
                if isinstance(layer, nn.Linear):
                    x = Product.apply(x, layer.weight, multiply, amax) + layer.bias
                else:
                    x = layer(x)
            return x

        def step(batch: Any) -> Tensor:
            value = loss(forward(batch["input"].chunk(size)[rank]), batch)
            value.backward()
            average_grads(model)
            return value

        return TrainingProgram(model, step)

    return program


def by_features(amax: Amax, before: bool = False) -> Callable[[Any], TrainingProgram]:
    """Return a program that splits hidden features; `before`: all-reduce before scaling back."""

    def second(a: Tensor, b: Tensor, amax: Amax) -> Tensor:
        (x, s), (w, t) = cast(a, amax), cast(b, amax)
        total = x.float() @ w.float().T
        dist.all_reduce(total)
        return (total * s * t).to(a.dtype)

    def program(model: Any) -> TrainingProgram:
        up, activation, down = model
        shard_param(up, "weight")
        shard_param(up, "bias")
        shard_param(down, "weight", 1)

        def step(batch: Any) -> Tensor:
            x = CopyToSplit.apply(batch["input"])
            y = activation(Product.apply(x, up.weight, emulated, amax) + up.bias)
            if before:
                y = Forward.apply(y, down.weight, second, amax)
            else:
                y = ReduceFromSplit.apply(Product.apply(y, down.weight, emulated, amax))
            value = loss(y + down.bias, batch)
            value.backward()
            return value

        cut = {"0.weight": Shard(0), "0.bias": Shard(0), "2.weight": Shard(1)}
        return TrainingProgram(model, step, world_loss="same", layouts=cut)

    return program


class Forward(Product):
    """A product with an all-reduce in forward, and none in backward."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        """Compute gradients of this rank's features only."""
        ctx.how = emulated, ctx.how[1]
        return Product.backward(ctx, gradient)


RIGHT = {
    "rows, one scale": by_rows(),
    "rows, a scale for each": by_rows(amax=amax_of_rows),
    "rows, torch's own": by_rows(scaled_mm),
    "rows, torch's own, a scale for each": by_rows(scaled_mm, amax_of_rows),
    "rows, one scale for all ranks": by_rows(amax=amax_of_ranks),
    "features": by_features(amax_of_all),
    "features, sums before scales": by_features(amax_of_ranks, before=True),
}
WRONG = {
    "never multiplied again": by_rows(no_rescaling),
    "the scale of another format": by_rows(other_format),
    "scales across": by_rows(scales_across, amax_of_rows),
    "the greatest number of the first rank": by_rows(amax=amax_of_first),
    "scales of parts on their sum": by_features(amax_of_all, before=True),
}


def judge_program(pool: Pool, program: Any, dtype: str = FORMATS[0], seed: int = 0) -> Report:
    """Judge a program on two ranks, and return the report."""
    torch.manual_seed(seed)
    sides: dict[str, Any] = {"model": model(), "batch": batch, "loss": loss}
    return verify_program(program, ranks=2, dtype=dtype, seed=seed, pool=pool, **sides)


@pytest.mark.parametrize("program", RIGHT.values(), ids=RIGHT)
def test_right_scales_pass(pool: Pool, program: Any) -> None:
    """Right programs pass, with torch's product and the emulated one, for rows and features."""
    report = judge_program(pool, program)
    assert report.ok and dict(report.facts)["dtype"] == FORMATS[0], str(report)


@pytest.mark.parametrize("program", WRONG.values(), ids=WRONG)
def test_wrong_scales_fail(pool: Pool, program: Any) -> None:
    """Errors beyond 8-bit rounding are found."""
    report = judge_program(pool, program)
    assert report.exit_code == 1, str(report)


def test_eight_bits_are_no_rounding_of_more(pool: Pool) -> None:
    """The same program fails in bfloat16, where 8-bit rounding is not expected."""
    assert judge_program(pool, RIGHT["rows, one scale"], "bfloat16").exit_code == 1


def _worst(report: Report) -> float:
    return max(row.error for row in report.rows if row.kind.endswith(IN_DTYPE))


def test_the_format_of_fewer_digits(pool: Pool) -> None:
    """A program in e5m2 passes in e5m2, with smaller errors relative to the bounds than in e4m3."""
    coarse = by_rows(partial(emulated, dtype=torch.float8_e5m2))
    in_e5m2, in_e4m3 = (judge_program(pool, coarse, dtype) for dtype in FORMATS[::-1])
    assert in_e5m2.ok and 1.5 * _worst(in_e5m2) < _worst(in_e4m3)
    assert judge_program(pool, WRONG["never multiplied again"], FORMATS[1]).exit_code == 1


@pytest.mark.parametrize("dtype", ["none", "float64", "float8_e8m0fnu"])
def test_what_no_program_is_judged_in(pool: Pool, dtype: str) -> None:
    """Other dtypes are refused, with the valid ones."""
    with pytest.raises(Refusal, match="S704") as caught:
        judge_program(pool, by_rows(), dtype)
    assert FORMATS[0] in str(caught.value)


def gathered(swapped: bool) -> Callable[[Any], TrainingProgram]:
    """Return ranks that send each other their part of each weight in eight bits."""

    def program(model: Any) -> TrainingProgram:
        rank, size = dist.get_rank(), dist.get_world_size()

        def sent(weight: Tensor) -> Tensor:
            narrow, scale = cast(weight.detach(), amax_of_all)
            gathered = torch.empty(WIDTH, WIDTH, dtype=narrow.dtype)
            dist.all_gather_into_tensor(gathered, narrow.chunk(size)[rank])
            full = gathered.float().roll(WIDTH // size * swapped, 0) * scale
            return weight + (full.to(weight.dtype) - weight).detach()

        def step(batch: Any) -> Tensor:
            x = batch["input"].chunk(size)[rank]
            for layer in model:
                if isinstance(layer, nn.Linear):
                    x = Product.apply(x, sent(layer.weight), emulated, amax_of_all) + layer.bias
                else:
                    x = layer(x)
            value = loss(x, batch)
            value.backward()
            average_grads(model)
            return value

        return TrainingProgram(model, step)

    return program


def test_ranks_send_floats_of_eight_bits(pool: Pool) -> None:
    """gloo has no such floats, and gets their bytes."""
    torch.manual_seed(0)
    inputs: Any = {"model": model(), "batch": batch, "loss": loss, "ranks": 2, "pool": pool}
    report = verify_program(gathered(swapped=False), **inputs, dtype="float8_e4m3fn")
    assert report.ok, str(report)
    report = verify_program(gathered(swapped=True), **inputs, dtype="float8_e4m3fn")
    assert report.exit_code == 1, str(report)
