"""Tensors in memory-mapped files that processes share: only pages that are read use memory."""

from __future__ import annotations

import ctypes
import gc
import uuid
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_M_MMAP_THRESHOLD = -3  # of malloc.h
LEAST_FILE_BYTES = 2**16  # smaller tensors stay in memory


def release_memory() -> None:
    """Return free memory to the system: collect cycles, and trim malloc's heap."""
    gc.collect()
    with suppress(OSError, AttributeError):  # a C library without it
        ctypes.CDLL(None).malloc_trim(0)


def limit_malloc_cache() -> None:
    """Let malloc return free blocks of 1 MB and more immediately.

    By default malloc raises this threshold with the blocks that it frees, and the heap grows.
    """
    with suppress(OSError, AttributeError):  # a C library without it
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**20)


@dataclass(frozen=True)
class MappedTensor:
    """A tensor in a file, or a small tensor itself."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    path: str | None = None
    value: Tensor | None = None

    def read(self) -> Tensor:
        """Return the tensor; pages of its file are loaded on access."""
        if self.path is None:
            assert self.value is not None
            return self.value
        count = torch.Size(self.shape).numel()
        with torch._C.DisableTorchFunction():  # function modes must not see this call
            flat = torch.from_file(self.path, shared=True, size=count, dtype=self.dtype)
        return flat.reshape(self.shape)

    def remove_file(self) -> None:
        """Remove the file; existing mappings stay valid."""
        if self.path is not None:
            Path(self.path).unlink(missing_ok=True)


def map_tensor(value: Tensor, folder: str | None) -> MappedTensor:
    """Write a tensor to a new file in a folder; a small tensor stays in memory."""
    shape, size = tuple(value.shape), value.numel() * value.element_size()
    value = value.detach()
    if folder is None or size < LEAST_FILE_BYTES:
        return MappedTensor(shape, value.dtype, value=value.to("cpu", copy=True))
    mapped = MappedTensor(shape, value.dtype, f"{folder}/{uuid.uuid4().hex}")
    mapped.read().copy_(value)
    return mapped


@dataclass
class MappedTensors(MutableMapping[Any, "Tensor | None"]):
    """Dict of tensors that are written to files and read on access."""

    folder: str | None = None
    held: dict[Any, MappedTensor | None] = field(default_factory=dict)

    def __setitem__(self, key: Any, value: Tensor | None) -> None:
        """Store a tensor."""
        self.held[key] = None if value is None else map_tensor(value, self.folder)

    def __getitem__(self, key: Any) -> Tensor | None:
        """Read a tensor."""
        mapped = self.held[key]
        return None if mapped is None else mapped.read()

    def __delitem__(self, key: Any) -> None:
        """Remove a key."""
        del self.held[key]

    def __iter__(self) -> Iterator[Any]:
        """Iterate over keys in insertion order."""
        return iter(self.held)

    def __len__(self) -> int:
        """The number of tensors."""
        return len(self.held)

    def __or__(self, other: Mapping[Any, Tensor | None]) -> dict[Any, Tensor | None]:
        """Return the union as a dict."""
        return {**self, **other}
