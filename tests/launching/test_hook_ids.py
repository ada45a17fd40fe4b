"""Hooks of models from other processes: their ids do not collide with new hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from schedlang.runtime.launch.pool import Pool
from schedlang.runtime.tracing.meta_runs import meta_model
from tests.proofs import assert_proven, make_plan


class HookedLayers(nn.Module):
    """Layers whose weights are computed by a hook before each forward, as in old weight norms."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(3))
        for layer in self.layers:
            layer.scale = nn.Parameter(torch.full((6, 1), 1.5))
            layer.direction = nn.Parameter(layer.weight.detach().clone())
            del layer.weight
            layer.register_forward_pre_hook(set_weight)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x**2).mean()


def set_weight(layer: Any, args: Any) -> None:
    """Set the weight of a layer, as a plain attribute."""
    layer.weight = layer.scale * layer.direction


def batch(seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(6, 6, generator=draw, dtype=torch.float64)}


@pytest.fixture
def numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restart the hook ids, as in a process without hooks."""
    monkeypatch.setattr(RemovableHandle, "next_id", 0)


@pytest.mark.parametrize("stage", [1, 3])
def test_hooks_of_a_model_that_was_sent(stage: int, pool: Pool, numbers: None) -> None:
    """Ranks add their own hooks to modules that already have some."""
    plan = make_plan(HookedLayers(), f"zero(stage={stage}, over=dp)", "dp=2")
    assert_proven(pool, plan, [batch(1), batch(2)])


def test_hooks_of_a_model_that_was_loaded(numbers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model from `torch.load` has hooks with ids that are free here."""
    model = HookedLayers()
    monkeypatch.setattr(RemovableHandle, "next_id", 0)
    meta_model(model, {})  # the first meta model of all
    called: list[Any] = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda one, args: called.append(one))
    model(**batch(0))
    assert len(called) == 3
    assert all(hasattr(layer, "weight") for layer in model.layers)
