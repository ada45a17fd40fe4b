"""How communication misbehaves within what it is allowed: poisoned buffers, late completion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Faults:
    """What a correct program never notices.

    poison  buffers that will be written hold NaN, or a huge number, until they are
    delay   they are written when the rank waits, not before, and what is sent is read when somebody
            waits for it, not when it is posted
    order   ranks take turns as drawn from this seed, not one after the other
    """

    poison: bool = True
    delay: bool = True
    order: int | None = None


NONE = Faults(poison=False, delay=False)


def poison(outputs: Sequence[Tensor]) -> None:
    """Fill buffers with what no computation survives unseen."""
    for tensor in outputs:
        tensor.fill_(_worst(tensor.dtype))


def _worst(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    if dtype is torch.bool:
        return True
    # bytes of a message that holds floats: all ones are NaN
    return 255 if dtype is torch.uint8 else torch.iinfo(dtype).max // 2
