"""Rows of a module's output, all-gathered over the ranks that split a batch.

The loss then is that of the full batch on every rank. Its gradient is weighted there by the part of
the batch that the rank has, as any loss: the sum over ranks, which the reduce-scatter of the
gathered rows and the reductions of parameters make, is the gradient of the full batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir import pytree
from schedlang.ir.model import quote_module
from schedlang.runtime import scope
from schedlang.runtime.comm.collectives import Group, all_gather, gather
from schedlang.runtime.grad_reduction.batch_statistics import Total

Gather = Callable[[Tensor], Tensor]  # this part's rows -> the rows of all parts


@dataclass(frozen=True)
class RowGathering:
    """The layer of a module whose output's rows are gathered; `gather` gathers one tensor.

    It stands outside of a recomputed module's layer: rows are not gathered again in backward.
    """

    fqn: str
    gather: Gather

    def __deepcopy__(self, memo: dict[int, Any]) -> RowGathering:
        return self  # groups are not copied

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the module's output with the rows of the full batch.

        Numbers without dims stay as they are. Raises Refusal S401 for a tensor that does not have
        one row for each row of this rank's part.
        """
        output = inner(*args, **kwargs)
        here = scope.current()
        rows = None if here is None else len(here.samples)

        def gathered(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.ndim:
                return value
            if rows is not None and value.shape[0] != rows:
                raise _not_by_rows(self.fqn, value, rows)
            return self.gather(value)

        return pytree.tree_map(gathered, output)


def gather_over(group: Group) -> Gather:
    """Return the gather over a group of ranks, in the order of their parts of the batch."""
    return partial(_gather_over, group=group)


def _gather_over(x: Tensor, group: Group) -> Tensor:
    here = scope.current()
    same_shapes = None if here is None else here.same_shapes
    if group.pg is None or x.is_meta or same_shapes is not None and same_shapes():
        return gather(x, 0, group, consumers_differ=True)
    own_shape = torch.tensor([x.shape], device=x.device)
    shapes = all_gather(own_shape, 0, group).tolist()
    if any(shape[1:] != shapes[0][1:] for shape in shapes):
        raise _unlike_rows(group.label, shapes)
    counts = [shape[0] for shape in shapes]
    padded = F.pad(x, [*[0, 0] * (x.ndim - 1), 0, max(counts) - len(x)])
    full = gather(padded, 0, group, consumers_differ=True)
    if len(set(counts)) == 1:
        return full
    return torch.cat([part[:count] for part, count in zip(full.chunk(group.size), counts)])


def gather_in_threads(counts: Sequence[int], index: int, total: Total) -> Gather:
    """Return the gather of threads of one process: part `index` of parts with `counts` rows.

    `total` sums a tensor over the threads, forward and backward.
    """
    before, after = sum(counts[:index]), sum(counts[index + 1 :])

    def gathered(x: Tensor) -> Tensor:
        return total(F.pad(x, [*[0, 0] * (x.ndim - 1), before, after])).to(x.dtype)

    return gathered


def _not_by_rows(fqn: str, value: Tensor, rows: int) -> Refusal:
    return Refusal.of(
        "S401",
        f"the output of {quote_module(fqn)} has {value.shape[0]} rows for {rows} rows of the batch",
        notes=(f"a tensor of shape {tuple(value.shape)}",),
        helps=("gather the rows of modules that give one for each row of the batch",),
    )


def _unlike_rows(fqn: str, shapes: Sequence[Sequence[int]]) -> Refusal:
    by_rank = ", ".join(" x ".join(map(str, shape)) for shape in shapes)
    return Refusal.of(
        "S401",
        f"the rows of {quote_module(fqn)} have other shapes on other ranks",
        notes=(f"by rank: {by_rank}",),
        helps=("pad all rows of a batch to one length",),
    )
