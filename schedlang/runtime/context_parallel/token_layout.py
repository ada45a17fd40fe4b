"""Layouts of a sequence's tokens over ranks, and what a query may see by positions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal
from schedlang.runtime.batch import shares
from schedlang.runtime.rng.logical_dropout import LogicalDropout, mixed

# ---- Layouts of a sequence's tokens over the ranks of a context-parallel group, and their order.
# contiguous  rank i holds the i-th run of tokens
# zigzag      the sequence in 2p chunks; rank i holds chunks i and 2p-1-i, so that under a causal
#             mask all ranks have the same work (Llama 3, 2024; Zhu's ring-flash-attention)
# striped     token t lies on rank t mod p (Brandon et al.: Striped Attention, 2023)


KINDS = ("contiguous", "zigzag", "striped")
Runs = tuple[range, ...]


@dataclass(frozen=True)
class Layout:
    """The positions that each place holds, as ascending ranges in the order of its tokens.

    A place is a rank's number in its group, or in several groups together (`call.place_of`).  No
    length has to be divisible: parts may differ by a token or two.
    """

    runs: tuple[Runs, ...]

    @staticmethod
    def of(kind: str, total: int, ranks: int) -> Layout:
        """One of `KINDS` for `total` tokens; Refusal S680 if some rank would have none."""
        assert kind in KINDS, kind
        if total < ranks:
            raise Refusal(_too_short(total, ranks))
        if kind == "striped":
            return Layout(tuple((range(place, total, ranks),) for place in range(ranks)))
        if kind == "contiguous":
            return Layout(tuple((run,) for run in shares(total, ranks)))
        chunks = shares(total, 2 * ranks)
        pairs = ((chunks[i], chunks[2 * ranks - 1 - i]) for i in range(ranks))
        return Layout(tuple(tuple(run for run in pair if run) for pair in pairs))

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of tokens at each place."""
        return tuple(sum(map(len, runs)) for runs in self.runs)

    @property
    def total(self) -> int:
        """The length of the whole sequence."""
        return sum(self.counts)

    def positions(self, place: int, device: torch.device | str = "cpu") -> Tensor:
        """The positions of a place's tokens, in the order in which they lie there; int64."""
        return spread(self.runs[place], device)

    def take(self, whole: Tensor, dim: int, place: int) -> Tensor:
        """A place's tokens out of the whole sequence along `dim`; a new tensor."""
        assert whole.shape[dim] == self.total, (tuple(whole.shape), dim, self.total)
        return whole.index_select(dim, self.positions(place, whole.device))

    def whole(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """The tensors of all places put back in the order of the sequence."""
        joined = torch.cat(list(parts), dim)
        return joined.index_select(dim, self.order(joined.device).argsort())

    def order(self, device: torch.device | str = "cpu") -> Tensor:
        """The positions of all places' tokens, one place after the other; int64."""
        return torch.cat([self.positions(place, device) for place in range(len(self.runs))])

    def joined(self, size: int) -> Layout:
        """The layout of groups of `size` places that follow each other, as `size` made one.

        A group's tokens are in ascending order wherever that needs few ranges.
        """
        groups = [self.runs[i : i + size] for i in range(0, len(self.runs), size)]
        return Layout(tuple(_joined(tuple(r for runs in group for r in runs)) for group in groups))


def place_at(at: Sequence[int], sizes: Sequence[int]) -> int:
    """The place of a number in each group, modulo its size; the last one's counts fastest."""
    place = 0
    for number, size in zip(at, sizes, strict=True):
        place = place * size + number % size
    return place


def spread(runs: Sequence[range], device: torch.device | str = "cpu") -> Tensor:
    """The numbers of some ranges, one range after the other; int64."""
    with torch._C.DisableTorchFunction():  # no part of the model's own counting of positions
        return torch.cat([torch.arange(r.start, r.stop, r.step, device=device) for r in runs])


def _joined(runs: Runs) -> Runs:
    """Ranges as one set: in order and merged, unless they lie between each other."""
    total = sum(map(len, runs))
    low, high = min(r[0] for r in runs), max(r[-1] for r in runs)
    if total == high - low + 1:
        return (range(low, high + 1),)
    if any(r.step != 1 for r in runs):
        return runs
    merged: list[range] = []
    for run in sorted(runs, key=lambda r: r.start):
        if merged and merged[-1].stop == run.start:
            merged[-1] = range(merged[-1].start, run.stop)
        else:
            merged.append(run)
    return tuple(merged)


def _too_short(total: int, ranks: int) -> Diagnostic:
    return Diagnostic(
        "S680",
        f"a sequence of {total} tokens cannot be split over {ranks} ranks",
        notes=("every rank needs at least one token of every sequence",),
        helps=(
            f"give sequences of {ranks} tokens or more",
            "or split them over fewer ranks: a smaller axis in the mesh",
        ),
    )


# ---- Masks of attention as descriptions, by positions and documents; and dropout of its weights.


# ---- Which keys a query may see by their positions alone, and so which blocks see nothing or
# all.


@dataclass(frozen=True)
class Reach:
    """A query sees keys up to `ahead` tokens after it, `back` before it, of its own `chunk`."""

    ahead: int | None = None
    back: int | None = None
    chunk: int | None = None

    def nothing(self, queries: range, keys: range) -> bool:
        """Return whether none of the queries sees one of the keys."""
        q0, q1, k0, k1 = queries[0], queries[-1], keys[0], keys[-1]
        late = self.ahead is not None and k0 - q1 > self.ahead
        early = self.back is not None and q0 - k1 > self.back
        apart = self.chunk is not None and (
            q1 // self.chunk < k0 // self.chunk or q0 // self.chunk > k1 // self.chunk
        )
        return late or early or apart

    def everything(self, queries: range, keys: range) -> bool:
        """Return whether every query sees every key."""
        q0, q1, k0, k1 = queries[0], queries[-1], keys[0], keys[-1]
        late = self.ahead is not None and k1 - q0 > self.ahead
        early = self.back is not None and q1 - k0 > self.back
        apart = self.chunk is not None and len({p // self.chunk for p in (q0, q1, k0, k1)}) > 1
        return not (late or early or apart)

    def block(self, queries: range, keys: range, device: torch.device) -> Tensor:
        """Return which query sees which key: booleans [queries, keys]."""
        q, k = spread([queries], device)[:, None], spread([keys], device)[None, :]
        near = torch.ones(len(queries), len(keys), dtype=torch.bool, device=device)
        if self.ahead is not None:
            near &= k - q <= self.ahead
        if self.back is not None:
            near &= q - k <= self.back
        if self.chunk is not None:
            near &= q // self.chunk == k // self.chunk
        return near


@lru_cache(maxsize=256)
def wanted(reach: Reach, layout: Layout, sizes: tuple[int, ...]) -> frozenset[tuple[int, ...]]:
    """Return the steps of rings in rings after which some rank sees anything of the packet it
    holds.

    One number of steps for each ring; all ranks find the same.
    """
    ranges = [range(size) for size in sizes]

    def anyone(offsets: Sequence[int]) -> bool:
        for at in itertools.product(*ranges):
            source = place_at([a - o for a, o in zip(at, offsets)], sizes)
            if sees(reach, layout, place_at(at, sizes), source):
                return True
        return False

    return frozenset(filter(anyone, itertools.product(*ranges)))


def sees(reach: Reach, layout: Layout, queries: int, keys: int) -> bool:
    """Return whether a query of one place may see a key of another."""
    return any(not reach.nothing(q, k) for q in layout.runs[queries] for k in layout.runs[keys])


# ---- What a query may see, as a description: never a tensor of all queries times all keys.
# Everything goes by the positions of tokens in the whole sequence, so it is right for any layout.


class Tags(NamedTuple):
    """Facts about tokens beside their positions, each [batch, tokens]; they travel with keys."""

    documents: Tensor | None = None
    present: Tensor | None = None
    counted: Tensor | None = None

    def cut(self, start: int, stop: int) -> Tags:
        """Return the tags of a run of the tokens."""
        return Tags(*(None if t is None else t[:, start:stop] for t in self))


@dataclass(frozen=True, eq=False)
class Mask:
    """The keys that a query sees, and what is added to its scores.

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


def seen(
    reach: Reach, queries: range, keys: range, at: Tags, to: Tags, device: torch.device
) -> Tensor | None:
    """Return which query sees which key of a small block: booleans [batch or 1, 1, queries, keys];
    None: all see all."""
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
    """Return the distance of each key from each query, [batch or 1, 1, queries, keys], as
    `like`."""
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


# ---- Dropout of attention weights: which are dropped follows from (sample, head, query, key)
# alone.


@dataclass(frozen=True, eq=False)
class Dropout:
    """Weights are dropped with probability `p`; `streams` has a number for each row of the batch.

    `heads` are the numbers of this tensor's heads among all, `total` the tokens of the sequence.
    """

    p: float
    streams: Tensor  # int64 [rows]
    heads: tuple[int, ...]
    total: int

    @staticmethod
    def fresh(p: float, rows: int, heads: int, total: int) -> Dropout:
        """Draw from torch's generator, which then has to be in the same state on all ranks."""
        return Dropout(p, torch.randint(-(2**62), 2**62, (rows,)), tuple(range(heads)), total)

    @staticmethod
    def logical(p: float, draw: LogicalDropout, rows: int, heads: int, total: int) -> Dropout:
        """Draw as `draw` would drop weights [rows, heads, total, total] in the module that runs
        now."""
        streams, index = draw.streams((rows, heads, total, total))
        held = tuple(range(heads)) if index is None else tuple(int(h) for h in index)
        return Dropout(p, streams, held, total)

    def of_heads(self, heads: slice) -> Dropout:
        """Return the dropout of some of the heads."""
        return replace(self, heads=self.heads[heads])

    def factor(self, queries: range, keys: range, like: Tensor) -> Tensor:
        """Return the factor, 0 or 1/(1-p), of the weights [rows, heads, queries, keys]."""
        q, k = spread([queries], like.device), spread([keys], like.device)
        heads = torch.tensor(self.heads, device=like.device)
        cells = (heads[:, None, None] * self.total + q[:, None]) * self.total + k
        keep = mixed(cells + 1, self.streams.to(like.device)[:, None, None, None]) >= round(
            self.p * 2**53
        )
        return keep.to(like.dtype) / (1 - self.p) if self.p < 1 else torch.zeros_like(like)
