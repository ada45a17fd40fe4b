"""What is found of a module holds for equal ones, and for no others."""

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
    """A part that knows its place, and perhaps computes with it."""

    def __init__(self, place: int, reads: Callable[[Any, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.layer_idx, self.reads = place, reads
        self.norm = nn.RMSNorm(4, eps=1e-6)

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        """With a cache, which probes do not give, it tells it its place."""
        if cache is not None:
            cache.update(x, self.layer_idx)
        if self.reads is not None:
            x = self.reads(self, x)
        made: Tensor = self.norm(x)
        return made


WAYS = [
    lambda m, x: x * (m.layer_idx + 1),
    lambda m, x: x[torch.full((1,), m.layer_idx) * 0],
    lambda m, x: x * 2 if isinstance(m.layer_idx, int) else x,
    lambda m, x: x * getattr(m, "layer_idx", 1),
    lambda m, x: x if hasattr(m, "layer_idx") else -x,
]


@pytest.mark.parametrize("reads", [None, *WAYS])
def test_equal_modules_are_judged_once(reads: Any) -> None:
    """Those that differ in their place alone, unless something reads it: then each by itself."""
    known: dict[Any, Any] = {}
    real, x = [], torch.ones(1, 4)

    def probe(module: nn.Module) -> Any:
        if type(module) is Layer:
            real.append(module)
        return copy.copy(module)(x)

    layers = [Layer(place, reads) for place in range(3)]
    found = [probe_once(layer, probe, known, "test") for layer in layers for _ in range(2)]
    assert len({id(one) for one in found}) == (1 if reads is None else 3)
    assert real == ([] if reads is None else layers)  # what reads its place is asked as it is
    assert all(torch.equal(one, layer(x)) for one, layer in zip(found[::2], layers))


def test_a_mismatch_is_the_modules_own() -> None:
    """No twin of a module refuses it."""
    asked = []

    def probe(module: nn.Module) -> Any:
        asked.append(type(module) is Layer)
        return Mismatch("never fits")

    known: dict[Any, Any] = {}
    assert isinstance(probe_once(Layer(0), probe, known, "test"), Mismatch)
    assert asked == [False, True]


def test_a_twin_is_the_module() -> None:
    """It has the module's class, parameters and answers, inside of others too, and notes alone."""
    whole = nn.Sequential(Layer(0), Layer(1))
    twin, read = record_position_reads(whole)
    assert [type(part).__name__ for part in twin] == ["Layer", "Layer"]
    assert all(a is b for a, b in zip(whole.parameters(), twin.parameters(), strict=True))
    x = torch.randn(2, 4)
    assert torch.equal(twin(x), whole(x)) and not read
    assert twin[1].layer_idx == 1 and read == ["layer_idx"]
    twin[1].layer_idx = 5
    assert twin[1].layer_idx == 5 and whole[1].layer_idx == 1 and type(whole[1]) is Layer


class Chosen(nn.Module):
    """A gated MLP whose activation is a child."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        """As transformers' MLPs are written."""
        made: Tensor = self.down(self.act(self.gate(x)) * self.up(x))
        return made


def acts(*parts: nn.Module) -> list[str]:
    """What a row of all parts finds of each."""
    sch = schedlang.create_schedule(nn.Sequential(*parts))
    sch["*"].replace_kernel("gated")
    plan = sch.plan()
    row = plan.actions[0].primitive
    return [row._probe(plan.model.sites[f"{n}"], plan).act for n in range(len(parts))]


def test_modules_that_differ_in_what_they_hold_are_judged_apart() -> None:
    """Two of one class with the same sizes, whose activation is another child or function."""
    assert acts(Chosen(nn.SiLU()), Chosen(nn.GELU()), Chosen(nn.SiLU())) == ["silu", "gelu", "silu"]
    first = Mlp(lambda m, x: m.three(F.silu(m.one(x)) * m.two(x)))
    second = Mlp(lambda m, x: m.three(F.relu(m.one(x)) * m.two(x)))
    assert acts(first, second) == ["silu", "relu"]
    with pytest.raises(Refusal, match="S410"):
        acts(Chosen(nn.SiLU()), Chosen(nn.Softplus()))


class Block(nn.Module):
    """A norm after a sum."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(8, eps=eps), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Sum and norm."""
        made: Tensor = self.norm(x + self.linear(x))
        return made


def test_children_count() -> None:
    """Layers whose norms differ in a number are judged apart."""
    sch = schedlang.create_schedule(nn.Sequential(Block(1e-6), Block(1e-3)))
    sch["*"].replace_kernel("add_norm")
    plan = sch.plan()
    row: Any = plan.actions[0].primitive
    found = [row._probe(plan.model.sites[name], plan).norms["norm"].form.eps for name in "01"]
    assert found == [1e-6, 1e-3]


def test_ties_and_hooks_count() -> None:
    """What is tied, or watched by a hook, may be told where the same of its own is not."""
    plain, tied, shared, hooked = (Chosen(nn.SiLU()) for _ in range(4))
    tied.up.weight = tied.gate.weight
    shared.up = shared.gate
    hooked.act.register_forward_hook(lambda module, args, out: 2 * out)
    keys = [module_key(one) for one in (plain, tied, shared, hooked)]
    assert len(set(keys)) == 4 and module_key(Chosen(nn.SiLU())) == keys[0]
