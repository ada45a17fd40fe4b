"""Communication faults that torch allows: poisoned buffers and late completion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Faults:
    """Faults that a correct program never notices.

    poison  output buffers hold NaN, or a huge number, until they are written
    delay   outputs are written only when the rank waits; inputs are read when a rank waits, not
            when they are posted
    order   seed of a random order of turns; None: ranks take turns in rank order
    """

    poison: bool = True
    delay: bool = True
    order: int | None = None


NONE = Faults(poison=False, delay=False)


def poison(outputs: Sequence[Tensor]) -> None:
    """Fill buffers with values that make any later result visibly wrong."""
    for tensor in outputs:
        tensor.fill_(_poison_value(tensor.dtype))


def _poison_value(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    if dtype is torch.bool:
        return True
    # bytes of a message that holds floats: all ones are NaN
    return 255 if dtype is torch.uint8 else torch.iinfo(dtype).max // 2
