"""Refusals of a batch that the model rejects, or whose parts do not make its loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import Label, Refusal
from schedlang.diagnostics.source import NOWHERE
from schedlang.ir.model import quote_module
from schedlang.ir.plan import Plan

if TYPE_CHECKING:
    from torch import nn

    from schedlang.runtime.propagation.batch_sums import BatchSum


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


def part_refusal(error: Exception, batch: Mapping[str, Any], gathered: bool = False) -> Refusal:
    """Return S604 for an error that a model raised on a part of a batch, but not on the batch.

    `gathered`: it had the part's rows, and the gathered rows of other parts (`gather_rows`).
    """
    from schedlang.runtime.batch import named_tensors, row_count
    from schedlang.runtime.tracing.model_lines import line_of

    text, line, rows = f"{type(error).__name__}: {error}", line_of(error), row_count(batch)
    names = [name for name, tensor in named_tensors(batch).items() if tensor.shape[:1] == (rows,)]
    helps: tuple[str, ...] = (
        "what has no rows is no part of the batch: keep it as a buffer, or give it another first"
        " dim: `table[None]`",
        "or do not split the batch: 1 rank on the axes of `zero`, 1 microbatch",
    )
    if gathered:
        helps = ("let the gathered module return what else belongs to its rows, labels too",)
    return Refusal.of(
        "S604",
        "the model rejects gathered rows" if gathered else "the model rejects a part of this batch",
        notes=(
            f"it raised `{text.splitlines()[0]}`{line and f', at {line}'}",
            f"split by rows, {rows} of them: {', '.join(f'`{name}`' for name in names)}",
        ),
        helps=helps,
    )


HELP_RELAX = 'or allow statistics of each part: `step "..." relax(batch_stats) {`'
HELPS_NORM = (HELP_RELAX.removeprefix("or "), "or replace it by a norm of each row")
HELPS_WEIGHT = (
    "define `weight(batch)` in the model file: the weight of a part of the batch",
    'or allow it: `step "..." relax(batch_stats) {`',
)


def split_statistics(plan: Plan, batch_sum: BatchSum) -> Refusal:
    """Return S668: the loss needs a sum over the rows of all microbatches."""
    row = plan.origin(plan.order) if plan.order is not None else None
    return Refusal.of(
        "S668",
        f"the loss needs statistics of the full batch, not of {plan.micro} microbatches",
        Label((row and row.span) or NOWHERE),
        notes=(
            f"the forward of {quote_module(batch_sum.fqn)} takes a {batch_sum.name} over all rows"
            + (f", {batch_sum.line}" if batch_sum.line else ""),
            "the backward of a microbatch starts before later microbatches are computed",
        ),
        helps=(
            "use one microbatch, `micro=1`: ranks compute the statistics together",
            f"or, for a mean over what it counts, {HELPS_WEIGHT[0]}",
            HELP_RELAX,
        ),
    )
