"""How ranks that split sequences split what a module saves: the tokens or heads of each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from schedlang.passes.laying.kept_parts import SavedParts, Saving

if TYPE_CHECKING:
    from torch import Tensor

    from schedlang.runtime.attend import Layout


class Split(NamedTuple):
    """What of a tensor a rank has.

    tokens  the dim of tokens that is split as sequences are, None: all tokens are there
    heads   whether dim 1 is split into equal runs of heads
    copies  how often each head of dim 1 is there for one of the rank's (keys of several queries)
    """

    tokens: int | None = None
    heads: bool = False
    copies: int = 1


@dataclass(frozen=True)
class TokenParts:
    """How the ranks that split sequences split what coded modules save.

    splits  (coded module, module that saves) -> for each tensor that a call saves there, in order
    """

    ranks: int
    kind: str  # of layout
    splits: Mapping[tuple[str, str], tuple[Split, ...]]

    def each(self, at: Saving, tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        """A whole tensor with each rank's part of it changed."""
        known = self.splits.get((at.fqn, at.site), (Split(),))
        split = known[(at.turn - 1) % len(known)]
        alone = tensor[:, :: split.copies] if split.copies > 1 else tensor
        if split.heads:
            made = _heads(alone, self.ranks, change)
        elif split.tokens is None:
            made = change(alone)
        else:
            made = self._tokens(alone, split.tokens, at.samples, change)
        return made.repeat_interleave(split.copies, 1) if split.copies > 1 else made

    def _tokens(
        self, tensor: Tensor, dim: int, samples: int, change: Callable[[Tensor], Tensor]
    ) -> Tensor:
        if dim:
            return _placed(tensor, dim, self._layout(tensor.shape[dim]), change)
        rows = tensor.reshape(samples, -1, *tensor.shape[1:])  # of samples and tokens in one dim
        return _placed(rows, 1, self._layout(rows.shape[1]), change).flatten(0, 1)

    def _layout(self, total: int) -> Layout:
        from schedlang.runtime.attend import Layout

        return Layout.of(self.kind, total, self.ranks)


@dataclass(frozen=True)
class WeightsAndTokens:
    """How ranks split what coded modules save where rows split weights, and others sequences.

    Of a rank's part by weights it has its tokens, or in Ulysses some of its heads.
    """

    weights: SavedParts
    tokens: TokenParts

    def each(self, at: Saving, tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        """A whole tensor with each rank's part of it changed."""
        return self.weights.each(at, tensor, lambda part: self.tokens.each(at, part, change))


Parts = SavedParts | TokenParts | WeightsAndTokens


def _heads(tensor: Tensor, ranks: int, change: Callable[[Tensor], Tensor]) -> Tensor:
    import torch

    return torch.cat([change(part) for part in tensor.chunk(ranks, 1)], 1)


def _placed(tensor: Tensor, dim: int, layout: Layout, change: Callable[[Tensor], Tensor]) -> Tensor:
    places = range(len(layout.runs))
    return layout.whole([change(layout.take(tensor, dim, place)) for place in places], dim)


class Cut(NamedTuple):
    """How many tokens there are, how many of them a rank has, and how many ranks there are."""

    total: int
    here: int
    ranks: int

    def of(self, whole: tuple[int, ...], part: tuple[int, ...]) -> Split | None:
        """How the rank has a part of a tensor; None: in no known way."""
        if len(whole) != len(part):
            return None
        found = Split()
        for dim, (all_, mine) in enumerate(zip(whole, part)):
            if all_ == mine:
                continue
            if dim == 1 and self._has_heads(whole) and all_ % mine == 0:
                many = self.ranks if part[2] == self.total else 1  # with all tokens, some heads
                found = found._replace(heads=many > 1, copies=all_ // mine // many)
                if mine * many * found.copies != all_:
                    return None
            elif dim < 3 and found.tokens is None and self._run(all_, mine, first=dim == 0):
                found = found._replace(tokens=dim)
            else:
                return None
        return found

    def _has_heads(self, shape: tuple[int, ...]) -> bool:
        """Are dims 1 and 2 heads and tokens?  Of three dims they may be tokens and a width."""
        heads = len(shape) == 4 or (len(shape) == 3 and shape[1] != self.total)
        return heads and shape[2] == self.total

    def _run(self, all_: int, mine: int, *, first: bool) -> bool:
        """Do sizes count tokens, of one sample or (in dim 0) of several after another?"""
        samples = all_ // self.total if first and all_ % self.total == 0 else 1
        return (all_, mine) == (samples * self.total, samples * self.here)
