"""Ranks' copies of the original's tensors, and the full tensors assembled from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from schedlang.passes.judge.regions import Region
from schedlang.passes.verify.mapped_tensors import MappedTensor, map_tensor


@dataclass(frozen=True)
class RankCopy:
    """One rank's copy of elements of an original tensor.

    name             the tensor's name on the rank
    local_region     the elements' region in the rank's tensor
    original_region  the elements' region in the original's tensor
    stored           the rank's tensor, maybe in a file; None if the rank has no gradient
    """

    rank: int
    name: str
    local_region: Region
    original_region: Region
    stored: MappedTensor | None
    factor: float = 1.0  # multiplies the values

    @property
    def places(self) -> Tensor:
        """The index of each element in the original's tensor."""
        return self.original_region.numbers

    @property
    def values(self) -> Tensor | None:
        """The value of each element; None without a tensor."""
        if self.stored is None:
            return None
        elements = self.local_region.read(self.stored.read().reshape(-1)).reshape(-1)
        return elements if self.factor == 1.0 else elements * self.factor


def distance(held: Tensor, other: Tensor) -> float:
    """Return the norm of the difference of two copies; equal NaN and infinities do not differ."""
    gap = held - other
    if bool(gap.isfinite().all()):
        return float(gap.norm())
    alike = (held == other) | (held.isnan() & other.isnan())
    gap = torch.where(alike, 0.0, gap)
    return float(gap.norm()) if bool(gap.isfinite().all()) else math.inf


def assemble(
    copies: Sequence[RankCopy], shape: torch.Size, folder: str | None
) -> tuple[Tensor, float, float]:
    """Assemble a full tensor from ranks' copies.

    Returns the tensor, the largest distance of another copy from the first copy of the same
    elements, and the norm of the assembled elements.
    """
    nothing = torch.tensor(math.nan, dtype=torch.float64)
    out = map_tensor(nothing.expand(shape.numel()), folder).read()
    filled = torch.zeros(shape.numel(), dtype=torch.bool)
    largest_gap = 0.0
    for copy in copies:
        values = copy.values
        assert values is not None
        values = values.reshape(copy.original_region.shape)
        held, overlap = copy.original_region.read(out), copy.original_region.read(filled)
        if bool(overlap.any()):
            all_known = bool(overlap.all())  # avoids a copy of known elements
            known = (held, values) if all_known else (held[overlap], values[overlap])
            largest_gap = max(largest_gap, distance(*known))
            if all_known:
                continue
            values = torch.where(overlap, held, values.double())
        copy.original_region.write(out, values)
        copy.original_region.write(filled, True)
    size = float(out.norm()) if bool(filled.all()) else float(out[filled].norm())
    return out.reshape(shape), largest_gap, size
