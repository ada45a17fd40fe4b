"""The source of the initial values of a program whose model has none: a record, files, a
checkpoint."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

from torch import nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.checkpointing.checkpoint_folders import is_any_checkpoint
from schedlang.runtime.initial.recorded_init import record_of
from schedlang.runtime.initial.weight_files import TargetPart, files_of


class Source(Protocol):
    """Gives parts of tensors their values."""

    def fill(self, targets: Sequence[TargetPart]) -> None:
        """Write all parts in place; raise Refusal if a value is not available."""

    def digest(self) -> str:
        """Return a text that is equal on ranks that will have the same values."""


class CheckpointSource:
    """A checkpoint, which is loaded into the program after it is built."""

    def fill(self, targets: Sequence[TargetPart]) -> None:
        """Leave the parts unchanged."""

    def digest(self) -> str:
        """Return "": ranks compare the checkpoints that they load."""
        return ""


def source_of(model: nn.Module, weights: str | os.PathLike[str] | None) -> Source:
    """Return the source of the values of a model without any. Raises Refusal S623, S643."""
    if weights is not None:
        return CheckpointSource() if is_any_checkpoint(weights) else files_of(weights, model)
    if (record := record_of(model)) is not None:
        return record
    raise Refusal.of(
        "S623",
        "the model has no values: it is on the meta device",
        helps=(
            "make it by `schedlang.deferred_init(make)`: each rank makes only its shards",
            "or say where they are: `build(weights=path)`, a folder of safetensors or a checkpoint",
            "or build it on a real device; `plan` and `diff` need no values",
        ),
    )
