"""Distributed attention against dense attention in one process, in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from schedlang.diagnostic import Refusal
from schedlang.runtime.attend import Layout, Mask, attend, place_of, ranks_of
from schedlang.runtime.collective import Group
from tests.engine import Threads

ROWS, HEADS, TOKENS = 2, 4, 13
CASES = [("gather", (3,)), ("ring", (3,)), ("double ring", (2, 2)), ("ulysses", (2,)),
         ("usp", (2, 2))]  # fmt: skip


def groups_of(sizes: tuple[int, ...]) -> tuple[Group, ...]:
    """This rank's group along each dim of a grid of all ranks."""
    grid = torch.arange(math.prod(sizes)).view(sizes)
    found = []
    for dim in range(len(sizes)):
        for ranks in grid.movedim(dim, -1).reshape(-1, sizes[dim]).tolist():
            pg: Any = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                group = Group((f"axis{dim}",), tuple(ranks), ranks.index(dist.get_rank()), pg)
                found.append(group)
    return tuple(found)


def inputs() -> dict[str, Tensor]:
    """q, k, v and a gradient; two heads of keys, values of another width."""
    torch.manual_seed(0)
    shapes = {"q": (HEADS, TOKENS, 5), "k": (2, TOKENS, 5), "v": (2, TOKENS, 3),
              "grad": (HEADS, TOKENS, 3)}  # fmt: skip
    return {n: torch.randn(ROWS, *s, dtype=torch.float64) for n, s in shapes.items()}


def _rank(method: str, sizes: tuple[int, ...], kind: str) -> list[Tensor]:
    groups = groups_of(sizes)
    layout, place = Layout.of(kind, TOKENS, ranks_of(groups)), place_of(groups)
    mine = {name: layout.take(t, 2, place).requires_grad_() for name, t in inputs().items()}
    leaves = [mine[name] for name in "qkv"]
    q, k, v = leaves
    out = attend(q, k, v, Mask(causal=True), method=method, groups=groups, layout=layout)
    return [out.detach(), *torch.autograd.grad(out, leaves, mine["grad"].detach())]


def _dense() -> list[Tensor]:
    given = inputs()
    leaves = [given[name].requires_grad_() for name in "qkv"]
    k, v = (t.repeat_interleave(2, 1) for t in leaves[1:])
    scores = leaves[0] @ k.mT / math.sqrt(5)
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    out = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v
    return [out.detach(), *torch.autograd.grad(out, leaves, given["grad"])]


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("method, sizes", CASES)
def test_it_is_attention(method: str, sizes: tuple[int, ...], kind: str, threads: Threads) -> None:
    """Every method gives dense attention and its gradients, for tokens in any layout."""
    found = threads.run(_rank, math.prod(sizes), method, sizes, kind)
    layout = Layout.of(kind, TOKENS, math.prod(sizes))
    for parts, expected in zip(zip(*found), _dense()):
        torch.testing.assert_close(layout.whole(parts, 2), expected, rtol=0, atol=1e-13)


def test_short_sequences_are_refused() -> None:
    """Every rank needs a token; the message says how many are needed."""
    with pytest.raises(Refusal, match="give sequences of 4 tokens or more") as refused:
        Layout.of("zigzag", 3, 4)
    assert refused.value.diagnostic.code == "S680"


def _undivided() -> str:
    groups = groups_of((3,))
    layout = Layout.of("contiguous", TOKENS, 3)
    mine = [layout.take(inputs()[name], 2, groups[0].rank) for name in "qkv"]
    with pytest.raises(Refusal) as refused:
        attend(*mine, Mask(), method="ulysses", groups=groups, layout=layout)  # type: ignore[misc]
    return str(refused.value)


def test_heads_that_ulysses_cannot_divide_are_refused(threads: Threads) -> None:
    """The message names the heads, the ranks, the numbers that work, and the ring."""
    for said in threads.run(_undivided, 3):
        for words in ("S681", "4 heads between 3 ranks", "2 or 4 ranks", "context_parallel(ring"):
            assert words in said, said
