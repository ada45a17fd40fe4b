"""Costs of keeping activations: work and bytes of operators, the error of few bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from schedlang.remat.operators import Key, Operator
from schedlang.runtime import scope
from schedlang.runtime.activation_memory.quantized import Code, Coding, Rounded
from schedlang.runtime.activation_memory.selective import Turns, fresh
from schedlang.runtime.device import undrawn
from schedlang.runtime.forward import wrap
from schedlang.runtime.offload import saved_tensors
from schedlang.runtime.tracing.record import Burden, key_of, operations

# ---- The operators of each unit that could be kept: what they work, and what their results take.


@dataclass
class _Ran:
    """One operator: its name, if it could be kept, its work, and what it made."""

    key: Key | None
    work: float
    made: list[Tensor]


@dataclass
class _Call:
    """One call of a unit: what ran so far, and how much of it a second run would run again."""

    turns: Turns = field(default_factory=Turns)
    ran: list[_Ran] = field(default_factory=list)
    repeated: int = 0
    saved: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)


class Menu(Burden):
    """Counts as Burden does, and also operator by operator.

    An operator without a formula for its operations counts one for each element that it makes. A
    second run ends with the last tensor that autograd saved: what follows is not run again.
    """

    def __init__(self, units: int) -> None:
        super().__init__(units)
        self.fixed = [0.0] * units  # the work of what runs again in any case
        self.forward = [0.0] * units  # of all that runs once
        self.small = [0] * units  # of the bytes saved what no store moves
        self._found: list[dict[Key, Operator]] = [{} for _ in range(units)]
        self._calls: dict[int, _Call] = {}

    def operators(self, unit: int) -> tuple[Operator, ...]:
        """The results of a unit that could be kept, in the order of its calls."""
        return tuple(self._found[unit].values())

    @contextmanager
    def of(self, unit: int, arguments: Sequence[Tensor]) -> Iterator[None]:
        """Count one call of a unit."""
        call = self._calls[unit] = _Call()
        with super().of(unit, arguments):
            yield
        del self._calls[unit]
        for ran in call.ran[: call.repeated]:
            storages = {key_of(one): one for one in ran.made}
            if ran.key is None or call.written & set(storages):
                self.fixed[unit] += ran.work
            else:
                self._add(unit, ran, storages, call.saved)

    def _add(self, unit: int, ran: _Ran, storages: dict[int, Tensor], saved: set[int]) -> None:
        assert ran.key is not None
        seen: set[int] = set()
        sizes = {key: self._size(one, seen) for key, one in storages.items()}
        old = self._found[unit].get(ran.key, Operator(ran.key, 0.0, 0))
        inside = sum(size for key, size in sizes.items() if key in saved)
        self._found[unit][ran.key] = Operator(
            ran.key, old.work + ran.work, old.bytes + sum(sizes.values()), old.saved + inside
        )

    def keeps(self, unit: int, tensor: Tensor, size: int) -> None:
        """Note what is saved, and that a second run comes at least to here."""
        super().keeps(unit, tensor, size)
        if size < saved_tensors.SMALLEST:
            self.small[unit] += size
        call = self._calls[unit]
        call.saved.add(key_of(tensor))
        call.repeated = len(call.ran)

    def ran(self, unit: int, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Note one operator of a unit."""
        super().ran(unit, func, args, kwargs, output)
        made = [one for one in tree_leaves(output) if isinstance(one, Tensor)]
        new = fresh(func)
        work = operations(func, args, kwargs, output) if new else 0.0
        self.forward[unit] += work
        call = self._calls[unit]
        for argument, one in zip(func._schema.arguments, args):
            if argument.alias_info is not None and argument.alias_info.is_write:
                call.written |= {key_of(t) for t in tree_leaves(one) if isinstance(t, Tensor)}
        call.ran.append(_Ran(call.turns.of(func, args, kwargs), work, made if new else []))


# ---- How much the gradient of a loss changes when one saved tensor is kept in few bits.
# The sensitivity that bits are given by (Liu et al., GACT, 2022; Chen et al., ActNN, 2021): with
# one tensor rounded and all others as they are, the squared distance of the gradient of all
# parameters from the exact one, which falls with the square of the number of levels.


PROBED = 4  # bits in which a tensor is kept while the others are not
DRAWS = 2


class Place(NamedTuple):
    """A saved tensor of every call of a coded module: its number among the floats of a call."""

    module: str
    number: int


@dataclass
class Seen:
    """Facts of a place: the innermost module that saves there, elements in a pass, and the
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
        """Return the coding of a tensor: None (as it is), unless its place is the one that is asked
        for."""
        asked = self.watched.only
        return self.coding if asked in (None, Place(self.fqn, number)) else None

    def note(self, number: int, tensor: Tensor, made: Rounded) -> None:
        """Note, in the first pass, which keeps all, where a tensor is saved, and its elements."""
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
    """The tensors that coded modules of a model would round, in order; `blocks`: by module.

    On the meta device that is all; with values each place is then rounded by itself, in `DRAWS`
    passes of the model, forward and backward, and the changes of the gradient are averaged.
    """
    watched = _Watched()
    for fqn, block in blocks.items():
        module = model.get_submodule(fqn)
        wrap(module, "code", _Probe(module, fqn, Coding(PROBED, block), watched=watched))
    scope.named_sites(model)
    _forward(run, 0)
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    if watched.places and not on_meta:
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
