"""The Float64 mode: all computation is in float64, including casts and recomputation."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.adapters.torch_tensor import check_backwards
from schedlang.runtime.float64 import Float64, as_float64, to_float64
from schedlang.runtime.modes import enter_modes, restore_forward_context

CASTS = [
    lambda x: x.float(),
    lambda x: x.half(),
    lambda x: x.bfloat16(),
    lambda x: x.to(torch.float32),
    lambda x: x.to("cpu", torch.bfloat16),
    lambda x: x.to(dtype=torch.float16),
    lambda x: x.to(torch.ones(1, dtype=torch.int64).to(torch.float32)),
    lambda x: x.type(torch.float32),
    lambda x: x.type(torch.FloatTensor),
    lambda x: x.type("torch.HalfTensor"),
    lambda x: x.type_as(torch.zeros(1, dtype=torch.float32)),
    lambda x: F.softmax(x, 0, dtype=torch.float32),
    lambda x: x.softmax(0, torch.float32),
    lambda x: x.sum(dtype=torch.float32),
    lambda x: torch.zeros(3) + torch.arange(3, dtype=torch.float32),
    lambda x: torch.arange(3) / 2,
    lambda x: torch.tensor([1.0]),
    lambda x: x.new_zeros(3, dtype=torch.float32),
    lambda x: torch.empty_like(x, dtype=torch.bfloat16),
    lambda x: torch.ops.aten.to.dtype(x, torch.float32),
    lambda x: torch.view_as_real(torch.ones(2).cfloat()),
    lambda x: torch.full((2,), 1.0, dtype=torch.float8_e4m3fn),
]


@pytest.mark.parametrize("cast", CASTS)
def test_every_cast_gives_float64(cast) -> None:
    """Every cast to a lower float type gives float64."""
    x = torch.rand(3, dtype=torch.float64)
    with Float64():
        assert cast(x).dtype == torch.float64
    assert torch.get_default_dtype() == torch.float32


def test_integers_and_bools_stay() -> None:
    """Casts to integers and bools are unchanged."""
    with Float64():
        assert torch.ones(2).to(torch.int32).dtype == torch.int32
        assert torch.arange(3).dtype == torch.int64
        assert torch.ones(2).type() == "torch.DoubleTensor"


def test_reading_bits_is_refused() -> None:
    """Reinterpreting bits of a float is refused."""
    with Float64(), pytest.raises(Refusal, match="bits"):
        torch.ones(2).view(torch.int32)
    with Float64(), pytest.raises(Refusal, match="bits"):
        torch.ones(2, dtype=torch.int32).view(torch.float32)


class Casting(torch.autograd.Function):
    """The square, with casts to float32 in forward and backward."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x.float() ** 2).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return (2 * x.float() * grad.float()).to(x.dtype)


def _backward(y: Tensor, x: Tensor) -> Tensor:
    y.backward()
    return x.grad


@pytest.mark.parametrize(
    "derive", [_backward, lambda y, x: torch.autograd.grad(y, x)[0]], ids=["backward", "grad"]
)
@pytest.mark.parametrize("again", [False, True], ids=["plain", "recomputed"])
def test_backward_and_recomputation_stay_in_float64(derive, again: bool) -> None:
    """Casts in a custom backward or in a recomputation give float64, too."""
    x = torch.full((4,), 1 / 3, dtype=torch.float64, requires_grad=True)

    def square(v: Tensor) -> Tensor:
        return Casting.apply(v * v.float().exp().to(v.dtype))

    with enter_modes(Float64()):
        if again:
            ctx = lambda: (nullcontext(), restore_forward_context())  # noqa: E731
            y = checkpoint(square, x, use_reentrant=False, context_fn=ctx)
        else:
            y = square(x)
        grad = derive(y.sum(), x)
    v = 1 / 3 * torch.tensor(1 / 3, dtype=torch.float64).exp()
    exact = 2 * v * v * (1 + 1 / (1 / 3))
    assert (grad - exact).abs().max() < 1e-15


@pytest.mark.parametrize("again", [False, True], ids=["plain", "recomputed"])
def test_a_checked_backward_stays_in_float64(monkeypatch, again: bool) -> None:
    """Once a program's module is handed out, torch's `backward` is wrapped; modes see through."""
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)  # put back at the end
    roots: list[object] = []
    check_backwards(roots.extend)
    test_backward_and_recomputation_stay_in_float64(_backward, again)
    assert len(roots) == 1


@pytest.mark.parametrize("name", ["rows", "columns", "inner", "batched"])
def test_grouped_products_equal_torchs_own(name: str) -> None:
    """Each kind of grouped product in float64 agrees with torch's in float32."""
    gen = torch.Generator().manual_seed(0)
    offs = torch.tensor([4, 4, 12, 16], dtype=torch.int32)
    shapes = {
        "rows": ((16, 8), (4, 8, 12)),
        "columns": ((4, 8, 12), (12, 16)),
        "inner": ((8, 16), (16, 12)),
        "batched": ((4, 8, 16), (4, 16, 12)),
    }
    a, b = (torch.randn(s, generator=gen) for s in shapes[name])
    ends = None if name == "batched" else offs
    expected = F.grouped_mm(a, b, offs=ends)
    with Float64():
        result = F.grouped_mm(a.double(), b.double(), offs=ends)
    assert result.dtype == torch.float64
    assert (result - expected).abs().max() < 1e-5


def test_the_copy_is_whole_and_the_original_untouched() -> None:
    """The copy has float64 tensors, ties and frozen flags; the original is unchanged."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    model.extra, model.several = torch.ones(1), [torch.ones(1), 3]
    old_state = copy.deepcopy(model.state_dict())
    twin = as_float64(model)
    kinds = {v.dtype for v in twin.state_dict().values()}
    assert kinds == {torch.float64, torch.int64}
    assert twin[0].weight is twin[2].weight and not twin[0].bias.requires_grad
    assert twin.extra.dtype == twin.several[0].dtype == torch.float64
    assert all(torch.equal(v, old_state[k]) for k, v in model.state_dict().items())
    assert model[0].weight.dtype == model.extra.dtype == torch.float32


def test_widened_keeps_structure() -> None:
    """Floats in nested structures become float64; integers and other values are kept."""
    widened = to_float64(
        {"x": torch.ones(1), "n": [torch.ones(1, dtype=torch.int64), "a"], "t": (1.5,)}
    )
    assert widened["x"].dtype == torch.float64 and widened["n"][0].dtype == torch.int64
    assert widened["n"][1] == "a" and widened["t"] == (1.5,)
