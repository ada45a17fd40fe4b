"""Outputs, and gradients of inputs, of ranks with different tokens put back in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from schedlang.runtime import nests as pytree
from schedlang.runtime.attend import Layout
from schedlang.runtime.collectives import comm
from schedlang.runtime.parts import Absent, dotted, stack

if TYPE_CHECKING:
    from schedlang.runtime.assembly import Assembly

Weighed = tuple[Any, int, float]  # an output, its rows, and what it weighs in a mean


def across_tokens(a: Assembly, mine: Weighed, layout: Layout) -> Weighed:
    """The output of the rows of this rank, from those of all ranks that have tokens of them."""
    assert a.tokens is not None
    group = a.ranks.group(a.context)
    found: list[Any] = [mine]
    if group.pg is not None:
        found = comm.handed(mine, group.pg, a.ranks.device)
    outputs, rows, weights = zip(*found)
    return rejoined(outputs, weights, layout, a.tokens.outputs), rows[0], sum(weights)


def rejoined(outputs: Sequence[Any], weights: Sequence[float], layout: Layout, along: Any) -> Any:
    """The output for whole sequences; `along` has the dim of tokens of what runs along them."""
    flat = [pytree.tree_flatten_with_path(output) for output in outputs]
    made: list[Any] = []
    for leaves in zip(*(leaves for leaves, _ in flat)):
        name, values = dotted(leaves[0][0]), [value for _, value in leaves]
        dim = along.get(name)
        if dim is not None and all(isinstance(value, Tensor) for value in values):
            own = [v.narrow(dim, 0, n) for v, n in zip(values, layout.counts)]
            made.append(layout.whole(own, dim))
            continue
        plain = all(_plain(value) for value in values)
        whole = stack(values, [1] * len(values), weights) if plain else None
        scattered = isinstance(whole, Tensor) and whole.dim() > 0 and values[0].dim() > 0
        made.append(
            Absent("its parts by tokens cannot be concatenated")
            if not plain or scattered
            else whole
        )
    return pytree.tree_unflatten(made, flat[0][1])


def _plain(value: Any) -> bool:
    return isinstance(value, (Tensor, Absent, bool, int, float, str, type(None)))


def input_gradient(grads: Sequence[Tensor | None], layout: Layout, along: bool) -> Tensor | None:
    """Of an input of the same rows on ranks with different tokens: in order, or added up."""
    there = [grad for grad in grads if grad is not None]
    if not there:
        return None
    if along and len(there) == len(grads):
        return layout.whole(there, 1)
    return torch.stack(there).sum(0)
