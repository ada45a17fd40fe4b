"""Dropout of attention weights: which are dropped follows from (sample, head, query, key) alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from schedlang.runtime.attend.layout import spread
from schedlang.runtime.drawing.random import LogicalDropout, mixed


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
        """From torch's generator, which then has to be in the same state on all ranks."""
        return Dropout(p, torch.randint(-(2**62), 2**62, (rows,)), tuple(range(heads)), total)

    @staticmethod
    def logical(p: float, draw: LogicalDropout, rows: int, heads: int, total: int) -> Dropout:
        """As `draw` would drop weights [rows, heads, total, total] in the module that runs now."""
        streams, index = draw.streams((rows, heads, total, total))
        held = tuple(range(heads)) if index is None else tuple(int(h) for h in index)
        return Dropout(p, streams, held, total)

    def of_heads(self, heads: slice) -> Dropout:
        """For some of the heads."""
        return replace(self, heads=self.heads[heads])

    def factor(self, queries: range, keys: range, like: Tensor) -> Tensor:
        """What weights [rows, heads, queries, keys] are multiplied by: 0 or 1/(1-p)."""
        q, k = spread([queries], like.device), spread([keys], like.device)
        heads = torch.tensor(self.heads, device=like.device)
        cells = (heads[:, None, None] * self.total + q[:, None]) * self.total + k
        keep = mixed(cells + 1, self.streams.to(like.device)[:, None, None, None]) >= round(
            self.p * 2**53
        )
        return keep.to(like.dtype) / (1 - self.p) if self.p < 1 else torch.zeros_like(like)
