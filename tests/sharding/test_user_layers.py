"""Layers as users write them, which shapes alone once did not get through; found by random models.

One module under two names, a module that itself refuses a shard, divisions by numbers that are
read from tensors, and an `autograd.Function` that computes with a parameter.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine import Threads
from tests.proofs import assert_proven, make_plan, refusal_text


class Pair(nn.Module):
    """A residual pair of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Read(nn.Module):
    """A layer that divides by what it reads of its input, or by how often it ran."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.down = way, nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4, momentum=None) if way == "count" else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "largest":
            x = x * (1 / x.detach().abs().max().item())
        if self.way == "mean":
            x = x / float(x.detach().square().mean())
        return x + self.down(self.norm(x))


class ClipFunction(torch.autograd.Function):
    """Clip elements to a learned bound."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bound: Tensor) -> Tensor:
        ctx.save_for_backward(x, bound)
        return torch.minimum(torch.maximum(x, -bound), bound)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, bound = ctx.saved_tensors
        inside = x.abs() <= bound
        return grads[0] * inside, (grads[0] * x.sign() * ~inside).sum().view_as(bound)


class Clipped(nn.Module):
    """A residual layer that clips what it adds."""

    def __init__(self) -> None:
        super().__init__()
        self.bound, self.down = nn.Parameter(torch.tensor(0.3)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + ClipFunction.apply(self.down(x), self.bound)  # type: ignore[no-any-return, no-untyped-call]


class Layered(nn.Module):
    """Layers one after the other, and a mean of squares."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def _batches(*shape: int) -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    return [{"x": torch.randn(*shape, dtype=torch.float64)} for _ in range(3)]


@pytest.mark.parametrize(
    "rows, mesh",
    [
        ("layers.*.up  shard(col, over=tp)\nlayers.*.down  shard(row, over=tp)", "tp=2"),
        (
            "layers.*.down  shard(col, output=R, over=tp)\nzero(stage=3, over=dp)",
            "dp=2, tp=2",
        ),
    ],
)
def test_a_module_with_two_names_is_sharded_once(threads: Threads, rows: str, mesh: str) -> None:
    """What S506 proposes, the same row for both names, is legal and equals the original."""
    torch.manual_seed(0)
    first, second = Pair(), Pair()
    model = Layered(first, second, first).double()
    assert_proven(threads, make_plan(model, rows, mesh), _batches(5, 4))
    half = rows.replace("layers.*", "layers.0")
    assert "S506" in refusal_text(model, half, mesh, _batches(5, 4)[0])


def test_a_module_that_refuses_a_shard_is_placed() -> None:
    """Instance norm checks its channels before torch computes: the row, the axis, the model's line
    and what would be legal are told as for a call that fails."""
    model = Layered(nn.Conv1d(8, 8, 3, padding=1), nn.InstanceNorm1d(8, affine=True)).double()
    text = refusal_text(model, "layers.0  shard(col, over=tp)", "tp=4", _batches(4, 8, 5)[0])
    assert "S405" in text and "`tp` shard" in text and "rows.sched:" in text
    assert "test_user_layers.py:" in text and "`output=R`" in text


@pytest.mark.parametrize("way", ["count", "largest", "mean"])
@pytest.mark.parametrize(
    "rows, mesh",
    [
        ("layers.*.down  checkpoint()", ""),
        ("layers  pipeline_split(over=pp)", "pp=2"),
        ("layers.*.down  shard(col, output=R, over=tp)", "tp=2"),
    ],
)
def test_what_divides_by_what_it_reads(threads: Threads, way: str, rows: str, mesh: str) -> None:
    """A number that shapes do not tell is none to divide by in vain: the model is not rejected."""
    torch.manual_seed(0)
    model = Layered(Read(way), Read(way)).double()
    assert_proven(threads, make_plan(model, rows, mesh), _batches(6, 4))


def test_a_function_of_the_user_uses_a_parameter_in_a_sharded_region(threads: Threads) -> None:
    """In its forward torch builds no graph, but the parameter's gradient is a part on each rank."""
    torch.manual_seed(0)
    rows = "layers.0  shard(input=S(1), over=tp)\nlayers.1  shard(output=R, over=tp)"
    model = Layered(Clipped(), Clipped()).double()
    assert_proven(threads, make_plan(model, rows, "tp=2"), _batches(3, 6, 4))
