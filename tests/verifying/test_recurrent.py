"""Recurrent networks with dropout between layers: masks are logical and equal on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedlang.runtime.launch.pool import Pool
from schedlang.runtime.modes import enter_modes
from schedlang.runtime.rng.logical_dropout import LogicalDropout
from schedlang.runtime.scope import Scope, enter_scope
from tests.proofs import assert_proven, make_plan


class Net(nn.Module):
    """A recurrent network between two projections."""

    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn = kind(6, 5, num_layers=3, dropout=0.4, **options)
        self.head = nn.Linear(10 if options.get("bidirectional") else 5, 4)
        self.first = options.get("batch_first", False)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.rnn(x if self.first else x.transpose(0, 1))
        mean: Tensor = self.head(states).square().mean()
        return mean


def _batch(seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(6, 7, 6, generator=torch.Generator().manual_seed(seed))}


KINDS = [
    (nn.LSTM, {"batch_first": True}),
    (nn.LSTM, {"bidirectional": True}),
    (nn.GRU, {"batch_first": True, "bidirectional": True}),
    (nn.RNN, {}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_layer_by_layer_is_what_torch_computes(kind: Any, options: dict[str, Any]) -> None:
    """With a vanishing dropout rate the layer-by-layer computation equals torch's."""
    net = Net(kind, **options).double()
    x = _batch(1)["x"].double()
    net.rnn.dropout = 0.0
    expected = net.rnn(x)
    net.rnn.dropout = 1e-15
    dropout = LogicalDropout(0)
    with enter_modes(dropout), enter_scope(Scope(0, 0, tuple(range(6 if net.first else 7)))):
        actual = net.rnn(x if net.first else x)
    assert dropout.drawn == 2
    for expected_leaf, actual_leaf in zip(
        torch.utils._pytree.tree_leaves(expected), torch.utils._pytree.tree_leaves(actual)
    ):
        assert torch.allclose(expected_leaf, actual_leaf, rtol=1e-12, atol=1e-12)


def test_dropout_between_layers_is_proven(pool: Pool) -> None:
    """Replicas with dropout between layers draw the masks of the original."""
    net = Net(nn.LSTM, bidirectional=True)
    report = assert_proven(
        pool, make_plan(net, "zero(stage=1, over=dp)", "dp=2"), [_batch(1), _batch(2)]
    )
    assert any(row.kind == "dropout draws" for row in report.rows)
