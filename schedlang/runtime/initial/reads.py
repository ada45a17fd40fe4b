"""Slices of files that a rank would read for its parts, found without reading any."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from schedlang.runtime.checkpointing.index import DTYPES
from schedlang.runtime.initial.stored import KINDS, Box, Leaf
from schedlang.runtime.initial.weights import Files, Room


@dataclass(frozen=True)
class Slice:
    """A box of a tensor in a file; its bytes there."""

    file: str
    name: str
    box: Box
    bytes: int


@dataclass(frozen=True)
class _Noted(Leaf):
    """A tensor of a file that notes what is asked of it, and gives no values."""

    asked: list[Slice] = field(repr=False, compare=False)

    def read(self, box: Box) -> Tensor:
        """Note a box."""
        shape = [high - low for low, high in box]
        made = torch.empty(shape, dtype=DTYPES[KINDS.get(self.kind, "uint8")], device="meta")
        size = math.prod(shape) * made.element_size()
        self.asked.append(Slice(self.file.name, self.name, box, size))
        return made


def reads(files: Files, rooms: Sequence[Room]) -> tuple[Slice, ...]:
    """Find what `files.fill(rooms)` would read, of parts on the meta device.

    Raises Refusal S643 where it would: missing names, other shapes, another model.
    """
    asked: list[Slice] = []
    noted = {
        name: _Noted(leaf.file, leaf.name, leaf.kind, leaf.shape, leaf.open_, asked)
        for name, leaf in files.leaves.items()
    }
    replace(files, leaves=noted).fill(rooms)
    return tuple(asked)
