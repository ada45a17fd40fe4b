"""A sharded projection combined with an unsharded one: the refusal names the missing row."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.propagate.propagate import propagate
from tests.proofs import make_plan

WIDTH, WIDE = 8, 16


class Adapted(nn.Module):
    """A projection and a low-rank adapter, as PEFT wraps them."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base_layer = nn.Linear(inputs, outputs)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(inputs, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, outputs, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        low_rank = self.lora_B["default"](self.lora_A["default"](x))
        output: Tensor = self.base_layer(x) + 2.0 * low_rank
        return output


class MLP(nn.Module):
    """Two adapted layers, each between a projection up and one down."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": Adapted(WIDTH, WIDE), "down": nn.Linear(WIDE, WIDTH)})
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleDict)
            x = layer["down"](layer["up"](x).relu())
        return x.square().mean()


BASE = "layers.*.up.base_layer  shard(col, over=tp)\nlayers.*.down  shard(row, over=tp)"
BATCH = {"x": torch.randn(4, WIDTH)}


def test_the_second_matrix_of_an_adapter_is_named() -> None:
    """The refusal offers a row for LoRA's B in every layer; with this row the plan is legal."""
    with pytest.raises(Refusal) as caught:
        propagate(make_plan(MLP(), BASE, "tp=2"), BATCH)
    diagnostic = caught.value.diagnostic
    assert diagnostic.code == "S405" and "layers.0.up" in diagnostic.title
    offered = re.findall("what it is combined with, too: `(.*?)`", diagnostic.helps[0])
    assert len(offered) == 1 and offered[0].startswith("layers.*.up.lora_B.default  shard(")
    propagate(make_plan(MLP(), f"{BASE}\n{offered[0]}", "tp=2"), BATCH)


class Gated(nn.Module):
    """A layer that adds its projection to its input, in place or not."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.writes = writes

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x.clone())
        if self.writes:
            x += h
            return self.down(h)
        return self.down(x + h)


class Gates(nn.Module):
    """Layers whose inputs are read again after them."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Gated(writes) for _ in range(2))
        self.enter = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x) + x
        return x.square().mean()


def test_a_part_that_is_written_into() -> None:
    """A module that modifies its sharded argument in place is refused: the caller would still read
    the old full tensor. A module that only reads it is legal."""
    rows = "layers.*.up  shard(col, over=tp)\nlayers.*.down  shard(row, over=tp)"
    propagate(make_plan(Gates(False), rows, "tp=2"), BATCH)
    with pytest.raises(Refusal, match=r"S405(.|\n)*`x` is changed in place"):
        propagate(make_plan(Gates(True), rows, "tp=2"), BATCH)
