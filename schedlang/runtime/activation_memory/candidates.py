"""The operators of each unit that could be kept: what they work, and what their results take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from schedlang.remat.operators import Key, Operator
from schedlang.runtime.activation_memory.selective import Turns, fresh
from schedlang.runtime.offload import saved_tensors
from schedlang.runtime.tracing.record import Burden, key_of, operations


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
        """What could be kept of a unit, in the order of its calls."""
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
