"""Redistribution of an activation at the edge of a sharded module: one placement into another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal
from schedlang.ir.placement import EVEN, P, Placement, Replicate, S, holds
from schedlang.runtime.comm import collectives
from schedlang.runtime.comm.collectives import Group

# the dims of an activation (batch, seq, hidden) by name
ACTIVATION_DIMS = {"batch": 0, "seq": 1, "hidden": -1, "out": -1, "in": -1, "vocab": -1}


def dim_of(placement: S) -> int:
    """The dim of an activation that a placement splits, as a number."""
    return placement.dim if isinstance(placement.dim, int) else ACTIVATION_DIMS[placement.dim]


def redistribute(
    x: Tensor, source: Placement, target: Placement, group: Group, differ: bool = False
) -> Tensor:
    """The tensor in another placement over one group.

    `differ`: the computation on the far side differs by rank, so that gradients coming back must
    be summed over the ranks.
    """
    if isinstance(source, Replicate) and isinstance(target, Replicate):
        return collectives.enter(x, group) if differ else x
    if isinstance(source, S) and isinstance(target, Replicate):
        return _gathered(x, source, group, differ)
    if isinstance(source, P) and isinstance(target, Replicate):
        return collectives.reduce(x, group)
    if source == target:
        return x
    assert isinstance(target, S), (source, target)
    whole, dim = laid(x, target, group), dim_of(target)
    if isinstance(source, Replicate):
        return collectives.split(whole, dim, group)
    if isinstance(source, P):
        return collectives.scatter_sum(whole, dim, group)
    assert switches(source, target), (source, target)
    return collectives.switch(whole, dim_of(source) % x.ndim, dim % x.ndim, group)


def switches(source: Placement, target: Placement) -> bool:
    """Return whether parts along one dim become parts along another, all equally large."""
    both = [p for p in (source, target) if isinstance(p, S) and p.blocks == 1 and p.uneven == EVEN]
    return len(both) == 2 and dim_of(both[0]) != dim_of(both[1])


def _gathered(x: Tensor, source: S, group: Group, differ: bool) -> Tensor:
    dim = dim_of(source)
    whole = collectives.gather(x, dim, group, consumers_differ=differ)
    if source.blocks == 1 and source.uneven == EVEN:
        return whole
    # every rank's part holds its piece of each block side by side: put equal blocks together
    sizes = block_sizes(source, source.uneven.true(x.shape[dim], group.size))
    runs = holds(sizes, source.uneven, group.size)
    first = [r for r in runs if r.start < sum(sizes) and r.rank % source.uneven.repeat == 0]
    first.sort(key=lambda run: run.start)
    pieces = [whole.narrow(dim, r.rank * x.shape[dim] + r.at, r.length) for r in first]
    return torch.cat(pieces, dim)


def block_sizes(placement: S, whole: int) -> tuple[int, ...]:
    """The sizes of the blocks in a dim of this size."""
    blocks = placement.blocks
    if isinstance(blocks, int):
        return (whole // blocks,) * blocks
    return tuple(block * whole // sum(blocks) for block in blocks)


def laid(x: Tensor, placement: S, group: Group) -> Tensor:
    """The whole with the parts of all ranks one behind the other, each as wide as the others."""
    dim, ranks = dim_of(placement), group.size
    size = x.shape[dim]
    if placement.blocks == 1 and placement.uneven == EVEN:
        if size % ranks:
            raise Refusal(_ragged(placement, size, group))
        return x
    sizes = block_sizes(placement, size)
    pieces = []
    for run in holds(sizes, placement.uneven, ranks):
        if run.start < size:
            pieces.append(x.narrow(dim, run.start, run.length))
        else:
            shape = list(x.shape)
            shape[dim] = run.length
            pieces.append(x.new_zeros(shape))
    return torch.cat(pieces, dim)


def _ragged(placement: S, size: int, group: Group) -> Diagnostic:
    axis, dim = group.axes[0], dim_of(placement)
    named = [f"`S({name})`" for name, which in ACTIVATION_DIMS.items() if which == dim >= 0]
    row = " or ".join([f"`S({placement.dim})`", *named])
    legal = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
    return Diagnostic(
        "S420",
        f"a dim of {size} cannot be split evenly over `{axis}`={group.size}",
        notes=(f"{row} in a row of `{group.label or 'a module'}` splits this dim",),
        helps=(
            f"`{axis}` may be one of {legal}",
            f"or pad the batch to a multiple of {group.size} along this dim, if it is one of the"
            " batch (tokens, not channels)",
            "or drop that placement from the row: `input=`, `output=`",
        ),
        facts=(("site", group.label),),
    )


@dataclass(eq=False)
class Arrivals:
    """The last redistribution of each sort for the modules inside of one module.

    It is the layer of that module: within one call, modules that take the very same tensor in a row
    (q, k and v projections) redistribute it once; afterwards nothing is kept.

    written  whether a tensor is written into between two modules that take it: a graph of
             torch.compile, which cannot ask how often that was done, then crosses for each
    """

    written: bool = False
    _last: dict[tuple[Any, ...], tuple[Tensor, int, Tensor]] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> Arrivals:
        return Arrivals(self.written)

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `inner`, and let go of the tensors that are remembered."""
        try:
            return inner(*args, **kwargs)
        finally:
            self._last.clear()

    def redistribute(
        self, x: Tensor, source: Placement, target: Placement, group: Group, differ: bool
    ) -> Tensor:
        """The tensor in its new placement, which the module before this one may have made."""
        at = (source, target, group.axes, differ, torch.is_grad_enabled())
        # how often it was written into; None where nobody can tell
        version: int | None
        if torch.compiler.is_compiling():
            version = None if self.written else 0
        else:
            version = None if x.is_inference() else x._version
        known = self._last.get(at)
        if known is not None and known[0] is x:
            if known[1] == version:
                return known[2]
            self.written = True
        crossed = redistribute(x, source, target, group, differ)
        if crossed is not x and version is not None:
            self._last[at] = (x, version, crossed)
        return crossed
