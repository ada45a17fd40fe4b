"""How much the gradient of a loss changes when one saved tensor is kept in few bits.

The sensitivity that bits are given by (Liu et al., GACT, 2022; Chen et al., ActNN, 2021): with one
tensor rounded and all others as they are, the squared distance of the gradient of all parameters
from the exact one, which falls with the square of the number of levels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from schedlang.runtime import scope
from schedlang.runtime.activation_memory.quantized import Code, Coding, Rounded
from schedlang.runtime.device import undrawn
from schedlang.runtime.forward import wrap

PROBED = 4  # bits in which a tensor is kept while the others are not
DRAWS = 2


class Place(NamedTuple):
    """A saved tensor of every call of a coded module: its number among the floats of a call."""

    module: str
    number: int


@dataclass
class Seen:
    """What is known of a place: the innermost module that saves there, elements in a pass, and the
    squared change of the gradient; None where there are no values."""

    site: str
    elements: int = 0
    change: float | None = None


Run = Callable[[], Tensor | None]  # a forward of the model; where its backward begins


@dataclass(eq=False)
class _Probe(Code):
    """A coded module that keeps in few bits what is asked for: one place, or all of them."""

    watched: _Watched = field(default_factory=lambda: _Watched())

    def at(self, number: int) -> Coding | None:
        """How a tensor is kept: as it is, unless its place is the one that is asked for."""
        asked = self.watched.only
        return self.coding if asked in (None, Place(self.fqn, number)) else None

    def note(self, number: int, tensor: Tensor, made: Rounded) -> None:
        """In the first pass, which keeps all: where a tensor is saved, and its elements."""
        if self.watched.only is None:
            place = Place(self.fqn, number)
            seen = self.watched.places.setdefault(place, Seen(scope.site()))
            seen.elements += tensor.numel()


@dataclass
class _Watched:
    """All probes of a model: the one place that is rounded, and what the first pass has seen."""

    only: Place | None = None
    places: dict[Place, Seen] = field(default_factory=dict)


def places_of(model: nn.Module, blocks: Mapping[str, int], run: Run) -> dict[Place, Seen]:
    """What coded modules of a throwaway model would round, in order; by modules their block.

    On the meta device that is all; with values each place is then rounded by itself, in `DRAWS`
    passes of the model, forward and backward, and the changes of the gradient are averaged.
    """
    watched = _Watched()
    for fqn, block in blocks.items():
        module = model.get_submodule(fqn)
        wrap(module, "code", _Probe(module, fqn, Coding(PROBED, block), watched=watched))
    scope.named_sites(model)
    _forward(run, 0)
    hollow = any(parameter.is_meta for parameter in model.parameters())
    if watched.places and not hollow:
        watched.only = Place("", -1)
        exact = _gradient(model, run, 0)
        for place, seen in watched.places.items():
            watched.only = place
            changes = [_distance(_gradient(model, run, draw), exact) for draw in range(DRAWS)]
            seen.change = sum(changes) / DRAWS
    return watched.places


def _gradient(model: nn.Module, run: Run, draw: int) -> list[Tensor]:
    """The gradients of all parameters; what the model draws is the same in every pass."""
    model.zero_grad(set_to_none=True)
    root = _forward(run, draw)
    if root is not None:
        root.backward()  # type: ignore[no-untyped-call]
    return [p.grad for p in model.parameters() if p.grad is not None]


def _forward(run: Run, draw: int) -> Tensor | None:
    with undrawn(), scope.entered(scope.Scope(draw, 0, ())):
        torch.manual_seed(0)
        return run()


def _distance(found: list[Tensor], exact: list[Tensor]) -> float:
    return sum(float((a.double() - b.double()).square().sum()) for a, b in zip(found, exact))
