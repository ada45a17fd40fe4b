"""What a query may see, as a description: never a tensor of all queries times all keys.

Everything goes by the positions of tokens in the whole sequence, so it is right for any layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from schedlang.runtime.attend.layout import spread
from schedlang.runtime.attend.reach import Reach


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
    rows       a mask that somebody has already made, its rows of the local queries:
               [batch or 1, heads or 1, local tokens or 1, tokens of the whole sequence in its own
               order]; booleans (true: seen), or numbers that are added, which may be trained
    cap        scores become cap * tanh(score / cap) before all of this (Gemma 2)
    sinks      [heads]: a score that takes part in the softmax and has no value (GPT-OSS)

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
    rows: Tensor | None = None
    cap: float | None = None
    sinks: Tensor | None = None

    @property
    def tags(self) -> Tags:
        """The parts that lie with the tokens, and that others need to see their keys."""
        return Tags(self.documents, self.present, self.counted)

    @property
    def reach(self) -> Reach:
        """The part that goes by positions."""
        return Reach(0 if self.causal else self.ahead, self.back, self.chunk)

    def block(
        self, queries: range, keys: range, at: Tags, to: Tags, device: torch.device
    ) -> Tensor | None:
        """Who sees whom in a small block, `rows` left out: see `seen`."""
        return seen(self.reach, queries, keys, at, to, device)


def seen(reach: Reach, queries: range, keys: range, at: Tags, to: Tags, device: torch.device
) -> Tensor | None:  # fmt: skip
    """Who sees whom in a small block: booleans [batch or 1, 1, queries, keys]; None: all."""
    found: list[Tensor] = []
    if not reach.everything(queries, keys):
        found.append(reach.block(queries, keys, device)[None, None])
    if at.documents is not None and to.documents is not None:
        found.append(at.documents[:, None, :, None] == to.documents[:, None, None, :])
    if to.present is not None:
        found.append(to.present[:, None, None, :])
    if not found:
        return None
    both = found[0]
    for more in found[1:]:
        both = both & more
    return both


def distance(queries: range, keys: range, at: Tags, to: Tags, like: Tensor) -> Tensor:
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
            found.append((start + first, run[first : first + size]))
        start += len(run)
    return found
