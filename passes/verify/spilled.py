"""Tensors in files that processes of one machine map, so that none holds what it does not read."""

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
LEAST = 2**16  # bytes from which on a tensor goes to a file


def released() -> None:
    """Give the machine back what is free: cycles, and what malloc holds on to between."""
    gc.collect()
    with suppress(OSError, AttributeError):  # a C library without it
        ctypes.CDLL(None).malloc_trim(0)


def unhoarded() -> None:
    """Let malloc give back each block of a MB and more when it is free, from now on.

    Else it keeps blocks as large as it has seen free, and the heap grows with what lies between.
    """
    with suppress(OSError, AttributeError):  # a C library without it
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**20)


@dataclass(frozen=True)
class Spilled:
    """A tensor by the file that has it, or a small one itself."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    path: str | None = None
    value: Tensor | None = None

    def read(self) -> Tensor:
        """The tensor: the pages of its file that are read."""
        if self.path is None:
            assert self.value is not None
            return self.value
        count = torch.Size(self.shape).numel()
        with torch._C.DisableTorchFunction():  # modes of a comparison have no say in it
            flat = torch.from_file(self.path, shared=True, size=count, dtype=self.dtype)
        return flat.reshape(self.shape)

    def drop(self) -> None:
        """Remove its file: who has it mapped keeps it."""
        if self.path is not None:
            Path(self.path).unlink(missing_ok=True)


def spill(value: Tensor, folder: str | None) -> Spilled:
    """Write a tensor to a new file of a folder; a small one, or without a folder, is kept."""
    shape, size = tuple(value.shape), value.numel() * value.element_size()
    value = value.detach()
    if folder is None or size < LEAST:
        return Spilled(shape, value.dtype, value=value.to("cpu", copy=True))
    one = Spilled(shape, value.dtype, f"{folder}/{uuid.uuid4().hex}")
    one.read().copy_(value)
    return one


@dataclass
class Tensors(MutableMapping[Any, "Tensor | None"]):
    """Tensors by key, each read when it is asked for."""

    folder: str | None = None
    held: dict[Any, Spilled | None] = field(default_factory=dict)

    def __setitem__(self, key: Any, value: Tensor | None) -> None:
        """Write one away."""
        self.held[key] = None if value is None else spill(value, self.folder)

    def __getitem__(self, key: Any) -> Tensor | None:
        """Read one."""
        one = self.held[key]
        return None if one is None else one.read()

    def __delitem__(self, key: Any) -> None:
        """Forget one."""
        del self.held[key]

    def __iter__(self) -> Iterator[Any]:
        """All keys, in the order in which they came."""
        return iter(self.held)

    def __len__(self) -> int:
        """The number of tensors."""
        return len(self.held)

    def __or__(self, other: Mapping[Any, Tensor | None]) -> dict[Any, Tensor | None]:
        """Both, as a dict would."""
        return {**self, **other}
