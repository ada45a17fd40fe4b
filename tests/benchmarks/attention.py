"""Split attention over torch's own: python -m tests.benchmarks.attention [--tokens N] [--pairs N]

Forward and backward of one causal attention in float32, tokens over two ranks.  The other side is
what one writes with torch: keys and values gathered with all_gather_tensor_autograd, then
scaled_dot_product_attention of the own queries under their rows of the causal mask.  Both run in
the same processes, step by step in turn; beside the ratio stand the bytes that a rank sends.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.nn import functional as F

from schedlang.runtime.comm.collectives import Group, listen_to_collectives
from schedlang.runtime.context_parallel.attention import AttentionOptions, attend
from schedlang.runtime.context_parallel.token_layout import AttentionMask, SequenceLayout
from schedlang.runtime.launch.pool import Pool
from tests.benchmarks.pairs import Ratio, interleaved

RANKS = 2


@dataclass(frozen=True)
class Sizes:
    """One attention: tokens of the whole sequence."""

    tokens: int = 2048
    heads: int = 8
    kv_heads: int = 2
    width: int = 64
    pairs: int = 10


def given(sizes: Sizes) -> list[Tensor]:
    """Queries, keys, values and a gradient of the whole sequence."""
    generator = torch.Generator().manual_seed(0)
    heads = (sizes.heads, sizes.kv_heads, sizes.kv_heads, sizes.heads)
    return [torch.randn(1, n, sizes.tokens, sizes.width, generator=generator) for n in heads]


def ours(sizes: Sizes, method: str, kind: str) -> tuple[SequenceLayout, Callable[[], Any]]:
    """A step of ours, and where its tokens lie."""
    rank = dist.get_rank()
    group = Group(("cp",), tuple(range(RANKS)), rank, dist.group.WORLD)
    layout = SequenceLayout.of_kind(kind, sizes.tokens, RANKS)
    *leaves, grad = (layout.take(t, 2, rank) for t in given(sizes))
    q, k, v = (t.requires_grad_() for t in leaves)

    def step() -> list[Tensor]:
        mask = AttentionMask(causal=True)
        out = attend(q, k, v, mask, AttentionOptions(method, (group,), layout))
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]

    return layout, step


def theirs(sizes: Sizes) -> tuple[SequenceLayout, Callable[[], Any]]:
    """The same as one writes it with torch; tokens in runs."""
    rank, layout = dist.get_rank(), SequenceLayout.of_kind("contiguous", sizes.tokens, RANKS)
    *leaves, grad = (layout.take(t, 2, rank) for t in given(sizes))
    q, k, v = (t.requires_grad_() for t in leaves)
    seen = torch.ones(sizes.tokens, sizes.tokens, dtype=torch.bool).tril()
    rows = layout.take(seen, 0, rank)

    def step() -> list[Tensor]:
        whole = [all_gather_tensor_autograd(t, 2, dist.group.WORLD) for t in (k, v)]
        out = F.scaled_dot_product_attention(q, *whole, rows, enable_gqa=True)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]

    return layout, step


def _measured(sizes: Sizes, method: str, kind: str) -> tuple[Ratio, int]:
    torch.set_num_threads(1)
    (layout, mine), (line, other) = ours(sizes, method, kind), theirs(sizes)
    _agree(layout, mine(), line, other())
    sent = 0

    def listen(name: str, group: Group, size: int) -> None:
        nonlocal sent
        sent += size if name == "send" else size * (RANKS - 1) // RANKS

    with listen_to_collectives(listen):
        mine()
    return interleaved(mine, other, sizes.pairs, warm=1)[0], sent


def _agree(
    layout: SequenceLayout, mine: list[Tensor], line: SequenceLayout, other: list[Tensor]
) -> None:
    """Both sides compute the same attention."""
    for one, two in zip(mine, other):
        sides = []
        for tensor, order in ((one, layout), (two, line)):
            parts = [torch.empty_like(tensor) for _ in range(RANKS)]
            dist.all_gather(parts, tensor.contiguous())
            sides.append(order.concatenate(parts, 2))
        torch.testing.assert_close(*sides, rtol=1e-3, atol=1e-4)


def main() -> None:
    """Print one line for each method."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=Sizes.tokens)
    parser.add_argument("--pairs", type=int, default=Sizes.pairs)
    sizes = Sizes(**vars(parser.parse_args()))
    print(f"{sizes}, {RANKS} ranks: step time over torch's, and bytes sent by a rank")
    with Pool() as pool:
        for method in ("gather", "ring", "ulysses"):
            for kind in ("contiguous", "zigzag", "striped"):
                ratio, sent = pool.run(_measured, RANKS, sizes, method, kind, hang_after=300.0)[0]
                print(f"{method:8} {kind:11} {ratio}   {sent:,}", flush=True)


if __name__ == "__main__":
    main()
