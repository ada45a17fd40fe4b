"""What happens to an activation at the edge of a sharded module: one placement into another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from schedlang.placement import P, Placement, Replicate, S
from schedlang.runtime import collective
from schedlang.runtime.collective import Group

# the dims of an activation (batch, seq, hidden) by name
ACTIVATION_DIMS = {"batch": 0, "seq": 1, "hidden": -1, "out": -1, "in": -1, "vocab": -1}


def dim_of(placement: S) -> int:
    """The dim of an activation that a placement splits, as a number."""
    return placement.dim if isinstance(placement.dim, int) else ACTIVATION_DIMS[placement.dim]


@dataclass(frozen=True)
class Crossing:
    """One change of placement over one group.

    `differ`: the computation on the far side differs by rank, so that gradients coming back must
    be summed over the ranks.
    """

    source: Placement
    target: Placement
    group: Group
    differ: bool

    def __call__(self, x: Tensor) -> Tensor:
        """The tensor in its new placement."""
        change = _CHANGES[type(self.source), type(self.target)]
        return change(self, x)

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for crossings that do the same to the same tensor."""
        place = (str(self.source), str(self.target), self.group.axes, self.differ)
        return (*place, torch.is_grad_enabled())


def _same(crossing: Crossing, x: Tensor) -> Tensor:
    if isinstance(crossing.source, Replicate) and crossing.differ:
        return collective.enter(x, crossing.group)
    assert crossing.source == crossing.target or not isinstance(crossing.source, S), crossing
    return x


def _split(crossing: Crossing, x: Tensor) -> Tensor:
    assert isinstance(crossing.target, S)
    return collective.split(x, dim_of(crossing.target), crossing.group)


def _gather(crossing: Crossing, x: Tensor) -> Tensor:
    assert isinstance(crossing.source, S)
    dim, parts = dim_of(crossing.source), crossing.group.size
    whole = collective.gather(x, dim, crossing.group, consumers_differ=crossing.differ)
    blocks = crossing.source.blocks
    if blocks == 1:
        return whole
    # every rank's part holds its piece of each block side by side: put equal blocks together
    sizes = [whole.shape[dim] // blocks] * blocks if isinstance(blocks, int) else list(blocks)
    shares = [size // parts for size in sizes]
    pieces = [torch.split(part, shares, dim) for part in whole.chunk(parts, dim)]
    return torch.cat([piece[block] for block in range(len(sizes)) for piece in pieces], dim)


def _reduce(crossing: Crossing, x: Tensor) -> Tensor:
    return collective.reduce(x, crossing.group)


def _scatter(crossing: Crossing, x: Tensor) -> Tensor:
    assert isinstance(crossing.target, S)
    return collective.scatter_sum(x, dim_of(crossing.target), crossing.group)


_CHANGES: dict[tuple[type, type], Callable[[Crossing, Tensor], Tensor]] = {
    (Replicate, Replicate): _same,
    (S, S): _same,
    (P, P): _same,
    (Replicate, S): _split,
    (S, Replicate): _gather,
    (P, Replicate): _reduce,
    (P, S): _scatter,
}


_last: dict[tuple[Any, ...], tuple[Tensor, int, Tensor]] = {}


def shared(crossing: Crossing, x: Tensor) -> Tensor:
    """Cross once for all modules that take the very same tensor in a row (q, k and v projections).

    Only the last crossing of each sort is remembered, so that no more than one tensor is kept;
    `forget` drops that one.
    """
    known = _last.get(crossing.key)
    if known is not None and known[0] is x and known[1] == x._version:
        return known[2]
    crossed = crossing(x)
    if crossed is not x:
        _last[crossing.key] = (x, x._version, crossed)
    return crossed


def forget() -> None:
    """Let go of the tensors that `shared` remembers; called at the end of a step."""
    _last.clear()
