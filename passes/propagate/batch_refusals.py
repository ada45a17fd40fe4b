"""Refusals of a batch that the model rejects on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import Refusal

if TYPE_CHECKING:
    from torch import nn


def is_about_values(error: Exception) -> bool:
    """Return whether an error says that values of a meta tensor were needed."""
    text = str(error)
    is_match = "on meta tensors" in text or "CPU" in text and "but got" in text and " meta " in text
    is_match |= "unallocated storage" in text or "meta tensor without output_size" in text
    return isinstance(error, NotImplementedError) or is_match


def find_unused_keys(model: nn.Module, batch: Mapping[str, Any]) -> list[str]:
    """Return the keys of a batch that the forward does not take."""
    from schedlang.runtime.batch import accepted_inputs

    return [key for key in batch if key not in accepted_inputs(model, batch)]


def describe_packed_tensors(batch: Mapping[str, Any]) -> tuple[str, ...]:
    """Return notes on tensors of a batch with several entries per row, such as packed patches.

    These tensors are not split, nor are lists of numbers: each part of the batch has all of them.
    """
    from schedlang.runtime.batch import named_tensors, row_count
    from schedlang.runtime.row_lists import describe_number_lists

    try:
        rows = row_count(batch)
    except Refusal:  # a batch without rows: the model's own error is reported first
        return ()
    sizes = {name: tensor.shape[:1] for name, tensor in named_tensors(batch).items()}
    oversized = [(name, size[0]) for name, size in sizes.items() if size and size[0] > max(1, rows)]
    return tuple(
        f"`{name}` has {count} entries in dim 0 where the batch has {rows} rows: it is not split"
        " by rows, and each part has all of it"
        for name, count in oversized
    ) + describe_number_lists(batch, rows)


def batch_refusal(
    error: Exception,
    model: nn.Module | None = None,
    batch: Mapping[str, Any] | None = None,
    read_line: str = "",
) -> Refusal:
    """Return the refusal for an error that the model raised on the meta device.

    `model` and `batch`: what ran, if keys of the batch may be misspelled. `read_line`: where the
    model got values that are unknown.
    """
    from schedlang.runtime.tracing.model_lines import line_of
    from schedlang.runtime.tracing.module_calls import value_refusal

    if read_line or is_about_values(error):
        return value_refusal(error, read_line)
    text, line = f"{type(error).__name__}: {error}".split("\n")[0], line_of(error)
    packed = describe_packed_tensors(batch) if batch else ()
    unused_keys = find_unused_keys(model, batch) if model is not None and batch else []
    helps = ["return the keyword arguments of the model's forward from `batch(seed)`"]
    if "more than 1 value per channel" in text:  # torch's batch norm, in training
        helps = ["give more rows, or fewer parts: ranks on the axes of `zero`, microbatches"]
    if packed:
        helps += [
            "give one entry for each row, `[rows, ...]`, and flatten it in the forward",
            "or do not split the batch: 1 rank on the axes of `zero`, 1 microbatch",
        ]
    return Refusal.of(
        "S604",
        "the model rejects this batch",
        notes=(
            f"on the meta device it raised `{text}`{line and f', at {line}'}",
            *(f"its forward does not take `{key}` of the batch" for key in unused_keys),
            *packed,
        ),
        helps=tuple(helps),
    )
