"""Pickle values for other ranks: accelerator tensors by way of the host, or separately as bytes.

Host tensors are pickled as numpy arrays: torch writes an archive for each, ten times as slow.
"""

from __future__ import annotations

import io
import math
import pickle
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.runtime import device as devices

# dtypes that numpy has; bfloat16 and narrower floats are pickled by torch
NUMPY_DTYPES = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.complex128, torch.complex64),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    }
)


def reduce_tensor(value: Any) -> Any:
    """Reduce a plain tensor, for a pickler's `reducer_override`; NotImplemented for all else.

    A plain tensor is fully described by its numbers, shape and dtype: it is contiguous, owns its
    storage alone, requires no gradient and has no attributes.
    """
    if type(value) is not Tensor or value.dtype not in NUMPY_DTYPES or not devices.on_host(value):
        return NotImplemented
    if value.layout != torch.strided or value.requires_grad or value.__dict__:
        return NotImplemented
    if value.is_conj() or value.is_neg() or not value.is_contiguous():
        return NotImplemented
    if value.untyped_storage().nbytes() != value.numel() * value.element_size():
        return NotImplemented
    return _from_array, (value.numpy(),)


def _from_array(array: Any) -> Tensor:
    # clone: aligned as torch allocates, which some kernels require
    return torch.from_numpy(array).clone()


_ALIGNMENT = 16  # bytes of the widest number: alignment of tensors


def extract_tensors(value: object, device: torch.device) -> tuple[bytes, Tensor]:
    """Pickle a value without its tensors on a kind of device; return these as one tensor of
    bytes."""
    data = io.BytesIO()
    pickler = _CollectTensors(data, device)
    pickler.dump(value)
    none = torch.empty(0, dtype=torch.uint8, device=device)
    return data.getvalue(), torch.cat([none, *map(_as_bytes, pickler.tensors)])


def _as_bytes(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % _ALIGNMENT))


def insert_tensors(data: bytes, flat: Tensor) -> Any:
    """Rebuild the value of `extract_tensors`; large tensors are views of `flat`."""
    return _InsertTensors(io.BytesIO(data), flat).load()


class Pickler(pickle.Pickler):
    """Pickles accelerator tensors without their device, because other ranks have other devices."""

    def reducer_override(self, value: Any) -> Any:
        """Reduce an accelerator tensor to its values in host memory, to be moved to the reader's
        device."""
        if type(value) in (Tensor, nn.Parameter) and devices.on_accelerator(value):
            return _on_local_device, (value.detach().cpu(),)
        return reduce_tensor(value)


def pickle_value(value: object) -> bytes:
    """Pickle a value to bytes that any rank can read."""
    data = io.BytesIO()
    Pickler(data).dump(value)
    return data.getvalue()


class _CollectTensors(Pickler):
    """Collects tensors on a kind of device instead of writing them."""

    def __init__(self, data: io.BytesIO, device: torch.device) -> None:
        super().__init__(data)
        self.device = device
        self.tensors: list[Tensor] = []
        self.at = 0

    def persistent_id(self, value: Any) -> Any:
        """Return for a tensor on this device its byte offset, dtype and shape; else None."""
        if type(value) is not Tensor or not devices.same_kind(value.device, self.device):
            return None
        if value.layout != torch.strided or value.is_complex() or value.is_quantized:
            return None
        offset = self.at
        self.at += -(-value.numel() * value.element_size() // _ALIGNMENT) * _ALIGNMENT
        self.tensors.append(value)
        return offset, value.dtype, tuple(value.shape)


class _InsertTensors(pickle.Unpickler):
    """Finds the collected tensors among the bytes that were sent with the pickle."""

    def __init__(self, data: io.BytesIO, flat: Tensor) -> None:
        super().__init__(data)
        self.flat = flat

    def persistent_load(self, pid: Any) -> Tensor:
        """Return a tensor from the received memory."""
        offset, dtype, shape = pid
        size = math.prod(shape) * dtype.itemsize
        tensor = self.flat[offset : offset + size].view(dtype).view(shape)
        # a small tensor must not keep all of the memory alive
        return tensor if 2 * size >= self.flat.numel() else tensor.clone()


def _on_local_device(value: Tensor) -> Tensor:
    return value.to(devices.local_device())
