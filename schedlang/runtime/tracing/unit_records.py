"""Record what each unit of a model does in one forward on meta: units with equal records are equal.

A unit's record has every operator with its arguments and the origin of each tensor, so that later
forwards may run two units of each kind, and imitate the others (`equal_units.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.device import operator_context
from schedlang.runtime.forward_attributes import AttributeSnapshot
from schedlang.runtime.global_state import host_generator_states
from schedlang.runtime.submodules import modules_in
from schedlang.runtime.tracing.equal_units import PLAIN, Container, argument_leaves
from schedlang.runtime.tracing.meta_runs import LEAVES, MetaMode, tensors_in
from schedlang.runtime.tracing.meta_runs import PLAIN as PLAIN_TENSORS
from schedlang.runtime.tracing.recording import is_decided_by_shapes, key_of, written_tensors
from schedlang.runtime.tracing.units import CallSwitch

ENOUGH = 4  # units that cannot be recorded, after which others are not tried


class UnitRecorder:
    """Records the units of a model in one forward under a `MetaMode`.

    A unit has no record, and nothing may stand for it, where its forward leaves or finds anything
    beside its arguments, parameters and output: it is called twice or inside another unit; gets or
    returns other values than tensors and plain ones; changes an attribute; writes into what it was
    given; reads values, or draws; uses a tensor from elsewhere, or another module uses one of its
    own that it did not return.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.model, self.names = model, tuple(names)
        self._inside = [modules_in(model.get_submodule(name)) for name in names]
        self._held = [_held(inside) for inside in self._inside]
        self._hooks = [_hooks(inside) for inside in self._inside]
        self._records: dict[int, Any] = {}
        self._different: set[int | None] = {None}
        self._flags: list[tuple[Any, str]] = []  # (holder, name): set where a value is read
        self._unit: int | None = None
        self._operators: list[int] = []  # of the running unit, by their numbers
        self._numbers: dict[Any, int] = {}  # operator with its arguments and results -> its number
        self._origins: dict[int, Any] = {}  # storage -> where the running unit has it from
        self._makers: dict[int, int] = {}  # storage that was not returned -> the unit that made it
        # by id, as a hash would ask torch: operators, whether shapes decide them, and they write
        self._traits: dict[int, tuple[Any, bool, bool]] = {}
        self._alive: list[Any] = []  # another storage may get the address of a freed one

    @contextmanager
    def recording(self, values: MetaMode, trace: Any) -> Iterator[None]:
        """Context in which calls of units are recorded; `trace`: the mode that answers `bool`."""
        self._flags = [(values, "read_known"), (values, "read_unknown"), (trace, "answered")]
        switch = CallSwitch(self.model, self.names)
        values.ran = self._observe
        try:
            with switch.using(self._call):
                yield
        finally:
            switch.remove()
            values.ran = None

    def records(self, results: Any) -> dict[str, object]:
        """Return the records of units by name; `results` are the results of the whole forward."""
        with torch._C.DisableTorchFunction():
            self._different |= {self._makers.get(key_of(t)) for t in tensors_in(results)}
        kept = self._records.keys() - self._different
        return {self.names[unit]: self._records[unit] for unit in sorted(kept)}

    def _call(self, unit: int, original: Any, args: Any, kwargs: Any) -> Any:
        if self._unit is not None or unit in self._records or self._is_hopeless():
            self._different |= {self._unit, unit}
            return original(*args, **kwargs)
        read_before, states = self._take_flags(), host_generator_states()
        inside, held = self._inside[unit], self._held[unit]
        attributes, context = AttributeSnapshot(inside), operator_context()
        replaced = _is_replaced(inside, held)  # as by `torch.func.functional_call`
        self._unit, self._operators, self._origins = unit, [], {}
        with torch._C.DisableTorchFunction():
            for name, tensor in held.items():
                self._origins.setdefault(key_of(tensor), ("held", name))
            leaves = [*argument_leaves((args, kwargs))]
            arguments = self._given(leaves)
        try:
            output = original(*args, **kwargs)
        finally:
            self._unit, read = None, self._take_flags()
            for (holder, name), *values in zip(self._flags, read, read_before):
                setattr(holder, name, any(values))
        with torch._C.DisableTorchFunction():
            returned = self._returned(unit, leaves, output)
        changed = replaced or _is_replaced(inside, held) or _is_changed(attributes)
        hooked = _hooks(inside) != self._hooks[unit]  # some models register hooks when they run
        if any(read) or changed or hooked or host_generator_states() != states:
            self._different.add(unit)
        self._records[unit] = context, arguments, tuple(self._operators), returned
        return output

    def _is_hopeless(self) -> bool:
        """Return whether units cannot be recorded here, or the first of them all are different."""
        all_different = len(self._records) >= ENOUGH and self._records.keys() <= self._different
        return all_different or bool(torch._C._are_functorch_transforms_active())

    def _take_flags(self) -> list[bool]:
        """Return whether values of tensors were read since the last call, by way of reading."""
        flags = [getattr(holder, name) for holder, name in self._flags]
        for holder, name in self._flags:
            setattr(holder, name, False)
        return flags

    def _given(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and type(leaf) in PLAIN_TENSORS:
                self._origins.setdefault(key_of(leaf), ("given", index))
        return tuple(map(self._described, leaves))

    def _returned(self, unit: int, leaves: Sequence[Any], output: Any) -> tuple[Any, ...]:
        """Describe an output: arguments that are passed on, and tensors that the unit has made."""
        inputs = {id(leaf): index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        described: list[Any] = []
        made = list[int]()
        for leaf in argument_leaves(output):
            if id(leaf) in inputs:
                described.append(inputs[id(leaf)])
            elif type(leaf) is Tensor and leaf.is_floating_point():  # no known values
                made.append(key_of(leaf))
                described.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad))
            elif isinstance(leaf, (*PLAIN, Container)):
                described.append((type(leaf), leaf))
            else:
                self._different.add(unit)
        if len(set(made)) < len(made) or any(self._makers.get(key) != unit for key in made):
            self._different.add(unit)
        for key in made:
            self._makers.pop(key, None)
        return tuple(described)

    def _observe(self, func: Any, args: Any, kwargs: Mapping[str, Any], output: Any) -> Any:
        """Record an operator that has run; return its result."""
        unit = self._unit
        with torch._C.DisableTorchFunction():
            if unit is None:
                for tensor in tensors_in((args, kwargs)) if self._makers else ():
                    self._different.add(self._makers.get(key_of(tensor)))
                return output
            traits = self._traits.get(id(func))
            if traits is None:
                decided, writes = is_decided_by_shapes(func), func._schema.is_mutable
                traits = self._traits[id(func)] = func, decided, writes
            _, decided, writes = traits
            if not decided or writes and not self._writes_own(func, args, dict(kwargs)):
                self._different.add(unit)
            arguments = self._described(args), *((k, self._described(v)) for k, v in kwargs.items())
            for tensor in (output,) if isinstance(output, Tensor) else tensors_in(output):
                key = key_of(tensor)
                if key not in self._origins:
                    self._origins[key] = "made", len(self._operators)
                    self._makers[key] = unit
                    strided = tensor.layout is torch.strided
                    self._alive.append(tensor.untyped_storage() if strided else tensor)
            operator = id(func), arguments, self._described(output)
            self._operators.append(self._numbers.setdefault(operator, len(self._numbers)))
        return output

    def _writes_own(self, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        """Return whether an operator writes only into tensors that the running unit has made."""
        origins = [self._origins.get(key_of(t)) for t in written_tensors(func, args, kwargs)]
        return all(origin is not None and origin[0] == "made" for origin in origins)

    def _described(self, value: Any) -> Any:
        """Return a key of an argument; a unit with values that have none is different."""
        kind = type(value)
        if kind in PLAIN_TENSORS:
            if value.layout is torch.strided and not value.is_nested:
                key = key_of(value)
                origin = self._origins.get(key)
                if origin is None:  # from elsewhere
                    self._different |= {self._unit, self._makers.get(key)}
                form = value.shape, value.stride(), value.storage_offset(), value.dtype
                return origin, form, value.requires_grad
        elif kind is tuple or kind is list:
            return kind, tuple([self._described(item) for item in value])
        elif kind in LEAVES or isinstance(value, (*PLAIN, Container, torch._ops.OpOverload)):
            return kind, value
        self._different.add(self._unit)
        return None


def _held(inside: Sequence[tuple[str, nn.Module]]) -> dict[str, Tensor]:
    """Return the parameters and buffers of modules, by name."""
    return {
        f"{path}.{name}": tensor
        for path, module in inside
        for tensors in (module._parameters, module._buffers)
        for name, tensor in tensors.items()
        if tensor is not None
    }


def _hooks(inside: Sequence[tuple[str, nn.Module]]) -> list[int]:
    """Return the numbers of hooks of modules."""
    return [
        len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
        for _, module in inside
    ]


def _is_replaced(inside: Sequence[tuple[str, nn.Module]], held: Mapping[str, Tensor]) -> bool:
    """Return whether modules have other parameters or buffers than those that are known."""
    current = _held(inside)
    return current.keys() != held.keys() or any(current[name] is not held[name] for name in held)


def _is_changed(attributes: AttributeSnapshot) -> bool:
    """Return whether a forward has changed an attribute of its modules."""
    try:
        attributes.store_changes("")
    except Refusal:  # a tensor that was written into
        return True
    return attributes.has_changes
