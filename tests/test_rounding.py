"""Tests of rounding: another order of sums passes in low precision, small mistakes do not."""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from schedlang.passes.observe import Observation, conditions, observe
from schedlang.passes.original import Sequential
from schedlang.passes.rounding import within_rounding
from schedlang.report import Report
from schedlang.runtime.float64 import Float64, as_float64, widened
from schedlang.runtime.modes import ambient


class Halved(nn.Module):
    """A linear layer that sums two halves of its inputs, the second with a factor."""

    def __init__(self, inner: nn.Linear, factor: float) -> None:
        super().__init__()
        self.weight, self.bias, self.factor = inner.weight, inner.bias, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (a, b), (v, w) = x.chunk(2, -1), self.weight.chunk(2, 1)
        return a @ v.T + self.factor * (b @ w.T) + self.bias


def _seen(dtype: torch.dtype, *, exact: bool = False, factor: float | None = None) -> Observation:
    """The same weights and batches, rounded to `dtype`, computed so or in float64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 16)).to(dtype)
    batches: Any = [{"input": torch.randn(8, 32).to(dtype)} for _ in range(3)]
    if factor is not None:
        model = nn.Sequential(Halved(model[0], factor), model[1], Halved(model[2], factor))
    if exact:
        model, batches = as_float64(model), widened(batches)

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        return output.square().mean()

    def make(condition: Any) -> Sequential:
        return Sequential(copy.deepcopy(model), condition.optimizer, loss=loss, clip=condition.clip)

    with ambient(Float64()) if exact else nullcontext():
        return observe(make, conditions(batches, 1.0))


@pytest.mark.parametrize(
    ("dtype", "wrong"), [(torch.float32, 1 + 1e-5), (torch.bfloat16, 1.1)], ids=["fp32", "bf16"]
)
def test_rounding_passes_and_a_wrong_factor_fails(dtype: torch.dtype, wrong: float) -> None:
    """The gate follows the precision: what is nothing in bfloat16 is a mistake in float32."""
    exact, plain = _seen(dtype, exact=True), _seen(dtype)
    good = Report(within_rounding(exact, plain, _seen(dtype, factor=1.0)))
    assert good.ok, str(good)
    bad = Report(within_rounding(exact, plain, _seen(dtype, factor=wrong)))
    assert bad.first is not None and bad.first.kind == "outputs in working dtype"


def test_what_is_missing_fails() -> None:
    """A tensor that the program does not have, or NaN, never passes."""
    exact, plain = _seen(torch.float32, exact=True), _seen(torch.float32)
    for key, value in exact.tensors.items():
        if key.kind == "gradients" and value is not None:
            for spoiled in (None, torch.full_like(plain.tensors[key], torch.nan)):
                program = Observation({**plain.tensors, key: spoiled})
                assert Report(within_rounding(exact, plain, program)).exit_code == 1
