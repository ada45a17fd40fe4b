"""The values that a program is built with, where the model has none."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

from torch import nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.checkpointing.steps import is_checkpoint, is_dcps
from schedlang.runtime.initial.recorded import record_of
from schedlang.runtime.initial.weights import Room, files_of


class Source(Protocol):
    """Gives parts of tensors their values."""

    def fill(self, rooms: Sequence[Room]) -> None:
        """Write all parts in place; raise Refusal where one cannot be had."""

    def digest(self) -> str:
        """Equal on ranks that will have the same values."""


class Later:
    """A checkpoint, which is read into the program once it is built."""

    def fill(self, rooms: Sequence[Room]) -> None:
        """Leave the parts as they are."""

    def digest(self) -> str:
        """Ranks compare what they load."""
        return ""


def source_of(model: nn.Module, weights: str | os.PathLike[str] | None) -> Source:
    """Return where the values of a model without any come from.  Raises Refusal S623, S643."""
    if weights is not None:
        later = is_checkpoint(weights) or is_dcps(weights)
        return Later() if later else files_of(weights, model)
    if (record := record_of(model)) is not None:
        return record
    raise Refusal.of(
        "S623",
        "the model has no values: it is on the meta device",
        helps=(
            "make it by `schedlang.deferred_init(make)`: each rank makes its parts alone",
            "or say where they are: `build(weights=path)`, a folder of safetensors or a checkpoint",
            "or build it on a real device; `plan` and `diff` need no values",
        ),
    )
