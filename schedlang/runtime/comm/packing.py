"""Pickle values for other ranks: tensors of accelerators by way of the host, or apart from it.

* Pickle tensors of the host as arrays: torch writes an archive for each, ten times as slow.
"""

from __future__ import annotations

import io
import math
import pickle
from typing import Any

import torch
from torch import Tensor, nn

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


_WIDEST = 16  # bytes of the widest number: where tensors may begin


def taken_out(value: object, device: torch.device) -> tuple[bytes, Tensor]:
    """A value without its tensors on a kind of device, and these as bytes, one behind the other."""
    data = io.BytesIO()
    pickler = _Without(data, device)
    pickler.dump(value)
    none = torch.empty(0, dtype=torch.uint8, device=device)
    return data.getvalue(), torch.cat([none, *map(_as_bytes, pickler.tensors)])


def _as_bytes(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % _WIDEST))


def put_back(data: bytes, flat: Tensor) -> Any:
    """The value of `taken_out`, its tensors views of `flat` where that is mostly them."""
    return _With(io.BytesIO(data), flat).load()


class Pickler(pickle.Pickler):
    """Leaves no trace of whose device a tensor was on: another rank has another; see `reduced`."""

    def reducer_override(self, value: Any) -> Any:
        """Pickle a tensor on an accelerator as its values in host memory, with a mark of where it
        was."""
        if type(value) in (Tensor, nn.Parameter) and devices.on_accelerator(value):
            return _arrived, (value.detach().cpu(),)
        return reduced(value)


def packed(value: object) -> bytes:
    """A value as bytes that any rank can read."""
    data = io.BytesIO()
    Pickler(data).dump(value)
    return data.getvalue()


class _Without(Pickler):
    """Notes tensors on a kind of device in place of writing them."""

    def __init__(self, data: io.BytesIO, device: torch.device) -> None:
        super().__init__(data)
        self.device = device
        self.tensors: list[Tensor] = []
        self.at = 0

    def persistent_id(self, value: Any) -> Any:
        """Return for a tensor on this device the offset of its bytes, its dtype and its shape; else
        None."""
        if type(value) is not Tensor or not devices.same_kind(value.device, self.device):
            return None
        if value.layout != torch.strided or value.is_complex() or value.is_quantized:
            return None
        at = self.at
        self.at += -(-value.numel() * value.element_size() // _WIDEST) * _WIDEST
        self.tensors.append(value)
        return at, value.dtype, tuple(value.shape)


class _With(pickle.Unpickler):
    """Finds the tensors that were left out among the bytes that came beside."""

    def __init__(self, data: io.BytesIO, flat: Tensor) -> None:
        super().__init__(data)
        self.flat = flat

    def persistent_load(self, pid: Any) -> Tensor:
        """A tensor in the memory that came."""
        at, dtype, shape = pid
        size = math.prod(shape) * dtype.itemsize
        found = self.flat[at : at + size].view(dtype).view(shape)
        # what is small must not keep all of it alive
        return found if 2 * size >= self.flat.numel() else found.clone()


def _arrived(value: Tensor) -> Tensor:
    return value.to(devices.own_device())
