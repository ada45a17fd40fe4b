"""Decoding with keys and values that are split over ranks by tokens.

Every rank computes the few new tokens, and attends to the keys in its own cache; the ranks' results
are combined by the log-sum-exp of their scores, with one all-gather for each attention (Dao et al.:
Flash-Decoding, 2023; Shyam et al.: Tree Attention, 2024).  A rank caches its tokens of the prompt;
each later token is cached on the rank with the fewest tokens, so that the numbers of tokens become
equal, to within one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from schedlang.runtime import scope
from schedlang.runtime.comm.collectives import Group, all_gather
from schedlang.runtime.context_parallel.attention import apply_sinks
from schedlang.runtime.context_parallel.local_attention import (
    BlockRules,
    BlockwiseForward,
    PlacedTokens,
)
from schedlang.runtime.context_parallel.local_tokens import AttentionMethod
from schedlang.runtime.context_parallel.ring import softmax_shares
from schedlang.runtime.context_parallel.token_layout import PositionMask, SequenceLayout, TokenTags

SCORES = 2**16  # scores per block, for each row and head


class CacheAssignment:
    """The assignment of tokens to the caches of ranks; all ranks compute the same assignment.

    positions  of this rank's cached tokens, in cache order
    """

    def __init__(self, rank: int, ranks: int, device: torch.device) -> None:
        self.place, self.counts = rank, [0] * ranks
        self.positions = torch.empty(0, dtype=torch.int64, device=device)

    def assign_prompt(self, layout: SequenceLayout, tokens: int) -> Tensor:
        """Assign the first `tokens` tokens by a layout.

        Returns the indices of this rank's tokens among its tokens of the layout.
        """
        rank_indices = range(len(layout.runs))
        real_tokens = [layout.positions(rank) < tokens for rank in rank_indices]
        self.counts = [int(mask.sum()) for mask in real_tokens]
        local = real_tokens[self.place].nonzero()[:, 0].to(self.positions.device)
        self.positions = layout.positions(self.place, local.device)[local]
        return local

    def assign_new(self, tokens: int) -> Tensor:
        """Assign further tokens; return the indices of those that this rank caches."""
        cached, local = sum(self.counts), list[int]()
        for token in range(tokens):
            rank = min(range(len(self.counts)), key=self.counts.__getitem__)
            self.counts[rank] += 1
            if rank == self.place:
                local.append(token)
        indices = torch.tensor(local, dtype=torch.int64, device=self.positions.device)
        self.positions = torch.cat([self.positions, indices + cached])
        return indices


@dataclass(eq=False)
class Decoding:
    """A forward of new tokens, which all ranks compute, over keys that are split over the ranks.

    key_positions  positions of this rank's keys, in cache order
    cached_tokens  the indices of the new tokens that this rank caches
    shapes         for shapes only, without communication
    returned       keys and values that the cache has returned to attentions that have not used them
                   yet
    """

    key_positions: Tensor
    cached_tokens: Tensor
    shapes: bool = False
    returned: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    layout = None  # outputs are replicated
    more = False

    def on_meta(self) -> Decoding:
        """Return the decoding for shapes only, without communication."""
        return Decoding(self.key_positions, self.cached_tokens, shapes=True)

    def is_from_cache(self, key: Tensor, value: Tensor) -> bool:
        """Return whether keys and values are the cache's own tensors; forget these tensors."""
        matches = [k for k, (a, b) in enumerate(self.returned) if a is key and b is value]
        for k in reversed(matches):
            del self.returned[k]
        return bool(matches)

    def attend(
        self,
        method: AttentionMethod,
        tensors: tuple[Tensor, Tensor, Tensor],
        mask: Tensor | None,
        rules: BlockRules,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute the attention of the new tokens to all ranks' keys: [rows, heads, new, size].

        tensors  queries; keys and values of this rank, whose number of heads divides the queries'
        mask     [rows or 1, heads or 1, new or 1, tokens of the sequence], booleans or numbers that
                 are added; None: all keys are visible
        rules    scale and cap of the scores
        """
        query, key, value = tensors
        if self.shapes:
            return query.new_empty((*query.shape[:-1], value.shape[-1]))
        with torch._C.DisableTorchFunction():
            out, lse = self._attend_local(query, key, value, mask, rules)
            for group in reversed(method.groups):
                out, lse = combine_ranks(out, lse, group)
            return apply_sinks(out, lse, sinks).to(query.dtype)

    def _attend_local(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rules: BlockRules
    ) -> tuple[Tensor, Tensor]:
        """Attend to this rank's keys, in cache order; the mask is selected by their positions."""
        num_queries, num_keys = query.shape[2], key.shape[2]
        rows = None if mask is None else mask.index_select(-1, self.key_positions)
        rules = BlockRules(
            PositionMask(), rules.scale, rules.cap, rows=rows, block=max(1, SCORES // num_queries)
        )
        query_tokens = PlacedTokens((range(num_queries),), TokenTags())
        state = BlockwiseForward(rules, query, query_tokens, value.shape[-1])
        if num_keys:
            state.add(key, value, PlacedTokens((range(num_keys),), TokenTags()))
        return state.out, state.lse


def combine_ranks(out: Tensor, lse: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Combine the results of a group's ranks for the same queries, by one all-gather."""
    if group.size == 1:
        return out, lse
    gathered = all_gather(torch.cat([out, lse[..., None]], -1)[None], 0, group)
    all_lse = gathered[..., -1]
    return (gathered[..., :-1] * softmax_shares(all_lse)[..., None]).sum(0), all_lse.logsumexp(0)


def current_decoding() -> Decoding | None:
    """Return the decoding that this thread runs; None if it runs another forward."""
    visit: Any = scope.current_visit()
    return visit if isinstance(visit, Decoding) else None
