"""Layouts of a sequence's tokens over ranks, and attention masks and dropout as descriptions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal
from schedlang.runtime.batch import split_rows
from schedlang.runtime.rng.logical_dropout import LogicalDropout, stream_numbers

# -- layouts of tokens over the ranks of a context-parallel group ---------------------------------
# contiguous  rank i holds the i-th run of tokens
# zigzag      the sequence in 2p chunks; rank i holds chunks i and 2p-1-i, so that under a causal
#             mask all ranks have the same work (Llama 3, 2024; Zhu's ring-flash-attention)
# striped     rank t mod p holds token t (Brandon et al.: Striped Attention, 2023)


KINDS = ("contiguous", "zigzag", "striped")
Runs = tuple[range, ...]


@dataclass(frozen=True)
class SequenceLayout:
    """The positions of the tokens that each place holds, as ascending ranges in local order.

    A place is a rank's number in its group, or in several groups together (`attention.place_of`).
    Lengths need not be divisible: the places' numbers of tokens may differ by one or two.
    """

    runs: tuple[Runs, ...]

    @staticmethod
    def of_kind(kind: str, total: int, ranks: int) -> SequenceLayout:
        """Return the layout of a kind for `total` tokens.

        Raises Refusal S680 if a rank would have no token.
        """
        assert kind in KINDS, kind
        if total < ranks:
            raise Refusal(_too_short(total, ranks))
        if kind == "striped":
            return SequenceLayout(tuple((range(rank, total, ranks),) for rank in range(ranks)))
        if kind == "contiguous":
            return SequenceLayout(tuple((run,) for run in split_rows(total, ranks)))
        chunks = split_rows(total, 2 * ranks)
        pairs = ((chunks[i], chunks[2 * ranks - 1 - i]) for i in range(ranks))
        return SequenceLayout(tuple(tuple(run for run in pair if run) for pair in pairs))

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of tokens at each place."""
        return tuple(sum(map(len, runs)) for runs in self.runs)

    @property
    def total(self) -> int:
        """The length of the full sequence."""
        return sum(self.counts)

    def positions(self, rank: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the positions of a place's tokens, in local order; int64."""
        return concatenate_runs(self.runs[rank], device)

    def take(self, full: Tensor, dim: int, rank: int) -> Tensor:
        """Return a place's tokens of a tensor with the full sequence along `dim`; a new tensor."""
        assert full.shape[dim] == self.total, (tuple(full.shape), dim, self.total)
        return full.index_select(dim, self.positions(rank, full.device))

    def concatenate(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Concatenate the tensors of all places along `dim`, in the order of the sequence."""
        joined = torch.cat(list(parts), dim)
        return joined.index_select(dim, self.order(joined.device).argsort())

    def order(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the positions of all places' tokens, place after place; int64."""
        return torch.cat([self.positions(rank, device) for rank in range(len(self.runs))])

    def join_places(self, size: int) -> SequenceLayout:
        """Return the layout in which each `size` consecutive places are one place.

        The tokens of a joined place are in ascending order if that needs few ranges.
        """
        groups = [self.runs[i : i + size] for i in range(0, len(self.runs), size)]
        return SequenceLayout(
            tuple(_merge_runs(tuple(r for runs in group for r in runs)) for group in groups)
        )


def place_at(coordinates: Sequence[int], sizes: Sequence[int]) -> int:
    """Return the place of a rank from its number in each group (modulo the group's size).

    The last group's number varies fastest.
    """
    rank = 0
    for number, size in zip(coordinates, sizes, strict=True):
        rank = rank * size + number % size
    return rank


def concatenate_runs(runs: Sequence[range], device: torch.device | str = "cpu") -> Tensor:
    """Return the numbers of some ranges, range after range; int64."""
    with torch._C.DisableTorchFunction():  # modes that follow the model's positions must not see it
        return torch.cat([torch.arange(r.start, r.stop, r.step, device=device) for r in runs])


def _merge_runs(runs: Runs) -> Runs:
    """Merge ranges into ascending ones; unchanged if they are interleaved."""
    total = sum(map(len, runs))
    first, last = min(r[0] for r in runs), max(r[-1] for r in runs)
    if total == last - first + 1:
        return (range(first, last + 1),)
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


# -- masks by positions alone ---------------------------------------------------------------------


@dataclass(frozen=True)
class PositionMask:
    """A mask by positions: a query sees keys at most `ahead` after it, `back` before it.

    With `chunk`, only keys of its own chunk of so many tokens.
    """

    ahead: int | None = None
    back: int | None = None
    chunk: int | None = None

    def hides_all(self, queries: range, keys: range) -> bool:
        """Return whether none of the queries sees one of the keys."""
        q0, q1, k0, k1 = queries[0], queries[-1], keys[0], keys[-1]
        late = self.ahead is not None and k0 - q1 > self.ahead
        early = self.back is not None and q0 - k1 > self.back
        separate = self.chunk is not None and (
            q1 // self.chunk < k0 // self.chunk or q0 // self.chunk > k1 // self.chunk
        )
        return late or early or separate

    def shows_all(self, queries: range, keys: range) -> bool:
        """Return whether every query sees every key."""
        q0, q1, k0, k1 = queries[0], queries[-1], keys[0], keys[-1]
        late = self.ahead is not None and k1 - q0 > self.ahead
        early = self.back is not None and q1 - k0 > self.back
        separate = self.chunk is not None and len({p // self.chunk for p in (q0, q1, k0, k1)}) > 1
        return not (late or early or separate)

    def block(self, queries: range, keys: range, device: torch.device) -> Tensor:
        """Return which query sees which key: booleans [queries, keys]."""
        q = concatenate_runs([queries], device)[:, None]
        k = concatenate_runs([keys], device)[None, :]
        visible = torch.ones(len(queries), len(keys), dtype=torch.bool, device=device)
        if self.ahead is not None:
            visible &= k - q <= self.ahead
        if self.back is not None:
            visible &= q - k <= self.back
        if self.chunk is not None:
            visible &= q // self.chunk == k // self.chunk
        return visible


@lru_cache(maxsize=256)
def needed_steps(
    reach: PositionMask, layout: SequenceLayout, sizes: tuple[int, ...]
) -> frozenset[tuple[int, ...]]:
    """Return the steps of nested rings after which some rank sees a key of its current packet.

    Each element has a number of steps for each ring.  Equal on all ranks.
    """
    ranges = [range(size) for size in sizes]

    def anyone(offsets: Sequence[int]) -> bool:
        for coordinates in itertools.product(*ranges):
            source = place_at([a - o for a, o in zip(coordinates, offsets)], sizes)
            if is_visible(reach, layout, place_at(coordinates, sizes), source):
                return True
        return False

    return frozenset(filter(anyone, itertools.product(*ranges)))


def is_visible(reach: PositionMask, layout: SequenceLayout, queries: int, keys: int) -> bool:
    """Return whether a query at one place may see a key at another."""
    return any(not reach.hides_all(q, k) for q in layout.runs[queries] for k in layout.runs[keys])


# -- masks as descriptions: never a tensor of all queries times all keys --------------------------
# They use the positions of tokens in the full sequence, and are therefore valid for any layout.


class TokenTags(NamedTuple):
    """Properties of tokens other than positions, each [batch, tokens]; sent together with keys."""

    documents: Tensor | None = None
    present: Tensor | None = None
    alibi_positions: Tensor | None = None

    def narrow(self, start: int, stop: int) -> TokenTags:
        """Return the tags of a run of the tokens."""
        return TokenTags(*(None if t is None else t[:, start:stop] for t in self))


@dataclass(frozen=True, eq=False)
class AttentionMask:
    """The keys that a query sees, and the numbers that are added to its scores.

    causal           no key after the query
    back             no key more than so many tokens before the query: a window of W tokens, the
                     query's own included, is `back=W-1`
    ahead            no key more than so many tokens after the query (a two-sided window)
    chunk            only keys of the same chunk of so many tokens (position // chunk)
    documents        integers [batch, local tokens]: only keys of the same document
    present          booleans [batch, local tokens]: false for padding, which no query sees
    slopes           [heads]: -slope * |q - k| is added (Press et al.: ALiBi, ICLR 2022); may be
                     trained
    alibi_positions  integers [batch, local tokens]: positions for `slopes`, if they are not those
                     in the sequence (padding on the left, packed documents)
    rows             the local queries' rows of a mask that the model has made: [batch or 1, heads
                     or 1, local tokens or 1, tokens of the full sequence in its own order];
                     booleans (true: visible), or numbers that are added, which may be trained
    cap              scores become cap * tanh(score / cap) before everything else (Gemma 2)
    sinks            [heads]: a score that takes part in the softmax and has no value (GPT-OSS)

    The result for a query that sees no key is 0.
    """

    causal: bool = False
    back: int | None = None
    ahead: int | None = None
    chunk: int | None = None
    documents: Tensor | None = None
    present: Tensor | None = None
    slopes: Tensor | None = None
    alibi_positions: Tensor | None = None
    rows: Tensor | None = None
    cap: float | None = None
    sinks: Tensor | None = None

    @property
    def tags(self) -> TokenTags:
        """The mask's tensors of tokens: other ranks need them together with the keys."""
        return TokenTags(self.documents, self.present, self.alibi_positions)

    @property
    def reach(self) -> PositionMask:
        """The mask by positions alone."""
        return PositionMask(0 if self.causal else self.ahead, self.back, self.chunk)


def visible_keys(
    reach: PositionMask,
    queries: range,
    keys: range,
    of_q: TokenTags,
    of_k: TokenTags,
    device: torch.device,
) -> Tensor | None:
    """Return which query of a block sees which key: booleans [batch or 1, 1, queries, keys].

    `of_q` are the tags of the queries, `of_k` those of the keys.  None: every query sees every key.
    """
    masks: list[Tensor] = []
    if not reach.shows_all(queries, keys):
        masks.append(reach.block(queries, keys, device)[None, None])
    if of_q.documents is not None and of_k.documents is not None:
        masks.append(of_q.documents[:, None, :, None] == of_k.documents[:, None, None, :])
    if of_k.present is not None:
        masks.append(of_k.present[:, None, None, :])
    if not masks:
        return None
    visible = masks[0]
    for mask in masks[1:]:
        visible = visible & mask
    return visible


def key_distances(
    queries: range, keys: range, of_q: TokenTags, of_k: TokenTags, like: Tensor
) -> Tensor:
    """Return the distances of queries and keys, [batch or 1, 1, queries, keys], in `like`'s dtype.

    `of_q` are the tags of the queries, `of_k` those of the keys.
    """
    if of_q.alibi_positions is not None and of_k.alibi_positions is not None:
        steps = of_q.alibi_positions[:, None, :, None] - of_k.alibi_positions[:, None, None, :]
    else:
        q, k = concatenate_runs([queries], like.device), concatenate_runs([keys], like.device)
        steps = (q[:, None] - k[None, :])[None, None]
    return steps.abs().to(like.dtype)


def split_runs(runs: Sequence[range], size: int) -> list[tuple[int, range]]:
    """Split runs into blocks of at most `size` tokens; return (index of the first token, block)."""
    blocks, start = [], 0
    for run in runs:
        for first in range(0, len(run), size):
            blocks.append((start + first, run[first : first + size]))
        start += len(run)
    return blocks


# -- dropout of attention weights, decided by (sample, head, query, key) alone ---------------------


@dataclass(frozen=True, eq=False)
class AttentionDropout:
    """Dropout of attention weights with probability `p`, equal under every layout of tokens.

    `streams` has a seed for each row of the batch.  `heads` are the numbers of the local heads
    among all heads, `total` the number of tokens of the sequence.
    """

    p: float
    streams: Tensor  # int64 [rows]
    heads: tuple[int, ...]
    total: int

    @staticmethod
    def from_generator(p: float, rows: int, heads: int, total: int) -> AttentionDropout:
        """Draw the seeds from torch's generator, which must have the same state on all ranks."""
        return AttentionDropout(
            p, torch.randint(-(2**62), 2**62, (rows,)), tuple(range(heads)), total
        )

    @staticmethod
    def from_logical(
        p: float, draw: LogicalDropout, rows: int, heads: int, total: int
    ) -> AttentionDropout:
        """Take `draw`'s seeds for weights [rows, heads, total, total] of the running module."""
        streams, index = draw.streams((rows, heads, total, total))
        head_indices = tuple(range(heads)) if index is None else tuple(int(h) for h in index)
        return AttentionDropout(p, streams, head_indices, total)

    def of_heads(self, heads: slice) -> AttentionDropout:
        """Return the dropout of some of the heads."""
        return replace(self, heads=self.heads[heads])

    def factor(self, queries: range, keys: range, like: Tensor) -> Tensor:
        """Return the factor, 0 or 1/(1-p), of the weights [rows, heads, queries, keys]."""
        q, k = concatenate_runs([queries], like.device), concatenate_runs([keys], like.device)
        heads = torch.tensor(self.heads, device=like.device)
        cells = (heads[:, None, None] * self.total + q[:, None]) * self.total + k
        keep = stream_numbers(
            cells + 1, self.streams.to(like.device)[:, None, None, None]
        ) >= round(self.p * 2**53)
        return keep.to(like.dtype) / (1 - self.p) if self.p < 1 else torch.zeros_like(like)
