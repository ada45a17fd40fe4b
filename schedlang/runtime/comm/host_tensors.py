"""Pickle tensors of the host as arrays: torch writes an archive for each, ten times as slow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from schedlang.runtime import device as devices

# those that numpy has; bfloat16 and narrower floats go torch's way
DTYPES = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.complex128, torch.complex64),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    }
)


def reduced(value: Any) -> Any:
    """Reduce a plain tensor, for a pickler's `reducer_override`; NotImplemented for all else.

    Plain is what its numbers, shape and dtype tell whole: it lies in one piece that nobody else
    has a part of, and has neither a gradient to come nor attributes.
    """
    if type(value) is not Tensor or value.dtype not in DTYPES or not devices.on_host(value):
        return NotImplemented
    if value.layout != torch.strided or value.requires_grad or value.__dict__:
        return NotImplemented
    if value.is_conj() or value.is_neg() or not value.is_contiguous():
        return NotImplemented
    if value.untyped_storage().nbytes() != value.numel() * value.element_size():
        return NotImplemented
    return _restored, (value.numpy(),)


def _restored(array: Any) -> Tensor:
    return torch.from_numpy(array).clone()  # where torch puts tensors: some kernels look at it
