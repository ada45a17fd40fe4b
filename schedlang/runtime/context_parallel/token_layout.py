"""Layouts of a sequence's tokens over the ranks of a context-parallel group, and their order.

contiguous  rank i holds the i-th run of tokens
zigzag      the sequence in 2p chunks; rank i holds chunks i and 2p-1-i, so that under a causal mask
            all ranks have the same work (Llama 3, 2024; Zhu's ring-flash-attention)
striped     token t lies on rank t mod p (Brandon et al.: Striped Attention, 2023)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal

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
            return Layout(tuple((run,) for run in _cuts(total, ranks)))
        chunks = _cuts(total, 2 * ranks)
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


def _cuts(total: int, parts: int) -> list[range]:
    """`parts` runs of nearly one length; the longer ones first."""
    short, longer = divmod(total, parts)
    starts = [i * short + min(i, longer) for i in range(parts + 1)]
    return [range(a, b) for a, b in zip(starts, starts[1:])]


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
