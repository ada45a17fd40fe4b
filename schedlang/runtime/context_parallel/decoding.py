"""Attention of new tokens to keys and values that lie on several ranks, by tokens.

Every rank runs the new tokens, which are few, and attends to the keys that it keeps; what all have
found is joined by the log-sum-exp of their scores, once for each attention (Dao et al.:
Flash-Decoding, 2023; Shyam et al.: Tree Attention, 2024).  Of a prompt a rank keeps the tokens that
it had; each later one is kept where there are fewest, so that ranks keep as many, to within one,
as soon as tokens enough have come.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from schedlang.runtime import scope
from schedlang.runtime.comm.collectives import Group, all_gather
from schedlang.runtime.context_parallel.attention import beside_sinks
from schedlang.runtime.context_parallel.local_attention import Forward, Rules, Tokens
from schedlang.runtime.context_parallel.local_tokens import AttentionMethod
from schedlang.runtime.context_parallel.ring import shares
from schedlang.runtime.context_parallel.token_layout import Layout, Reach, Tags

SCORES = 2**16  # of a row and a head that exist at once


class Turns:
    """The tokens that this rank keeps, at a place among `ranks`; all ranks count alike.

    held  positions of its tokens, as they lie in its memory
    """

    def __init__(self, place: int, ranks: int, device: torch.device) -> None:
        self.place, self.counts = place, [0] * ranks
        self.held = torch.empty(0, dtype=torch.int64, device=device)

    def prompt(self, layout: Layout, tokens: int) -> Tensor:
        """Keep what a layout gives this rank of the first `tokens`; returns where these lie among
        the rank's own."""
        places = range(len(layout.runs))
        there = [layout.positions(place) < tokens for place in places]
        self.counts = [int(some.sum()) for some in there]
        own = there[self.place].nonzero()[:, 0].to(self.held.device)
        self.held = layout.positions(self.place, own.device)[own]
        return own

    def new(self, tokens: int) -> Tensor:
        """Deal tokens that follow; returns which of them this rank keeps."""
        first, own = sum(self.counts), list[int]()
        for token in range(tokens):
            place = min(range(len(self.counts)), key=self.counts.__getitem__)
            self.counts[place] += 1
            if place == self.place:
                own.append(token)
        mine = torch.tensor(own, dtype=torch.int64, device=self.held.device)
        self.held = torch.cat([self.held, mine + first])
        return mine


@dataclass(eq=False)
class Decoding:
    """A forward of new tokens, which all ranks of a sequence have, over keys that each has some of.

    held   positions of the keys here, in the order in which they lie
    own    which of the new tokens are kept here
    given  keys and values that the cache has handed to an attention, which has not joined them yet
    """

    held: Tensor
    own: Tensor
    shapes: bool = False
    given: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    layout = None  # outputs are whole on every rank
    more = False

    def on_meta(self) -> Decoding:
        """The same for shapes only: nothing is exchanged."""
        return Decoding(self.held, self.own, shapes=True)

    def knows(self, key: Tensor, value: Tensor) -> bool:
        """Return whether an attention got what the cache gave, and not what was made of it."""
        found = [k for k, (a, b) in enumerate(self.given) if a is key and b is value]
        for k in reversed(found):
            del self.given[k]
        return bool(found)

    def attend(
        self,
        how: AttentionMethod,
        tensors: tuple[Tensor, Tensor, Tensor],
        mask: Tensor | None,
        rules: Rules,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """The attention of the new tokens to the keys of all ranks: [rows, heads, new, size].

        tensors  queries; keys and values of this rank, with heads that divide those of the queries
        mask     [rows or 1, heads or 1, new or 1, tokens of the sequence], booleans or numbers that
                 are added; None: all keys are seen
        rules    of scores: their scale and cap
        """
        query, key, value = tensors
        if self.shapes:
            return query.new_empty((*query.shape[:-1], value.shape[-1]))
        with torch._C.DisableTorchFunction():
            out, lse = self._own(query, key, value, mask, rules)
            for group in reversed(how.groups):
                out, lse = joined(out, lse, group)
            return beside_sinks(out, lse, sinks).to(query.dtype)

    def _own(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rules: Rules
    ) -> tuple[Tensor, Tensor]:
        """The part of the keys here, by their place in memory: the mask knows their positions."""
        new, kept = query.shape[2], key.shape[2]
        rows = None if mask is None else mask.index_select(-1, self.held)
        rules = Rules(Reach(), rules.scale, rules.cap, rows=rows, block=max(1, SCORES // new))
        at = Tokens((range(new),), Tags())
        state = Forward(rules, query, at, value.shape[-1])
        if kept:
            state.add(key, value, Tokens((range(kept),), Tags()))
        return state.out, state.lse


def joined(out: Tensor, lse: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Join what the ranks of a group have found for the same queries: alike on all, in one
    message."""
    if group.size == 1:
        return out, lse
    found = all_gather(torch.cat([out, lse[..., None]], -1)[None], 0, group)
    each = found[..., -1]
    return (found[..., :-1] * shares(each)[..., None]).sum(0), each.logsumexp(0)


def decoding() -> Decoding | None:
    """The forward of new tokens that this thread runs; None where it runs another."""
    found: Any = scope.visit()
    return found if isinstance(found, Decoding) else None
