"""Modules that compute their weight by a norm over all of it: refused for that reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm

from tests.proofs import refusal_text

ROWS = "up  shard(col, over=tp)\ndown  shard(row, over=tp)"


class Net(nn.Module):
    """Up, with a norm of its weight, and down."""

    def __init__(self, norm: Callable[[nn.Module], nn.Module], bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = norm(nn.Linear(6, 8, bias=bias)), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.down(torch.tanh(self.up(x))).square().mean()
        return loss


@pytest.mark.parametrize(
    "norm", [spectral_norm, parametrizations.spectral_norm, parametrizations.weight_norm]
)
def test_a_weight_that_is_computed_is_named(norm: Callable[[nn.Module], nn.Module]) -> None:
    """The refusal says that there is no weight, not that weight and bias differ."""
    text = refusal_text(Net(norm), ROWS, "tp=2")
    assert "S407" in text and "`up` computes its weight" in text and "leave `up` out" in text
    assert "use a style" not in text


@pytest.mark.parametrize("bias, style", [(False, "col"), (False, "row"), (True, "row")])
def test_a_row_that_would_shard_nothing_says_so(bias: bool, style: str) -> None:
    """Without a bias that the style splits, the row would do nothing."""
    text = refusal_text(
        Net(parametrizations.weight_norm, bias), f"up  shard({style}, over=tp)", "tp=2"
    )
    assert "S407" in text and "nothing would be sharded" in text
