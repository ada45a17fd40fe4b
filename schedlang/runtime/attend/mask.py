"""What a query may see, as a description: never a tensor of all queries times all keys.

Everything goes by the positions of tokens in the whole sequence, so it is right for any layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from schedlang.runtime.attend.layout import spread


class Tags(NamedTuple):
    """What is known of tokens beside their positions, each [batch, tokens]; it goes with keys."""

    documents: Tensor | None = None
    present: Tensor | None = None
    counted: Tensor | None = None

    def cut(self, start: int, stop: int) -> Tags:
        """Those of a run of the tokens."""
        return Tags(*(None if t is None else t[:, start:stop] for t in self))


@dataclass(frozen=True, eq=False)
class Mask:
    """Which keys a query sees, and what is added to its scores.

    causal     no key after the query
    back       no key more than so many tokens before the query: a window of W tokens, the query's
               own included, is `back=W-1`
    ahead      no key more than so many tokens after it (a window that looks both ways)
    chunk      only keys of the same run of so many tokens (position // chunk)
    documents  integers [batch, local tokens], split as they are: only keys of the same document
    present    booleans [batch, local tokens]: false for padding, keys that nobody sees
    slopes     [heads]: -slope * |q - k| is added (Press et al.: ALiBi, ICLR 2022); may be trained
    counted    integers [batch, local tokens]: the positions that `slopes` counts by, where they are
               not those in the sequence (padding on the left, packed documents)
    cap        scores become cap * tanh(score / cap) before all of this (Gemma 2)

    A query that sees no key gives 0.
    """

    causal: bool = False
    back: int | None = None
    ahead: int | None = None
    chunk: int | None = None
    documents: Tensor | None = None
    present: Tensor | None = None
    slopes: Tensor | None = None
    counted: Tensor | None = None
    cap: float | None = None

    @property
    def tags(self) -> Tags:
        """The parts that lie with the tokens."""
        return Tags(self.documents, self.present, self.counted)

    @property
    def plain(self) -> Mask:
        """The parts that are the same for all tokens."""
        return replace(self, documents=None, present=None, counted=None, slopes=None)

    @property
    def beyond(self) -> int | None:
        """How many tokens after itself a query sees; None: all."""
        return 0 if self.causal else self.ahead

    def nothing(self, queries: range, keys: range) -> bool:
        """Whether positions alone say that none of the queries sees one of the keys."""
        q0, q1, k0, k1 = queries[0], queries[-1], keys[0], keys[-1]
        late = self.beyond is not None and k0 - q1 > self.beyond
        early = self.back is not None and q0 - k1 > self.back
        apart = self.chunk is not None and (
            q1 // self.chunk < k0 // self.chunk or q0 // self.chunk > k1 // self.chunk
        )
        return late or early or apart

    def everything(self, queries: range, keys: range) -> bool:
        """Whether positions alone let every query see every key."""
        q0, q1, k0, k1 = queries[0], queries[-1], keys[0], keys[-1]
        late = self.beyond is not None and k1 - q0 > self.beyond
        early = self.back is not None and q1 - k0 > self.back
        apart = self.chunk is not None and (len({p // self.chunk for p in (q0, q1, k0, k1)}) > 1)
        return not (late or early or apart)

    def block(
        self, queries: range, keys: range, at: Tags, to: Tags, device: torch.device
    ) -> Tensor | None:
        """Who sees whom in a small block: booleans [batch or 1, 1, queries, keys]; None: all."""
        seen: list[Tensor] = []
        if not self.everything(queries, keys):
            seen.append(self._near(queries, keys, device))
        if at.documents is not None and to.documents is not None:
            seen.append(at.documents[:, None, :, None] == to.documents[:, None, None, :])
        if to.present is not None:
            seen.append(to.present[:, None, None, :])
        if not seen:
            return None
        found = seen[0]
        for more in seen[1:]:
            found = found & more
        return found

    def _near(self, queries: range, keys: range, device: torch.device) -> Tensor:
        q, k = spread([queries], device)[:, None], spread([keys], device)[None, :]
        near = torch.ones(len(queries), len(keys), dtype=torch.bool, device=device)
        if self.beyond is not None:
            near &= k - q <= self.beyond
        if self.back is not None:
            near &= q - k <= self.back
        if self.chunk is not None:
            near &= q // self.chunk == k // self.chunk
        return near[None, None]

    def distance(self, queries: range, keys: range, at: Tags, to: Tags, like: Tensor) -> Tensor:
        """How far each key is from each query, [batch or 1, 1, queries, keys], as `like`."""
        if at.counted is not None and to.counted is not None:
            apart = at.counted[:, None, :, None] - to.counted[:, None, None, :]
        else:
            q, k = spread([queries], like.device), spread([keys], like.device)
            apart = (q[:, None] - k[None, :])[None, None]
        return apart.abs().to(like.dtype)


def pieces(runs: Sequence[range], size: int) -> list[tuple[int, range]]:
    """Runs cut into blocks of at most `size` tokens, each with where it begins among the tokens."""
    found, start = [], 0
    for run in runs:
        for first in range(0, len(run), size):
            part = run[first : first + size]
            found.append((start + first, part))
        start += len(run)
    return found
