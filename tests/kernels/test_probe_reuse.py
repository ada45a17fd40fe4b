"""Reuse of probe results: equal modules are probed once, different ones separately."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import schedlang
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.kernels.probe import Mismatch, module_key, probe_once, record_position_reads
from tests.kernels.test_gated import Mlp


class Layer(nn.Module):
    """A module that stores its index, and may compute with it."""

    def __init__(self, index: int, reads: Callable[[Any, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.layer_idx, self.reads = index, reads
        self.norm = nn.RMSNorm(4, eps=1e-6)

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        """Tell a cache, which probes do not give, its index."""
        if cache is not None:
            cache.update(x, self.layer_idx)
        if self.reads is not None:
            x = self.reads(self, x)
        out: Tensor = self.norm(x)
        return out


PLACE_READS = [
    lambda m, x: x * (m.layer_idx + 1),
    lambda m, x: x[torch.full((1,), m.layer_idx) * 0],
    lambda m, x: x * 2 if isinstance(m.layer_idx, int) else x,
    lambda m, x: x * getattr(m, "layer_idx", 1),
    lambda m, x: x if hasattr(m, "layer_idx") else -x,
]


@pytest.mark.parametrize("reads", [None, *PLACE_READS])
def test_equal_modules_are_judged_once(reads: Any) -> None:
    """Modules that differ only in their index, unless something reads it: then each is probed."""
    cache: dict[Any, Any] = {}
    probed, x = [], torch.ones(1, 4)

    def probe(module: nn.Module) -> Any:
        if type(module) is Layer:
            probed.append(module)
        return copy.copy(module)(x)

    layers = [Layer(index, reads) for index in range(3)]
    results = [probe_once(layer, probe, cache, "test") for layer in layers for _ in range(2)]
    assert len({id(result) for result in results}) == (1 if reads is None else 3)
    assert probed == ([] if reads is None else layers)  # reads its index: no copy
    assert all(torch.equal(result, layer(x)) for result, layer in zip(results[::2], layers))


def test_a_mismatch_is_the_modules_own() -> None:
    """A mismatch found on a copy is checked on the module itself."""
    is_original = []

    def probe(module: nn.Module) -> Any:
        is_original.append(type(module) is Layer)
        return Mismatch("never fits")

    cache: dict[Any, Any] = {}
    assert isinstance(probe_once(Layer(0), probe, cache, "test"), Mismatch)
    assert is_original == [False, True]


def test_a_twin_is_the_module() -> None:
    """The copy has the module's class, parameters and results, also inside other modules."""
    model = nn.Sequential(Layer(0), Layer(1))
    twin, names_read = record_position_reads(model)
    assert [type(child).__name__ for child in twin] == ["Layer", "Layer"]
    assert all(a is b for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    x = torch.randn(2, 4)
    assert torch.equal(twin(x), model(x)) and not names_read
    assert twin[1].layer_idx == 1 and names_read == ["layer_idx"]
    twin[1].layer_idx = 5
    assert twin[1].layer_idx == 5 and model[1].layer_idx == 1 and type(model[1]) is Layer


class MlpWithActivation(nn.Module):
    """A gated MLP whose activation is a child."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        """Compute as transformers' MLPs do."""
        out: Tensor = self.down(self.act(self.gate(x)) * self.up(x))
        return out


def matched_activations(*parts: nn.Module) -> list[str]:
    """Return the activation that a row for all parts finds in each."""
    sch = schedlang.create_schedule(nn.Sequential(*parts))
    sch["*"].replace_kernel("gated")
    plan = sch.plan()
    primitive = plan.actions[0].primitive
    return [primitive._probe(plan.model.sites[f"{n}"], plan).act for n in range(len(parts))]


def test_modules_that_differ_in_what_they_hold_are_judged_apart() -> None:
    """Same class and sizes, but another activation, as a child or a function."""
    assert matched_activations(
        MlpWithActivation(nn.SiLU()), MlpWithActivation(nn.GELU()), MlpWithActivation(nn.SiLU())
    ) == ["silu", "gelu", "silu"]
    first = Mlp(lambda m, x: m.three(F.silu(m.one(x)) * m.two(x)))
    second = Mlp(lambda m, x: m.three(F.relu(m.one(x)) * m.two(x)))
    assert matched_activations(first, second) == ["silu", "relu"]
    with pytest.raises(Refusal, match="S410"):
        matched_activations(MlpWithActivation(nn.SiLU()), MlpWithActivation(nn.Softplus()))


class Block(nn.Module):
    """A norm after a sum."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(8, eps=eps), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of a sum."""
        out: Tensor = self.norm(x + self.linear(x))
        return out


def test_children_count() -> None:
    """Layers whose norms differ in a number are probed separately."""
    sch = schedlang.create_schedule(nn.Sequential(Block(1e-6), Block(1e-3)))
    sch["*"].replace_kernel("add_norm")
    plan = sch.plan()
    primitive: Any = plan.actions[0].primitive
    epsilons = [
        primitive._probe(plan.model.sites[name], plan).norms["norm"].form.eps for name in "01"
    ]
    assert epsilons == [1e-6, 1e-3]


def test_ties_and_hooks_count() -> None:
    """Tied weights, shared children and hooks make a module different."""
    plain, tied, shared, hooked = (MlpWithActivation(nn.SiLU()) for _ in range(4))
    tied.up.weight = tied.gate.weight
    shared.up = shared.gate
    hooked.act.register_forward_hook(lambda module, args, out: 2 * out)
    keys = [module_key(module_variant) for module_variant in (plain, tied, shared, hooked)]
    assert len(set(keys)) == 4 and module_key(MlpWithActivation(nn.SiLU())) == keys[0]
