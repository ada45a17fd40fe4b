"""Test cases of distributed attention: what each rank computes, and a dense reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor

from schedlang.runtime.comm.collectives import Group
from schedlang.runtime.context_parallel.attention import (
    AttentionOptions,
    attend,
    place_of,
    ranks_of,
)
from schedlang.runtime.context_parallel.token_layout import AttentionMask, SequenceLayout

SIZES = {
    "gather": [(1,), (2,), (3,)],
    "ring": [(2,), (3,), (4,)],
    "double ring": [(2, 2), (1, 3), (2, 3)],
    "ulysses": [(2,), (3,), (4,)],
    "usp": [(2, 2), (1, 2), (2, 1), (3, 2), (2, 2, 2)],
    "nbody": [(2, 2), (4, 2), (3, 1), (3, 2), (1, 2)],
}
KINDS = ["contiguous", "zigzag", "striped"]
TAGS = (
    "documents",
    "present",
    "alibi_positions",
)  # one value for each token; other tensors belong to heads


@dataclass(frozen=True)
class Case:
    """One attention: its method, group sizes, masks, and the seed of its numbers."""

    method: str
    sizes: tuple[int, ...]
    kind: str = "zigzag"
    tokens: int = 13
    rows: int = 2
    heads: int = 4
    kv_heads: int = 2
    widths: tuple[int, int] = (5, 3)
    causal: bool = True
    back: int | None = None
    ahead: int | None = None
    chunk: int | None = None
    cap: float | None = None
    scale: float | None = None
    has: frozenset[str] = frozenset()  # documents, present, counted, slopes, sinks, bias, dense
    seed: int = 0

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes)


@st.composite
def cases(draw: Any, methods: Sequence[str] = tuple(SIZES)) -> Case:
    """Strategy: any legal attention."""
    method = draw(st.sampled_from(methods))
    sizes = draw(st.sampled_from(SIZES[method]))
    ranks, group_size = math.prod(sizes), sizes[-1] if method in ("ulysses", "usp") else 1
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    heads = math.lcm(kv_heads, group_size) * draw(st.sampled_from([1, 2]))
    window = st.none() | st.integers(0, 6)
    extras = ["documents", "present", "alibi_positions", "slopes", "sinks", "bias", "dense"]
    return Case(
        method,
        sizes,
        draw(st.sampled_from(KINDS)),
        draw(st.integers(ranks, ranks + 14)),
        draw(st.integers(1, 2)),
        heads,
        kv_heads,
        draw(st.sampled_from([(4, 4), (5, 3)])),
        draw(st.booleans()),
        draw(window),
        draw(window),
        draw(st.none() | st.integers(2, 6)),
        draw(st.none() | st.just(2.0)),
        draw(st.none() | st.just(0.7)),
        frozenset(draw(st.sets(st.sampled_from(extras), max_size=4))),
        draw(st.integers(0, 99)),
    )


def groups_of(sizes: tuple[int, ...]) -> tuple[Group, ...]:
    """This rank's group along each dim of a grid of all ranks."""
    grid = torch.arange(math.prod(sizes)).view(sizes)
    groups = []
    for dim, size in enumerate(sizes):
        for ranks in grid.movedim(dim, -1).reshape(-1, size).tolist():
            pg: Any = dist.new_group(ranks) if size > 1 else None
            if dist.get_rank() in ranks:
                group = Group((f"axis{dim}",), tuple(ranks), ranks.index(dist.get_rank()), pg)
                groups.append(group)
    return tuple(groups)


def full_tensors(case: Case) -> dict[str, Tensor]:
    """All full tensors of a case: q, k, v, the gradient of the result, and those of its mask."""
    generator = torch.Generator().manual_seed(case.seed)
    rows, tokens = case.rows, case.tokens

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def upto(limit: int, *shape: int) -> Tensor:
        return torch.randint(limit, shape, generator=generator)

    tensors = {
        "q": drawn(rows, case.heads, tokens, case.widths[0]),
        "k": drawn(rows, case.kv_heads, tokens, case.widths[0]),
        "v": drawn(rows, case.kv_heads, tokens, case.widths[1]),
        "grad": drawn(rows, case.heads, tokens, case.widths[1]),
        "documents": upto(3, rows, tokens).sort(1).values,
        "present": upto(4, rows, tokens) > 0,
        "alibi_positions": upto(9, rows, tokens),
        "slopes": drawn(case.heads).abs(),
        "sinks": drawn(case.heads),
        "bias": drawn(1, case.heads, tokens, tokens),
        "dense": upto(4, rows, 1, tokens, tokens) > 0,
    }
    names = case.has - ({"dense"} if "bias" in case.has else set())
    return {n: t for n, t in tensors.items() if n in {"q", "k", "v", "grad", *names}}


LEAVES = ("q", "k", "v", "bias", "slopes", "sinks")  # slopes and sinks are the same on all ranks


def run_rank(case: Case, block: int = 512) -> list[Tensor]:
    """On a rank: the result for its tokens, and the gradient of each leaf of the case."""
    groups = groups_of(case.sizes)
    layout = SequenceLayout.of_kind(case.kind, case.tokens, ranks_of(groups))
    local = local_tensors(case, layout, place_of(groups))
    leaves = [local[name].requires_grad_() for name in LEAVES if name in local]
    output = run_attention(case, local, groups, layout, block)
    return [output.detach(), *torch.autograd.grad(output, leaves, local["grad"])]


def run_attention(
    case: Case,
    local: dict[str, Tensor],
    groups: tuple[Group, ...],
    layout: SequenceLayout,
    block: int = 512,
) -> Tensor:
    """Call distributed attention on this rank's tensors; return its output."""
    mask = AttentionMask(
        case.causal,
        case.back,
        case.ahead,
        case.chunk,
        cap=case.cap,
        rows=local.get("bias", local.get("dense")),
        **{name: local.get(name) for name in (*TAGS, "slopes", "sinks")},
    )
    options = AttentionOptions(case.method, groups, layout, case.scale, block=block)
    return attend(local["q"], local["k"], local["v"], mask, options)


def local_tensors(case: Case, layout: SequenceLayout, index: int) -> dict[str, Tensor]:
    """The part of a case's tensors at one place of the sequence layout."""
    dims = dict.fromkeys(TAGS, 1) | dict.fromkeys(("q", "k", "v", "grad", "bias", "dense"), 2)
    return {
        name: layout.take(t, dims[name], index) if name in dims else t
        for name, t in full_tensors(case).items()
    }


def join_results(case: Case, results: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Join the results of all ranks: concatenate tokens, or add up gradients of shared leaves."""
    layout = SequenceLayout.of_kind(case.kind, case.tokens, case.ranks)
    names = [name for name in LEAVES if name in full_tensors(case)]
    split = [True, *(name not in ("slopes", "sinks") for name in names)]
    return [
        layout.concatenate(parts, 2) if is_split else torch.stack(list(parts)).sum(0)
        for parts, is_split in zip(zip(*results), split, strict=True)
    ]


def dense_results(case: Case) -> list[Tensor]:
    """The same results in one process, from dense attention scores."""
    tensors = full_tensors(case)
    leaves = [tensors[name].requires_grad_() for name in LEAVES if name in tensors]
    output = _dense_attention(case, tensors)
    return [output.detach(), *torch.autograd.grad(output, leaves, tensors["grad"])]


def _dense_attention(case: Case, tensors: dict[str, Tensor]) -> Tensor:
    share = case.heads // case.kv_heads
    k, v = (tensors[name].repeat_interleave(share, 1) for name in "kv")
    scale = 1 / math.sqrt(case.widths[0]) if case.scale is None else case.scale
    scores = torch.einsum("bhqd,bhkd->bhqk", tensors["q"], k) * scale
    if case.cap is not None:
        scores = case.cap * torch.tanh(scores / case.cap)
    scores = scores + tensors.get("bias", 0)
    offsets = torch.arange(case.tokens)[:, None] - torch.arange(case.tokens)
    if "slopes" in tensors:
        positions = tensors.get("alibi_positions")
        distances = (
            offsets
            if positions is None
            else (positions[:, :, None] - positions[:, None, :])[:, None]
        )
        scores = scores - tensors["slopes"].view(-1, 1, 1) * distances.abs()
    mask = visible_mask(case, offsets) & tensors.get("dense", torch.tensor(True))
    if "documents" in tensors:
        mask = mask & (
            tensors["documents"][:, None, :, None] == tensors["documents"][:, None, None]
        )
    if "present" in tensors:
        mask = mask & tensors["present"][:, None, None]
    scores = scores.masked_fill(~mask, -math.inf)
    largest = scores.amax(-1, keepdim=True).clamp(min=-1e9).detach()
    weights = (scores - largest).exp()
    total = weights.sum(-1, keepdim=True)
    if "sinks" in tensors:
        sees_nothing = ~mask.any(-1, keepdim=True)
        sink_scores = (tensors["sinks"].view(-1, 1, 1) - largest).masked_fill(sees_nothing, 0)
        total = total + sink_scores.exp()
    return torch.einsum("bhqk,bhkd->bhqd", weights / total.where(total > 0, 1.0), v)


def visible_mask(case: Case, offsets: Tensor) -> Tensor:
    """The mask by positions; the offsets are the position of each query minus that of each key."""
    mask = torch.ones_like(offsets, dtype=torch.bool)
    if case.causal:
        mask &= offsets >= 0
    elif case.ahead is not None:
        mask &= -offsets <= case.ahead
    if case.back is not None:
        mask &= offsets <= case.back
    if case.chunk is not None:
        block = torch.arange(case.tokens) // case.chunk
        mask &= block[:, None] == block
    return mask
