"""Numbers that roundings tip: those of activations in fewer bits that lie where two are as near.

A float32 that is off by its last digit may be rounded to the other whole number.  Both are right;
which one a program took must be known to whoever compares it with another order of the same sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

from schedlang.runtime.collectives import comm

_SHARE = 2.0**-14  # of a block's range: far above what orders of float32 sums differ by

Found = Mapping[int, tuple[Tensor, Tensor]]  # stream -> places; before they were rounded, and after


@dataclass
class Tipped:
    """By stream of draws: the places of such numbers, what was rounded down, and to what."""

    found: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def note(self, stream: int, first: int, moved: Tensor, levels: int) -> None:
        """`moved`: what is rounded down to numbers up to `levels`, of elements from `first` on."""
        flat = moved.detach().reshape(-1)
        near = ((flat - flat.round()).abs() <= margin(levels)).nonzero()[:, 0]
        places, values = (near + first).cpu(), flat[near].double().cpu()
        if stream in self.found:
            known = self.found[stream]
            places, values = torch.cat([known[0], places]), torch.cat([known[1], values])
        self.found[stream] = places, values

    def everyone(self) -> Found:
        """What all ranks noted; those that share a stream draw alike for parts of their own."""
        if comm.size() == 1:
            return self.found
        out: dict[int, tuple[Tensor, Tensor]] = {}
        for found in comm.gathered(self.found):
            for stream, (places, values) in found.items():
                known = out.get(stream, (places[:0], values[:0]))
                out[stream] = torch.cat([known[0], places]), torch.cat([known[1], values])
        return out


def margin(levels: int) -> float:
    """How near to the next number, in steps, one may be tipped."""
    return levels * _SHARE


_noting: ContextVar[Tipped | None] = ContextVar("tipped", default=None)


@contextmanager
def noting() -> Iterator[Tipped]:
    """Note what is drawn in float32 in this thread."""
    tipped = Tipped()
    token = _noting.set(tipped)
    try:
        yield tipped
    finally:
        _noting.reset(token)


def drawn(stream: int, first: int, moved: Tensor, levels: int) -> None:
    """Numbers are about to be rounded down; noted if somebody asked for it."""
    tipped = _noting.get()
    if tipped is not None and moved.dtype == torch.float32 and not moved.is_meta:
        tipped.note(stream, first, moved, levels)
