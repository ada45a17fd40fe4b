"""Ranks' copies of the original's tensors, and the full tensors assembled from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from schedlang.passes.judge.regions import Region
from schedlang.passes.verify.spilled import Spilled, spill


@dataclass(frozen=True)
class Copy:
    """One rank's copy of elements of an original tensor.

    name     the tensor's name on the rank
    `here`   the elements' region in the rank's tensor
    `there`  the elements' region in the original's tensor
    `held`   the rank's tensor, maybe in a file; None if the rank has no gradient
    """

    rank: int
    name: str
    here: Region
    there: Region
    held: Spilled | None
    factor: float = 1.0  # multiplies the values

    @property
    def places(self) -> Tensor:
        """The index of each element in the original's tensor."""
        return self.there.numbers

    @property
    def values(self) -> Tensor | None:
        """The value of each element; None without a tensor."""
        if self.held is None:
            return None
        found = self.here.within(self.held.read().reshape(-1)).reshape(-1)
        return found if self.factor == 1.0 else found * self.factor


def joined(
    copies: Sequence[Copy], shape: torch.Size, folder: str | None
) -> tuple[Tensor, float, float]:
    """Assemble a full tensor from ranks' copies.

    Returns the tensor, the largest distance of another copy from the first copy of the same
    elements, and the norm of the assembled elements.
    """
    nothing = torch.tensor(math.nan, dtype=torch.float64)
    out = spill(nothing.expand(shape.numel()), folder).read()
    done = torch.zeros(shape.numel(), dtype=torch.bool)
    far = 0.0
    for one in copies:
        values = one.values
        assert values is not None
        values = values.reshape(one.there.shape)
        before, known = one.there.within(out), one.there.within(done)
        if bool(known.any()):
            every = bool(known.all())  # avoids a copy of known elements
            gap = before - values if every else (before - values)[known]
            far = max(far, float(gap.norm())) if gap.isfinite().all() else math.inf
            if every:
                continue
            values = torch.where(known, before, values.double())
        one.there.put(out, values)
        one.there.put(done, True)
    size = float(out.norm()) if bool(done.all()) else float(out[done].norm())
    return out.reshape(shape), far, size
