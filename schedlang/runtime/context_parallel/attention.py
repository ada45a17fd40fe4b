"""Attention over a sequence that is split over ranks: every method, as functions of tensors.

    layout = Layout.of("zigzag", total=8192, ranks=4)
    mine = layout.take(tokens, dim=1, place=place_of(groups))
    out = attend(q, k, v, Mask(causal=True), Way("ring", (group,), layout))

q is [batch, heads, local tokens, head_dim]; k and v may have fewer heads, v another head_dim.
All functions are differentiable; on meta tensors they count the bytes that they would send.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.comm.collectives import Group
from schedlang.runtime.context_parallel.local_attention import (
    BLOCK_TOKENS,
    BlockRules,
    PlacedTokens,
)
from schedlang.runtime.context_parallel.ring import (
    GatheredKeys,
    KeyTransfers,
    NestedRing,
    Packet,
    RingAttention,
    RingCall,
    TeamRing,
    all_gather_packets,
    exchange_tensors,
)
from schedlang.runtime.context_parallel.token_layout import (
    AttentionDropout,
    AttentionMask,
    Runs,
    SequenceLayout,
    TokenTags,
    concatenate_runs,
    place_at,
)
from schedlang.runtime.device import send_to_device

# method -> the possible numbers of groups; the outermost group comes first
METHODS: dict[str, tuple[int, ...]] = {
    "gather": (1,),  # keys and values of all ranks at once
    "ring": (1,),  # one block after the other
    "double ring": (2,),  # ring of nodes, ring inside each
    "ulysses": (1,),  # all-to-all between tokens and heads
    "usp": (2, 3),  # ring, or double ring, outside; Ulysses inside
    "nbody": (2,),  # a ring of teams, whose ranks share its steps
}


def ranks_of(groups: Sequence[Group]) -> int:
    """Return the number of ranks that the sequence is split over."""
    return math.prod(group.size for group in groups)


def place_of(groups: Sequence[Group]) -> int:
    """Return this rank's place in a Layout over all groups; the last group varies fastest."""
    return place_at([group.rank for group in groups], [group.size for group in groups])


@dataclass(frozen=True)
class AttentionOptions:
    """The options of an attention call over ranks.

    method   a key of `METHODS`
    groups   as many as `METHODS` says, the outermost first
    layout   the tokens of each place
    scale    factor of the scores; 1/sqrt(head_dim) if None
    dropout  dropout of the weights
    block    queries and keys per block of scores, for each row and head
    """

    method: str
    groups: tuple[Group, ...]
    layout: SequenceLayout
    scale: float | None = None
    dropout: AttentionDropout | None = None
    block: int = BLOCK_TOKENS

    @property
    def place(self) -> int:
        """This rank's place in the layout."""
        return place_of(self.groups)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, opts: AttentionOptions) -> Tensor:
    """Compute the attention of this rank's queries to the keys of the full sequence.

    q        [rows, heads, local tokens, head_dim], this place's tokens under the layout
    k, v     as many tokens; their number of heads divides q's
    mask     its tensors of tokens are this rank's; `slopes` are those of all of q's heads, and
             their gradient is partial: that of this rank's queries, to be summed over the groups

    Returns [rows, heads, local tokens, v's head_dim] in q's dtype.  Raises Refusal S681 for heads
    that Ulysses cannot split.
    """
    return _attend(q, k, v, mask, opts, False)[0]


def attend_lse(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, opts: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Compute `attend`, and the log-sum-exp of each query's scores [rows, heads, local tokens].

    The log-sum-exp is -inf for a query that sees no key, does not include `sinks`, and is
    differentiable.
    """
    return _attend(q, k, v, mask, opts, True)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, opts: AttentionOptions, with_lse: bool
) -> tuple[Tensor, Tensor]:
    _check(q, k, v, opts)
    scale = q.shape[-1] ** -0.5 if opts.scale is None else opts.scale
    rules = BlockRules(
        mask.reach, scale, mask.cap, mask.slopes, mask.rows, opts.dropout, opts.block
    )
    if opts.method in ("ulysses", "usp"):
        return _attend_ulysses(q, k, v, mask, rules, opts, with_lse)
    tokens = PlacedTokens(opts.layout.runs[opts.place], mask.tags)
    if opts.method == "nbody":
        ring, team = opts.groups
        team_ring = TeamRing(ring, team, opts.layout)
        if mask.rows is not None and mask.rows.shape[2] == 1:
            rules = replace(rules, rows=mask.rows.expand(-1, -1, q.shape[2], -1))
        tokens = PlacedTokens(team_ring.layout.runs[ring.rank], mask.tags)
        return _run(q, k, v, rules, mask.sinks, team_ring, tokens)
    rounds: KeyTransfers = NestedRing(opts.groups, opts.layout, mask.reach)
    if opts.method == "gather":
        rounds = GatheredKeys(opts.groups[0], opts.layout)
    return _run(q, k, v, rules, mask.sinks, rounds, tokens)


def _attend_ulysses(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    rules: BlockRules,
    opts: AttentionOptions,
    with_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Attend by Ulysses over the innermost group, around a ring over the other groups, if any.

    Without `with_lse` the log-sum-exp is not sent back, and stays in the layout of local heads.
    """
    *outer, inner = opts.groups
    layout = opts.layout
    check_heads(q.shape[1], k.shape[1], inner.size)
    k, v = repeat_heads(k, inner.size), repeat_heads(v, inner.size)
    outer_rank, joined = place_of(outer), layout.join_places(inner.size)
    team = Ulysses(inner, layout, outer_rank, joined.runs[outer_rank])
    local_heads = q.shape[1] // inner.size
    heads = slice(inner.rank * local_heads, (inner.rank + 1) * local_heads)
    rules = replace(
        rules,
        slopes=None if mask.slopes is None else mask.slopes[heads],
        rows=None if mask.rows is None else team.rows(mask.rows, q.shape[1]),
        dropout=None if rules.dropout is None else rules.dropout.of_heads(heads),
    )
    sinks = None if mask.sinks is None else mask.sinks[heads]
    tokens = PlacedTokens(joined.runs[outer_rank], team.tags(mask.tags))
    ring = NestedRing(tuple(outer), joined, rules.reach)
    out, lse = _run(team.heads(q), team.heads(k), team.heads(v), rules, sinks, ring, tokens)
    return team.tokens(out), team.tokens(lse[..., None])[..., 0] if with_lse else lse


def check_heads(heads: int, kv_heads: int, ranks: int) -> None:
    """Raise Refusal S681 unless `ranks` divides `heads`; key-value heads are copied as needed."""
    if heads % ranks:
        divisors = [n for n in range(2, heads + 1) if heads % n == 0]
        raise Refusal.of(
            "S681",
            f"Ulysses cannot divide {heads} heads between {ranks} ranks",
            notes=(f"{kv_heads} heads of keys and values would be copied as needed",),
            helps=(
                *([f"an axis of {' or '.join(map(str, divisors))} ranks"] if divisors else []),
                "or a ring, which does not split heads: `context_parallel(ring, ...)`",
                "or a ring around a smaller Ulysses: `context_parallel(usp, ...)`",
            ),
        )


def _check(q: Tensor, k: Tensor, v: Tensor, opts: AttentionOptions) -> None:
    assert len(opts.groups) in METHODS[opts.method], (opts.method, len(opts.groups))
    assert ranks_of(opts.groups) == len(opts.layout.runs), "the layout is over all of their ranks"
    tokens = opts.layout.counts[opts.place]
    assert q.shape[2] == k.shape[2] == v.shape[2] == tokens, (q.shape, k.shape, v.shape, tokens)
    assert q.shape[1] % k.shape[1] == 0 and k.shape[1] == v.shape[1], (q.shape, k.shape, v.shape)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rules: BlockRules,
    sinks: Tensor | None,
    rounds: KeyTransfers,
    tokens: PlacedTokens,
) -> tuple[Tensor, Tensor]:
    call = RingCall(replace(rules, slopes=None, rows=None), rounds, tokens.runs)
    results = RingAttention.apply(q, k, v, rules.slopes, rules.rows, call, *tokens.tags)  # type: ignore[no-untyped-call]
    out, lse = cast(tuple[Tensor, Tensor], results)
    return apply_sinks(out, lse, sinks), lse


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """Scale a result for sinks, which take part in the softmax and have no values.

    `lse` is the log-sum-exp of the scores without sinks.
    """
    if sinks is None:
        return out
    share = (lse - sinks[:, None].to(lse.dtype)).sigmoid()
    return out * share[..., None].to(out.dtype)


# -- Ulysses ---------------------------------------------------------------------------------------
# From a shard of the tokens with all heads to all tokens with a shard of the heads, and back: one
# all-to-all each (Jacobs et al.: DeepSpeed-Ulysses, 2023); each is the backward of the other.


class _HeadsAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, team: Ulysses, to_heads: bool) -> Tensor:
        ctx.team, ctx.to_heads = team, to_heads
        with torch._C.DisableTorchFunction():
            return _to_heads(x, team) if to_heads else _to_tokens(x, team)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        with torch._C.DisableTorchFunction():
            exchange = _to_tokens if ctx.to_heads else _to_heads
            return exchange(grads[0], ctx.team), None, None


class Ulysses:
    """The all-to-alls of a Ulysses group, and the order of its ranks' tokens.

    arrived  the tokens as they arrive, rank after rank
    wanted   the same tokens in the order of the sequence
    """

    def __init__(self, group: Group, layout: SequenceLayout, outer: int, joined: Runs) -> None:
        self.group = group
        first = outer * group.size
        self.counts = layout.counts[first : first + group.size]
        rank_runs = layout.runs[first : first + group.size]
        self.arrived: Runs = tuple(run for runs in rank_runs for run in runs)
        self.wanted: Runs = tuple(joined)

    def heads(self, x: Tensor) -> Tensor:
        """Turn [rows, heads, local tokens, width] to [rows, local heads, group's tokens, width]."""
        return cast(Tensor, _HeadsAllToAll.apply(x, self, True))  # type: ignore[no-untyped-call]

    def tokens(self, x: Tensor) -> Tensor:
        """Apply the inverse of `heads`."""
        return cast(Tensor, _HeadsAllToAll.apply(x, self, False))  # type: ignore[no-untyped-call]

    def tags(self, tags: TokenTags) -> TokenTags:
        """All-gather the tags of the group's tokens."""
        used = [t for t in tags if t is not None]
        if not used:
            return tags
        parts = all_gather_packets(Packet.pack(used, [1] * len(used)), self.counts, self.group)
        full_tags = iter(
            [
                self.to_sequence_order(torch.cat(tag_parts, 1), 1)
                for tag_parts in zip(*(p.tensors for p in parts))
            ]
        )
        return TokenTags(*(None if t is None else next(full_tags) for t in tags))

    def rows(self, rows: Tensor, heads: int) -> Tensor:
        """Return `Mask.rows` for the group's tokens and this rank's heads.

        `rows` is [rows or 1, heads or 1, local tokens or 1, keys], `heads` the number of all heads.
        """
        if rows.shape[2] == 1:  # replicated
            local_heads = heads // self.group.size
            first = self.group.rank * local_heads
            return rows if rows.shape[1] == 1 else rows[:, first : first + local_heads]
        if rows.shape[1] == 1 and not rows.requires_grad:
            parts = all_gather_packets(Packet.pack([rows], [2]), self.counts, self.group)
            return self.to_sequence_order(torch.cat([p.tensors[0] for p in parts], 2), 2)
        rows = rows.expand(-1, heads, -1, -1)
        if rows.dtype == torch.bool:
            return self.heads(rows.to(torch.uint8)).bool()
        return self.heads(rows)

    def to_sequence_order(self, x: Tensor, dim: int) -> Tensor:
        """Reorder tokens along a dim from the order of arrival to the order of the sequence."""
        orders = _orders(self.arrived, self.wanted, x.device)
        return x if orders is None else x.index_select(dim, orders[0])

    def to_arrival_order(self, x: Tensor, dim: int) -> Tensor:
        """Apply the inverse of `to_sequence_order`."""
        orders = _orders(self.arrived, self.wanted, x.device)
        return x if orders is None else x.index_select(dim, orders[1])


@lru_cache(maxsize=64)  # for 64 lengths of sequences: each order is sent to the device once
def _orders(arrived: Runs, target_runs: Runs, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Return the index of arrival of each wanted token, and the inverse; None if orders agree."""
    with torch._C.DisableTorchFunction(), torch.inference_mode(False):
        order = _find_order(concatenate_runs(arrived), concatenate_runs(target_runs))
        return (
            None
            if order is None
            else (send_to_device(order, device), send_to_device(order.argsort(), device))
        )


def _find_order(arrived: Tensor, target: Tensor) -> Tensor | None:
    if torch.equal(arrived, target):
        return None
    by_position = arrived.argsort()
    return by_position[torch.searchsorted(arrived[by_position], target)]


def _to_heads(x: Tensor, team: Ulysses) -> Tensor:
    rows, heads, _, width = x.shape
    local_heads = heads // team.group.size
    shapes = [(rows, local_heads, tokens, width) for tokens in team.counts]
    parts = exchange_tensors(x.chunk(team.group.size, 1), shapes, team.group)
    return team.to_sequence_order(torch.cat(parts, 2), 2)


def _to_tokens(x: Tensor, team: Ulysses) -> Tensor:
    rows, heads, _, width = x.shape
    tokens = team.counts[team.group.rank]
    parts_in = torch.split(team.to_arrival_order(x, 2), list(team.counts), 2)
    parts = exchange_tensors(parts_in, [(rows, heads, tokens, width)] * team.group.size, team.group)
    return torch.cat(parts, 1)


def count_head_copies(kv_heads: int, ranks: int) -> int:
    """Return the least number of copies of each key-value head such that `ranks` divides them."""
    return math.lcm(kv_heads, ranks) // kv_heads


def repeat_heads(x: Tensor, ranks: int) -> Tensor:
    """Repeat each head of keys or values [rows, heads, ..] as often as `ranks` need.

    The gradient of a head is the sum of its copies' gradients.
    """
    copies = count_head_copies(x.shape[1], ranks)
    return x if copies == 1 else x.repeat_interleave(copies, 1)
