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

    name     the tensor's name on the rank
    `local_region`   the elements' region in the rank's tensor
    `original_region`  the elements' region in the original's tensor
    `stored`   the rank's tensor, maybe in a file; None if the rank has no gradient
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
        found = self.local_region.read(self.stored.read().reshape(-1)).reshape(-1)
        return found if self.factor == 1.0 else found * self.factor


def assemble(
    copies: Sequence[RankCopy], shape: torch.Size, folder: str | None
) -> tuple[Tensor, float, float]:
    """Assemble a full tensor from ranks' copies.

    Returns the tensor, the largest distance of another copy from the first copy of the same
    elements, and the norm of the assembled elements.
    """
    nothing = torch.tensor(math.nan, dtype=torch.float64)
    out = map_tensor(nothing.expand(shape.numel()), folder).read()
    done = torch.zeros(shape.numel(), dtype=torch.bool)
    far = 0.0
    for one in copies:
        values = one.values
        assert values is not None
        values = values.reshape(one.original_region.shape)
        before, known = one.original_region.read(out), one.original_region.read(done)
        if bool(known.any()):
            every = bool(known.all())  # avoids a copy of known elements
            gap = before - values if every else (before - values)[known]
            far = max(far, float(gap.norm())) if gap.isfinite().all() else math.inf
            if every:
                continue
            values = torch.where(known, before, values.double())
        one.original_region.write(out, values)
        one.original_region.write(done, True)
    size = float(out.norm()) if bool(done.all()) else float(out[done].norm())
    return out.reshape(shape), far, size
