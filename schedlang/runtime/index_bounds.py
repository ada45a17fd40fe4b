"""Check that indices into a table that is sharded over ranks are inside the table, as torch does.

A rank that holds some rows of a table takes an index of other rows for another rank's. An index of
no rank would silently become a word of zeros, or a label that no loss counts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.device import is_meta, on_accelerator

_OUTSIDE = "a number is outside of a table that is split over ranks (S653)"


def check_indices(
    numbers: Tensor, count: int, kind: str, table: str, helps: tuple[str, ...] = ()
) -> None:
    """Refuse (S653) integers that are not in [0, count).

    kind   what an integer names, in words
    where  the table, in words
    On an accelerator the check is an asynchronous assert: the host does not wait. Tensors on the
    meta device are not checked.
    """
    if is_meta(numbers.device) or not numbers.numel():
        return
    low, high = numbers.aminmax()
    if on_accelerator(numbers) or torch.compiler.is_compiling():
        torch._assert_async((low >= 0) & (high < count), _OUTSIDE)
    elif low < 0 or high >= count:
        outside = int(low if low < 0 else high)
        raise Refusal.of(
            "S653",
            f"{kind} {outside} is outside of 0 to {count - 1}",
            notes=(f"each rank has a part of {table}", "the model alone raises IndexError"),
            helps=helps,
        )
