"""Split attention against torch's: python -m tests.benchmarks.attention [--tokens N] [--pairs N]

Forward and backward of one causal attention in float32, tokens split over two ranks.  The torch
side gathers keys and values with all_gather_tensor_autograd, and runs
scaled_dot_product_attention of the local queries with their rows of the causal mask.  Both run in
the same processes, alternately; the ratio of times and the bytes that a rank sends are printed.
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
from tests.benchmarks.pairs import Ratio, interleaved_ratios

RANKS = 2


@dataclass(frozen=True)
class Sizes:
    """Sizes of one attention; `tokens` of the full sequence."""

    tokens: int = 2048
    heads: int = 8
    kv_heads: int = 2
    width: int = 64
    pairs: int = 10


def make_inputs(sizes: Sizes) -> list[Tensor]:
    """Return queries, keys, values and an output gradient of the full sequence."""
    generator = torch.Generator().manual_seed(0)
    heads = (sizes.heads, sizes.kv_heads, sizes.kv_heads, sizes.heads)
    return [torch.randn(1, n, sizes.tokens, sizes.width, generator=generator) for n in heads]


def schedlang_attn(
    sizes: Sizes, method: str, kind: str
) -> tuple[SequenceLayout, Callable[[], Any]]:
    """Return the token layout and the step of schedlang's attention."""
    rank = dist.get_rank()
    group = Group(("cp",), tuple(range(RANKS)), rank, dist.group.WORLD)
    layout = SequenceLayout.of_kind(kind, sizes.tokens, RANKS)
    *leaves, grad = (layout.take(t, 2, rank) for t in make_inputs(sizes))
    q, k, v = (t.requires_grad_() for t in leaves)

    def step() -> list[Tensor]:
        mask = AttentionMask(causal=True)
        output = attend(q, k, v, mask, AttentionOptions(method, (group,), layout))
        return [output.detach(), *torch.autograd.grad(output, (q, k, v), grad)]

    return layout, step


def torch_attn(sizes: Sizes) -> tuple[SequenceLayout, Callable[[], Any]]:
    """Return the layout and the step written with torch; tokens are contiguous."""
    rank, layout = dist.get_rank(), SequenceLayout.of_kind("contiguous", sizes.tokens, RANKS)
    *leaves, grad = (layout.take(t, 2, rank) for t in make_inputs(sizes))
    q, k, v = (t.requires_grad_() for t in leaves)
    causal = torch.ones(sizes.tokens, sizes.tokens, dtype=torch.bool).tril()
    rows = layout.take(causal, 0, rank)

    def step() -> list[Tensor]:
        gathered = [all_gather_tensor_autograd(t, 2, dist.group.WORLD) for t in (k, v)]
        out = F.scaled_dot_product_attention(q, *gathered, rows, enable_gqa=True)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]

    return layout, step


def _measure(sizes: Sizes, method: str, kind: str) -> tuple[Ratio, int]:
    torch.set_num_threads(1)
    (layout, schedlang_step), (torch_layout, torch_step) = (
        schedlang_attn(sizes, method, kind),
        torch_attn(sizes),
    )
    _assert_equal(layout, schedlang_step(), torch_layout, torch_step())
    sent = 0

    def listen(name: str, group: Group, size: int) -> None:
        nonlocal sent
        sent += size if name == "send" else size * (RANKS - 1) // RANKS

    with listen_to_collectives(listen):
        schedlang_step()
    return interleaved_ratios(schedlang_step, torch_step, sizes.pairs, warm=1)[0], sent


def _assert_equal(
    layout: SequenceLayout,
    schedlang_out: list[Tensor],
    torch_layout: SequenceLayout,
    torch_out: list[Tensor],
) -> None:
    """Assert that both sides compute the same attention."""
    for left, right in zip(schedlang_out, torch_out):
        full_tensors = []
        for tensor, order in ((left, layout), (right, torch_layout)):
            parts = [torch.empty_like(tensor) for _ in range(RANKS)]
            dist.all_gather(parts, tensor.contiguous())
            full_tensors.append(order.concatenate(parts, 2))
        torch.testing.assert_close(*full_tensors, rtol=1e-3, atol=1e-4)


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
                ratio, sent = pool.run(_measure, RANKS, sizes, method, kind, hang_after=300.0)[0]
                print(f"{method:8} {kind:11} {ratio}   {sent:,}", flush=True)


if __name__ == "__main__":
    main()
