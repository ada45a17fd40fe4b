"""Shapes of grouped matrix products on the meta device, for any float type.

torch's own rule knows bfloat16 alone, so that no model of experts in another type could be looked
at without values.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def install() -> Any:
    """Put the rule in place of torch's, once; the result keeps it there."""
    kind: Any = torch.library.Library
    library = kind("aten", "IMPL", "Meta")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered")
        library.impl("_grouped_mm", _shape, allow_override=True)
    return library


def _shape(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    rows, columns = a.shape[-2], b.shape[-1]
    if a.ndim == b.ndim:
        groups = a.shape[0] if a.ndim == 3 else offs.shape[0] if offs is not None else 1
        return a.new_empty((groups, rows, columns), dtype=out_dtype)
    return a.new_empty((rows, columns), dtype=out_dtype)
