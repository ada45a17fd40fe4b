"""Cases of distributed attention, what a rank computes, and the same written densely."""

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
)  # of each token; what else is a tensor is of heads


@dataclass(frozen=True)
class Case:
    """One attention, how it is spread, and the seed of its numbers."""

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
        """Of the world."""
        return math.prod(self.sizes)


@st.composite
def cases(draw: Any, methods: Sequence[str] = tuple(SIZES)) -> Case:
    """Any attention that is legal."""
    method = draw(st.sampled_from(methods))
    sizes = draw(st.sampled_from(SIZES[method]))
    ranks, team = math.prod(sizes), sizes[-1] if method in ("ulysses", "usp") else 1
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    heads = math.lcm(kv_heads, team) * draw(st.sampled_from([1, 2]))
    near = st.none() | st.integers(0, 6)
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
        draw(near),
        draw(near),
        draw(st.none() | st.integers(2, 6)),
        draw(st.none() | st.just(2.0)),
        draw(st.none() | st.just(0.7)),
        frozenset(draw(st.sets(st.sampled_from(extras), max_size=4))),
        draw(st.integers(0, 99)),
    )


def groups_of(sizes: tuple[int, ...]) -> tuple[Group, ...]:
    """This rank's group along each dim of a grid of all ranks."""
    grid = torch.arange(math.prod(sizes)).view(sizes)
    found = []
    for dim, size in enumerate(sizes):
        for ranks in grid.movedim(dim, -1).reshape(-1, size).tolist():
            pg: Any = dist.new_group(ranks) if size > 1 else None
            if dist.get_rank() in ranks:
                group = Group((f"axis{dim}",), tuple(ranks), ranks.index(dist.get_rank()), pg)
                found.append(group)
    return tuple(found)


def whole(case: Case) -> dict[str, Tensor]:
    """All tensors of a case, whole: q, k, v, the gradient of the result, and what the mask has."""
    generator = torch.Generator().manual_seed(case.seed)
    rows, tokens = case.rows, case.tokens

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def upto(limit: int, *shape: int) -> Tensor:
        return torch.randint(limit, shape, generator=generator)

    made = {
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
    wanted = case.has - ({"dense"} if "bias" in case.has else set())
    return {n: t for n, t in made.items() if n in {"q", "k", "v", "grad", *wanted}}


LEAVES = ("q", "k", "v", "bias", "slopes", "sinks")  # the last ones are alike on all ranks


def rank(case: Case, block: int = 512) -> list[Tensor]:
    """On a rank: the result for its tokens, and the gradient of every leaf that the case has."""
    groups = groups_of(case.sizes)
    layout = SequenceLayout.of_kind(case.kind, case.tokens, ranks_of(groups))
    mine = part(case, layout, place_of(groups))
    leaves = [mine[name].requires_grad_() for name in LEAVES if name in mine]
    out = attended(case, mine, groups, layout, block)
    return [out.detach(), *torch.autograd.grad(out, leaves, mine["grad"])]


def attended(
    case: Case,
    mine: dict[str, Tensor],
    groups: tuple[Group, ...],
    layout: SequenceLayout,
    block: int = 512,
) -> Tensor:
    """The call itself."""
    mask = AttentionMask(
        case.causal,
        case.back,
        case.ahead,
        case.chunk,
        cap=case.cap,
        rows=mine.get("bias", mine.get("dense")),
        **{name: mine.get(name) for name in (*TAGS, "slopes", "sinks")},
    )
    way = AttentionOptions(case.method, groups, layout, case.scale, block=block)
    return attend(mine["q"], mine["k"], mine["v"], mask, way)


def part(case: Case, layout: SequenceLayout, place: int) -> dict[str, Tensor]:
    """What one place holds of the tensors of a case."""
    dims = dict.fromkeys(TAGS, 1) | dict.fromkeys(("q", "k", "v", "grad", "bias", "dense"), 2)
    return {
        name: layout.take(t, dims[name], place) if name in dims else t
        for name, t in whole(case).items()
    }


def joined(case: Case, found: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """What ranks found, put together: the tokens of all, or the sum."""
    layout = SequenceLayout.of_kind(case.kind, case.tokens, case.ranks)
    names = [name for name in LEAVES if name in whole(case)]
    split = [True, *(name not in ("slopes", "sinks") for name in names)]
    return [
        layout.concatenate(parts, 2) if along else torch.stack(list(parts)).sum(0)
        for parts, along in zip(zip(*found), split, strict=True)
    ]


def dense(case: Case) -> list[Tensor]:
    """The same in one process: every score, by the books."""
    given = whole(case)
    leaves = [given[name].requires_grad_() for name in LEAVES if name in given]
    out = _dense(case, given)
    return [out.detach(), *torch.autograd.grad(out, leaves, given["grad"])]


def _dense(case: Case, given: dict[str, Tensor]) -> Tensor:
    share = case.heads // case.kv_heads
    k, v = (given[name].repeat_interleave(share, 1) for name in "kv")
    scale = 1 / math.sqrt(case.widths[0]) if case.scale is None else case.scale
    scores = torch.einsum("bhqd,bhkd->bhqk", given["q"], k) * scale
    if case.cap is not None:
        scores = case.cap * torch.tanh(scores / case.cap)
    scores = scores + given.get("bias", 0)
    far = torch.arange(case.tokens)[:, None] - torch.arange(case.tokens)
    if "slopes" in given:
        at = given.get("alibi_positions")
        apart = far if at is None else (at[:, :, None] - at[:, None, :])[:, None]
        scores = scores - given["slopes"].view(-1, 1, 1) * apart.abs()
    seen = visible(case, far) & given.get("dense", torch.tensor(True))
    if "documents" in given:
        seen = seen & (given["documents"][:, None, :, None] == given["documents"][:, None, None])
    if "present" in given:
        seen = seen & given["present"][:, None, None]
    scores = scores.masked_fill(~seen, -math.inf)
    top = scores.amax(-1, keepdim=True).clamp(min=-1e9).detach()
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    if "sinks" in given:
        blind = ~seen.any(-1, keepdim=True)
        sunk = (given["sinks"].view(-1, 1, 1) - top).masked_fill(blind, 0)
        total = total + sunk.exp()
    return torch.einsum("bhqk,bhkd->bhqd", weights / total.where(total > 0, 1.0), v)


def visible(case: Case, far: Tensor) -> Tensor:
    """Who sees whom by positions; `far` is how far each query is after each key."""
    seen = torch.ones_like(far, dtype=torch.bool)
    if case.causal:
        seen &= far >= 0
    elif case.ahead is not None:
        seen &= -far <= case.ahead
    if case.back is not None:
        seen &= far <= case.back
    if case.chunk is not None:
        block = torch.arange(case.tokens) // case.chunk
        seen &= block[:, None] == block
    return seen
