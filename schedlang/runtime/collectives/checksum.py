"""Checksums of tensors: two passes over their bits where they lie, no copy of them."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_COLUMNS = 1024  # sums over rows and over columns: what changes or moves shows in one of them


def checksum(tensor: Tensor) -> str:
    """Equal for tensors of the same dtype, shape and bits; "" for what has no bits to read.

    A tensor's words of 64 bits are laid out in rows; the sums of all rows and of all columns,
    modulo 2**64, are hashed.  Integers, so that the order of summing, the number of threads and the
    device do not matter.
    """
    if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
        return ""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        found = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=8)
        flat = _bytes(tensor)
        whole = flat.numel() // (8 * _COLUMNS) * (8 * _COLUMNS)
        if whole:
            words = flat[:whole].view(torch.int64).view(-1, _COLUMNS)
            for dim in (0, 1):
                found.update(words.sum(dim).cpu().numpy().tobytes())
        found.update(flat[whole:].cpu().numpy().tobytes())
    return found.hexdigest()


def _bytes(tensor: Tensor) -> Tensor:
    """The tensor's bytes in logical order; where they lie, if that is in one row."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    flat = plain.contiguous().view(-1) if plain.dim() else plain.view(1)
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    return flat.view(torch.uint8)
