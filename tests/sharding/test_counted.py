"""Modules that compute head counts from the width of their input run with a shard of the heads."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.passes.propagate.propagate import propagate
from schedlang.runtime.forward import wrap
from schedlang.runtime.sharding.module_sizes import SizeArgument, SizesLayer
from tests.engine.threads import Threads
from tests.proofs import assert_near, make_plan, refusal_text, train_on_ranks, train_sequential


class Nano(nn.Module):
    """Attention as in nanoGPT: packed q, k, v, and `C // heads` as the size of a head."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.qkv(x).split(self.width, dim=2)
        q, k, v = (t.view(B, T, self.heads, C // self.heads).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.drop(self.out(y.transpose(1, 2).contiguous().view(B, T, C)))


class Packed(Nano):
    """The same as in vision transformers: one view into q, k, v and heads."""

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        qkv = self.qkv(x).reshape(B, T, 3, self.heads, x.shape[-1] // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-2, -1) * (C // self.heads) ** -0.5
        y = self.drop(scores.softmax(-1)) @ v
        return self.out(y.transpose(1, 2).reshape(B, T, C))


class Pictures(nn.Module):
    """Attention over the pixels of pictures, whose channels are dim 1."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Conv2d(width, width, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        q, k, v = (
            part(x).view(b, self.heads, c // self.heads, h * w).transpose(-2, -1)
            for part in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(-2, -1).reshape(b, c, h, w))


class Net(nn.Module):
    """A block of attention with its residual, twice."""

    def __init__(self, make: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(make() for _ in range(2))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


FUSED = "blocks.*.qkv  shard(col, blocks=3, over=tp)\nblocks.*.out  shard(row, over=tp)"
SEPARATE = "blocks.*.{q,k,v}  shard(col, over=tp)\nblocks.*.out  shard(row, over=tp)"
CASES = [(Nano, FUSED, (4, 6, 16)), (Packed, FUSED, (4, 6, 16)), (Pictures, SEPARATE, (4, 8, 3, 5))]


def batches(*shape: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(*shape, generator=generator).double()} for _ in range(2)]


@pytest.mark.parametrize(("make", "rows", "shape"), CASES)
@pytest.mark.parametrize("more", ["", "\nblocks.*  checkpoint()"])
def test_equals_the_original(
    threads: Threads, make: type[nn.Module], rows: str, shape: tuple[int, ...], more: str
) -> None:
    """Losses, gradients and steps equal the original's, with dropout and recomputation."""
    net = Net(make)
    plan = make_plan(net, rows + more, "tp=2")
    observed = train_on_ranks(threads, plan, batches(*shape), seed=3)
    assert_near(observed, train_sequential(net, batches(*shape), seed=3))


def test_only_what_is_split_counts_by_parts() -> None:
    """Only the attentions read the width of their inputs as that of a shard."""
    traced = propagate(make_plan(Net(Nano), FUSED, "tp=2"), batches(4, 6, 16)[0])
    assert dict(traced.counted_sizes) == {
        f"blocks.{k}": (SizeArgument("x", -1, 2),) for k in range(2)
    }
    assert {(a, v) for _, a, v in traced.local_numbers} == {("heads", 2), ("width", 8)}


class Reader(nn.Module):
    """Reads sizes in its own code, in a comprehension, and in a module that it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: nn.Module | None = None

    def forward(self, x: Tensor) -> tuple[object, ...]:
        sizes = x.size(), x.size(-1), x.size(dim=1), x.shape, [x.shape[-1] for _ in range(1)]
        copied_shape = x.clone().shape
        return (*sizes, copied_shape, self.inside(x) if self.inside is not None else None)


def test_nobody_else_reads_parts() -> None:
    """Only the module's own code reads the local size of that tensor; others read the full size."""
    module = Reader()
    module.inside = Reader()
    wrap(module, "sizes", SizesLayer(module, (SizeArgument("x", -1, 2),)))
    full = (2, 6)
    for reader in (module, copy.deepcopy(module)):
        *sizes, copied_shape, inside = reader(torch.zeros(2, 6))
        assert sizes == [(2, 3), 3, 3, (2, 3), [3]] and copied_shape == full
        assert inside[:4] == (full, 6, 6, full)


def test_what_lies_side_by_side_is_offered() -> None:
    """The refusal of a packed projection offers `blocks=3`."""
    rows = FUSED.replace("blocks=3, ", "")
    message = refusal_text(Net(Packed), rows, "tp=2", batches(4, 6, 16)[0])
    assert "S403" in message and "`blocks.0.qkv shard(col, over=tp, blocks=3)`" in message, message


class Fixed(Nano):
    """The number of heads is a constant in the code."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.qkv(x).chunk(3, -1)[0]
        return self.out(q.view(4, 6, 4, 4).flatten(2))


def test_a_number_in_the_code_is_refused_at_its_line() -> None:
    """A constant number of heads is refused at its line, with a help to write -1."""
    message = refusal_text(Net(Fixed), FUSED, "tp=2", batches(4, 6, 16)[0])
    line = f"test_counted.py:{inspect.getsourcelines(Fixed)[1] + 5}"
    assert "S405" in message and f"`blocks.0`, at {line}" in message, message
    assert "`blocks.0` needs the full tensor, but gets a `tp` shard" in message
    assert f"write -1 in place of the number of heads, or of their size, at {line}" in message
