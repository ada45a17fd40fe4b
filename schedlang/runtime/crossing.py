"""What happens to an activation at the edge of a sharded module: one placement into another."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
        return (str(self.source), str(self.target), self.group.axes, self.differ)


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
    dim = dim_of(crossing.source)
    return collective.gather(x, dim, crossing.group, consumers_differ=crossing.differ)


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


def shared(crossing: Crossing, x: Tensor) -> Tensor:
    """Cross once for all modules that take the very same tensor (q, k and v projections).

    The crossed tensor is remembered on the tensor itself, weakly: it lives as long as autograd or
    a consumer needs it, and a gathered copy is never kept for memory's sake.
    """
    known: dict[Any, weakref.ref[Tensor]] = x.__dict__.setdefault("_schedlang_crossed", {})
    reference = known.get(crossing.key)
    crossed = reference() if reference is not None else None
    if crossed is None:
        crossed = crossing(x)
        if crossed is not x:
            known[crossing.key] = weakref.ref(crossed)
    return crossed
