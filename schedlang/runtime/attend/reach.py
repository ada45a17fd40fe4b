"""Which keys a query may see by their positions alone, and so which blocks see nothing or all."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from schedlang.runtime.attend.layout import Layout, place_at, spread


@dataclass(frozen=True)
class Reach:
    """A query sees keys up to `ahead` tokens after it, `back` before it, of its own `chunk`."""

    ahead: int | None = None
    back: int | None = None
    chunk: int | None = None

    def nothing(self, queries: range, keys: range) -> bool:
        """Whether none of the queries sees one of the keys."""
        q0, q1, k0, k1 = queries[0], queries[-1], keys[0], keys[-1]
        late = self.ahead is not None and k0 - q1 > self.ahead
        early = self.back is not None and q0 - k1 > self.back
        apart = self.chunk is not None and (
            q1 // self.chunk < k0 // self.chunk or q0 // self.chunk > k1 // self.chunk
        )
        return late or early or apart

    def everything(self, queries: range, keys: range) -> bool:
        """Whether every query sees every key."""
        q0, q1, k0, k1 = queries[0], queries[-1], keys[0], keys[-1]
        late = self.ahead is not None and k1 - q0 > self.ahead
        early = self.back is not None and q1 - k0 > self.back
        apart = self.chunk is not None and len({p // self.chunk for p in (q0, q1, k0, k1)}) > 1
        return not (late or early or apart)

    def block(self, queries: range, keys: range, device: torch.device) -> Tensor:
        """Who sees whom: booleans [queries, keys]."""
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
    """After which steps of rings in rings some rank sees anything of the packet that it then holds.

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
    """Whether a query of one place may see a key of another."""
    return any(not reach.nothing(q, k) for q in layout.runs[queries] for k in layout.runs[keys])
