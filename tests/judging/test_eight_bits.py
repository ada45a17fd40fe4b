"""Programs whose products are of eight bits: right scales pass, wrong ones fail."""

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
from tests.judging.catches.parts import Copied, Summed, split

WIDTH = 32
Amax = Callable[[Tensor], Tensor]  # the greatest numbers of a tensor, in the shape of its scales


def model() -> nn.Module:
    """Two square layers, so that a scale that lies the wrong way fits."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def batch(seed: int) -> dict[str, Tensor]:
    """On each rank as many rows as columns, some far larger than others."""
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-1, 1, 2 * WIDTH)[:, None]
    return {"input": torch.randn(2 * WIDTH, WIDTH, generator=draw) * sizes}


def loss(output: Tensor, batch: Any) -> Tensor:
    """The mean square."""
    return output.square().mean()


def whole(x: Tensor) -> Tensor:
    """One scale for a tensor."""
    return x.abs().amax()


def of_rows(x: Tensor) -> Tensor:
    """One for each row."""
    return x.abs().amax(1, keepdim=True)


def everywhere(x: Tensor) -> Tensor:
    """One for the parts of all ranks."""
    found = whole(x)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found


def of_the_first(x: Tensor) -> Tensor:
    """Wrong: that of the first rank's part, beyond which other parts are cut off."""
    found = whole(x)
    dist.broadcast(found, 0)
    return found


def cast(x: Tensor, amax: Amax, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """Numbers in eight bits, and the scales that they are multiplied by."""
    most = torch.finfo(dtype).max
    scale = (amax(x).float() / most).clamp(min=1e-12)
    return (x.float() / scale).clamp(-most, most).to(dtype), scale


def emulated(a: Tensor, b: Tensor, amax: Amax, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """A product a @ b.T, as other machines make it."""
    (x, s), (w, t) = cast(a, amax, dtype), cast(b, amax, dtype)
    return ((x.float() @ w.float().T) * s * t.T).to(a.dtype)


def scaled_mm(a: Tensor, b: Tensor, amax: Amax) -> Tensor:
    """The same by the function of torch for it."""
    (x, s), (w, t) = cast(a.contiguous(), amax), cast(b.contiguous(), amax)
    return torch._scaled_mm(x, w.t(), scale_a=s, scale_b=t.t(), out_dtype=a.dtype)


def twice_inverse(a: Tensor, b: Tensor, amax: Amax) -> Tensor:
    """Wrong: one side's numbers are divided by their scale, and never multiplied again."""
    (x, s), (w, _) = cast(a, amax), cast(b, amax)
    return ((x.float() @ w.float().T) * s).to(a.dtype)


def other_format(a: Tensor, b: Tensor, amax: Amax) -> Tensor:
    """Wrong: scaled for the 448 of one format, and back as if for the 240 of another."""
    return emulated(a, b, amax) * (448 / 240)


def across(a: Tensor, b: Tensor, amax: Amax) -> Tensor:
    """Wrong: the scales of rows lie across, over columns."""
    (x, s), (w, t) = cast(a, amax), cast(b, amax)
    return ((x.float() @ w.float().T) * s.T * t).to(a.dtype)


class Product(torch.autograd.Function):
    """A linear layer's product, forward and backward by the same function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, multiply: Any, amax: Amax) -> Tensor:
        """Rows times the weight."""
        ctx.save_for_backward(x, weight)
        ctx.how = multiply, amax
        return multiply(x, weight, amax)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        """Both gradients are products again."""
        x, weight = ctx.saved_tensors
        multiply, amax = ctx.how
        of_x, of_weight = multiply(gradient, weight.T, amax), multiply(gradient.T, x.T, amax)
        return of_x, of_weight, None, None


def rows(multiply: Any = emulated, amax: Amax = whole) -> Callable[[Any], TrainingProgram]:
    """Each rank has rows of the batch, and casts by its own."""

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
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= size
            return value

        return TrainingProgram(model, step)

    return program


def features(amax: Amax, before: bool = False) -> Callable[[Any], TrainingProgram]:
    """Each rank has hidden features; `before`: sums over ranks are of numbers without scales."""

    def second(a: Tensor, b: Tensor, amax: Amax) -> Tensor:
        (x, s), (w, t) = cast(a, amax), cast(b, amax)
        total = x.float() @ w.float().T
        dist.all_reduce(total)
        return (total * s * t).to(a.dtype)

    def program(model: Any) -> TrainingProgram:
        first, act, last = model
        split(first, "weight")
        split(first, "bias")
        split(last, "weight", 1)

        def step(batch: Any) -> Tensor:
            x = Copied.apply(batch["input"])
            y = act(Product.apply(x, first.weight, emulated, amax) + first.bias)
            if before:
                y = Forward.apply(y, last.weight, second, amax)
            else:
                y = Summed.apply(Product.apply(y, last.weight, emulated, amax))
            value = loss(y + last.bias, batch)
            value.backward()
            return value

        cut = {"0.weight": Shard(0), "0.bias": Shard(0), "2.weight": Shard(1)}
        return TrainingProgram(model, step, world_loss="same", layouts=cut)

    return program


class Forward(Product):
    """A product whose sum over ranks is inside of it; backward has none."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        """Of this rank's features alone."""
        ctx.how = emulated, ctx.how[1]
        return Product.backward(ctx, gradient)


RIGHT = {
    "rows, one scale": rows(),
    "rows, a scale for each": rows(amax=of_rows),
    "rows, torch's own": rows(scaled_mm),
    "rows, torch's own, a scale for each": rows(scaled_mm, of_rows),
    "rows, one scale for all ranks": rows(amax=everywhere),
    "features": features(whole),
    "features, sums before scales": features(everywhere, before=True),
}
WRONG = {
    "never multiplied again": rows(twice_inverse),
    "the scale of another format": rows(other_format),
    "scales across": rows(across, of_rows),
    "the greatest number of the first rank": rows(amax=of_the_first),
    "scales of parts on their sum": features(whole, before=True),
}


def judged(pool: Pool, program: Any, dtype: str = FORMATS[0], seed: int = 0) -> Report:
    """The report on a program of two ranks."""
    torch.manual_seed(seed)
    sides: dict[str, Any] = {"model": model(), "batch": batch, "loss": loss}
    return verify_program(program, ranks=2, dtype=dtype, seed=seed, pool=pool, **sides)


@pytest.mark.parametrize("program", RIGHT.values(), ids=RIGHT)
def test_right_scales_pass(pool: Pool, program: Any) -> None:
    """However they are cut, by torch's own product or by hand: bounds are of eight bits."""
    report = judged(pool, program)
    assert report.ok and dict(report.facts)["dtype"] == FORMATS[0], str(report)


@pytest.mark.parametrize("program", WRONG.values(), ids=WRONG)
def test_wrong_scales_fail(pool: Pool, program: Any) -> None:
    """What no rounding of eight bits explains is found."""
    report = judged(pool, program)
    assert report.exit_code == 1, str(report)


def test_eight_bits_are_no_rounding_of_more(pool: Pool) -> None:
    """The same program is wrong where nothing says that its products are of eight bits."""
    assert judged(pool, RIGHT["rows, one scale"], "bfloat16").exit_code == 1


def _worst(report: Report) -> float:
    return max(row.error for row in report.rows if row.kind.endswith(IN_DTYPE))


def test_the_format_of_fewer_digits(pool: Pool) -> None:
    """A program that casts to it is within its bounds, about half as far from them."""
    coarse = rows(partial(emulated, dtype=torch.float8_e5m2))
    wide, narrow = (judged(pool, coarse, dtype) for dtype in FORMATS[::-1])
    assert wide.ok and 1.5 * _worst(wide) < _worst(narrow)
    assert judged(pool, WRONG["never multiplied again"], FORMATS[1]).exit_code == 1


@pytest.mark.parametrize("dtype", ["none", "float64", "float8_e8m0fnu"])
def test_what_no_program_is_judged_in(pool: Pool, dtype: str) -> None:
    """It is refused, with those that there are."""
    with pytest.raises(Refusal, match="S704") as caught:
        judged(pool, rows(), dtype)
    assert FORMATS[0] in str(caught.value)
