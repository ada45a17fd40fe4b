"""Costs of saved activations, for choices of a plan: work and bytes of the results of operators,
and the error of the gradient when a tensor is saved in few bits."""

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
from schedlang.runtime.activation_memory.quantized import (
    Quantization,
    QuantizedActivations,
    QuantizedTensor,
)
from schedlang.runtime.activation_memory.selective import CallNumbers, is_functional
from schedlang.runtime.device import generators_restored
from schedlang.runtime.forward import wrap
from schedlang.runtime.offload import offloaded_activations
from schedlang.runtime.tracing.recording import UnitCosts, key_of, operations

# ---- The operators of each unit whose results could be saved: their work, the bytes of results.


@dataclass
class _RanOperator:
    """One operator: its key, if its result could be saved, its work, and its results."""

    key: Key | None
    work: float
    made: list[Tensor]


@dataclass
class _Call:
    """One call of a unit: operators so far, and how many of them a second run would repeat."""

    turns: CallNumbers = field(default_factory=CallNumbers)
    ran: list[_RanOperator] = field(default_factory=list)
    repeated: int = 0
    saved: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)


class OperatorCosts(UnitCosts):
    """Counts as Burden does, and also by operator.

    An operator without a formula for its operations counts one for each element of its results. A
    second run ends with the last tensor that autograd saved: later operators are not repeated.
    """

    def __init__(self, units: int) -> None:
        super().__init__(units)
        self.fixed = [0.0] * units  # the work of operators that are always repeated
        self.forward = [0.0] * units  # of all operators of a forward
        self.small = [0] * units  # saved bytes in tensors too small to be offloaded
        self._found: list[dict[Key, Operator]] = [{} for _ in range(units)]
        self._calls: dict[int, _Call] = {}

    def operators(self, unit: int) -> tuple[Operator, ...]:
        """Return the operators of a unit whose results could be saved, in the order of calls."""
        return tuple(self._found[unit].values())

    @contextmanager
    def counting(self, unit: int, arguments: Sequence[Tensor]) -> Iterator[None]:
        """Count one call of a unit."""
        call = self._calls[unit] = _Call()
        with super().counting(unit, arguments):
            yield
        del self._calls[unit]
        for operator in call.ran[: call.repeated]:
            storages = {key_of(tensor): tensor for tensor in operator.made}
            if operator.key is None or call.written & set(storages):
                self.fixed[unit] += operator.work
            else:
                self._add(unit, operator, storages, call.saved)

    def _add(
        self, unit: int, ran: _RanOperator, storages: dict[int, Tensor], saved: set[int]
    ) -> None:
        assert ran.key is not None
        seen: set[int] = set()
        sizes = {key: self._size(tensor, seen) for key, tensor in storages.items()}
        operator = self._found[unit].get(ran.key, Operator(ran.key, 0.0, 0))
        in_saved = sum(size for key, size in sizes.items() if key in saved)
        self._found[unit][ran.key] = Operator(
            ran.key,
            operator.work + ran.work,
            operator.bytes + sum(sizes.values()),
            operator.saved + in_saved,
        )

    def count_saved(self, unit: int, tensor: Tensor, size: int) -> None:
        """Count a saved tensor; a second run runs at least up to here."""
        super().count_saved(unit, tensor, size)
        if size < offloaded_activations.MIN_BYTES:
            self.small[unit] += size
        call = self._calls[unit]
        call.saved.add(key_of(tensor))
        call.repeated = len(call.ran)

    def count_operations(self, unit: int, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Count one operator of a unit."""
        super().count_operations(unit, func, args, kwargs, output)
        outputs = [value for value in tree_leaves(output) if isinstance(value, Tensor)]
        repeats = is_functional(func)
        work = operations(func, args, kwargs, output) if repeats else 0.0
        self.forward[unit] += work
        call = self._calls[unit]
        for argument, value in zip(func._schema.arguments, args):
            if argument.alias_info is not None and argument.alias_info.is_write:
                call.written |= {key_of(t) for t in tree_leaves(value) if isinstance(t, Tensor)}
        call.ran.append(
            _RanOperator(call.turns.next_key(func, args, kwargs), work, outputs if repeats else [])
        )


# ---- How much the gradient of a loss changes when one saved tensor is kept in few bits.
# The sensitivity by which bits are assigned (Liu et al., GACT, 2022; Chen et al., ActNN, 2021):
# with one tensor quantized and all others exact, the squared distance of the gradient of all
# parameters from the exact one, which falls with the square of the number of levels.


PROBE_BITS = 4  # bits of the one tensor that is quantized
PROBE_PASSES = 2


class SavedPlace(NamedTuple):
    """A saved tensor of every call of a quantized module: its number among the floats of a call."""

    module: str
    number: int


@dataclass
class PlaceFacts:
    """Facts of a place: the innermost module that saves there, elements in a pass, and the squared
    change of the gradient; None without values."""

    site: str
    elements: int = 0
    change: float | None = None


Run = Callable[[], Tensor | None]  # a forward of the model; the root of its backward


@dataclass(eq=False)
class _Probe(QuantizedActivations):
    """A policy that quantizes one place, or all of them."""

    state: _ProbeState = field(default_factory=lambda: _ProbeState())

    def coding_of(self, number: int) -> Quantization | None:
        """Return the coding of a tensor; None (unquantized) unless its place is being probed."""
        probed = self.state.only
        return self.coding if probed in (None, SavedPlace(self.fqn, number)) else None

    def note(self, number: int, tensor: Tensor, quantized: QuantizedTensor) -> None:
        """Record, in the first pass, the module and elements of a place; that pass quantizes
        all."""
        if self.state.only is None:
            place = SavedPlace(self.fqn, number)
            facts = self.state.places.setdefault(place, PlaceFacts(scope.current_site()))
            facts.elements += tensor.numel()


@dataclass
class _ProbeState:
    """State of all probes of a model: the one quantized place, and facts from the first pass."""

    only: SavedPlace | None = None
    places: dict[SavedPlace, PlaceFacts] = field(default_factory=dict)


def find_places(
    model: nn.Module, blocks: Mapping[str, int], run: Run
) -> dict[SavedPlace, PlaceFacts]:
    """Return the tensors that quantized modules of a model would save, in order; `blocks`: by
    module.

    With values, each place is also quantized alone, in `PROBE_PASSES` passes forward and backward,
    and the changes of the gradient are averaged. On the meta device there are no changes.
    """
    state = _ProbeState()
    for fqn, block in blocks.items():
        module = model.get_submodule(fqn)
        wrap(module, "code", _Probe(module, fqn, Quantization(PROBE_BITS, block), state=state))
    scope.named_sites(model)
    _forward(run, 0)
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    if state.places and not on_meta:
        state.only = SavedPlace("", -1)
        exact = _gradient(model, run, 0)
        for place, facts in state.places.items():
            state.only = place
            changes = [
                _distance(_gradient(model, run, draw), exact) for draw in range(PROBE_PASSES)
            ]
            facts.change = sum(changes) / PROBE_PASSES
    return state.places


def _gradient(model: nn.Module, run: Run, draw: int) -> list[Tensor]:
    """Return the gradients of all parameters; random draws are equal in every pass."""
    model.zero_grad(set_to_none=True)
    root = _forward(run, draw)
    if root is not None:
        root.backward()  # type: ignore[no-untyped-call]
    return [p.grad for p in model.parameters() if p.grad is not None]


def _forward(run: Run, draw: int) -> Tensor | None:
    with generators_restored(), scope.enter_scope(scope.Scope(draw, 0, ())):
        torch.manual_seed(0)
        return run()


def _distance(gradient: list[Tensor], exact: list[Tensor]) -> float:
    return sum(float((a.double() - b.double()).square().sum()) for a, b in zip(gradient, exact))
