"""Equal units in one forward on the meta device: two of each kind run, the others are imitated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.runtime.tracing.units import CallSwitch

RUNS_PER_KIND = (
    2  # units of a kind that run: the first may get other arguments, the second shows whether
)
PLAIN = (bool, int, float, str, type(None))
Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, bool]


class DifferentUnits(Exception):
    """Raised if a unit is called differently from those of its kind: then all units have to run."""


@dataclass(frozen=True)
class _Shown:
    """One call of a unit that ran: the leaves of its arguments, and its output."""

    given: Sequence[Any]
    gave: Any

    @property
    def made(self) -> list[Tensor]:
        """The tensors of the output that are not among the arguments."""
        input_ids = set(map(id, self.given))
        return [t for t in _leaves(self.gave) if isinstance(t, Tensor) and id(t) not in input_ids]


class EqualUnits:
    """Runs two units of each kind, and imitates the others: calls `passed(name, backward)`.

    kinds    unit -> its kind
    reached  unit -> the numbers of its results that have got a gradient
    Raises Unlike if a unit is not called once, or if its arguments differ from those of the second
    unit of its kind: tensors of another form, other numbers, or neither tensors nor plain values.
    """

    def __init__(
        self, model: nn.Module, kinds: Mapping[str, object], passed: Callable[[str, bool], None]
    ) -> None:
        self.model, self.names, self.kinds, self.passed = model, tuple(kinds), kinds, passed
        self.reached: dict[str, set[int]] = {name: set() for name in kinds}
        self._calls: Counter[object] = Counter()
        self._called: set[str] = set()
        self._shown: dict[object, _Shown] = {}

    @contextmanager
    def using(self) -> Iterator[None]:
        """Context in which calls of the model's units are intercepted."""
        switch = CallSwitch(self.model, self.names)
        try:
            with switch.using(self._call):
                yield
        finally:
            switch.remove()

    def _call(self, unit: int, original: Any, args: Any, kwargs: Any) -> Any:
        name = self.names[unit]
        if name in self._called:
            raise DifferentUnits
        self._called.add(name)
        kind, leaves = self.kinds[name], list(_leaves((args, kwargs)))
        self._calls[kind] += 1
        if self._calls[kind] > RUNS_PER_KIND:
            return self._imitate(name, self._shown[kind], leaves)
        output = original(*args, **kwargs)
        self._shown[kind] = shown = _Shown(leaves, output)
        with torch._C.DisableTorchFunction():  # not seen by function modes
            for output_index, tensor in enumerate(shown.made):
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._reach, name, output_index))  # type: ignore[no-untyped-call]
        return output

    def _reach(self, name: str, output_index: int, grad: object) -> None:
        self.reached[name].add(output_index)

    def _imitate(self, name: str, shown: _Shown, leaves: Sequence[Any]) -> Any:
        """Return the imitated output of a unit whose arguments equal those of a unit that ran."""
        with torch._C.DisableTorchFunction():  # not seen by function modes
            if not (
                len(leaves) == len(shown.given) and all(map(_same_argument, leaves, shown.given))
            ):
                raise DifferentUnits
            replacements = {id(old): new for old, new in zip(shown.given, leaves)}
            learns = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
            forms = list(map(_form, shown.made))
            if any(form[3] for form in forms) and not learns:
                raise DifferentUnits
            self.passed(name, False)
            on_backward = partial(self._pass_back, name)
            outputs = _Imitated.apply(on_backward, forms, *learns) if forms else ()  # type: ignore[no-untyped-call]
            replacements |= {id(old): output for old, output in zip(shown.made, outputs)}
            return _replaced(shown.gave, replacements)

    def _pass_back(self, name: str, output_indices: Iterable[int]) -> None:
        self.reached[name].update(output_indices)
        self.passed(name, True)


class _Imitated(torch.autograd.Function):
    """Function from tensors that require a gradient to new tensors of given forms, on meta."""

    @staticmethod
    def forward(
        ctx: Any, on_backward: Callable[[Iterable[int]], None], forms: Any, *inputs: Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.on_backward, ctx.given = on_backward, [(t.shape, t.dtype) for t in inputs]
        outputs = [
            torch.empty_strided(size, stride, dtype=dtype, device="meta")
            for size, stride, dtype, _ in forms
        ]
        ctx.mark_non_differentiable(*(t for t, form in zip(outputs, forms) if not form[3]))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.on_backward(index for index, grad in enumerate(grads) if grad is not None)
        input_grads = [torch.empty(size, dtype=dtype, device="meta") for size, dtype in ctx.given]
        return None, None, *input_grads


def _form(tensor: Tensor) -> Form:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad


def _same_argument(new: Any, old: Any) -> bool:
    """Return whether two arguments are equal to a unit: float tensors on meta have no values."""
    if new is old:
        return isinstance(new, (Tensor, *PLAIN))
    if isinstance(new, Tensor):
        are_floats = type(new) is type(old) is Tensor and new.is_floating_point()
        return are_floats and new.is_meta and old.is_meta and _form(new) == _form(old)
    return type(new) is type(old) and isinstance(new, (*PLAIN, _Container)) and bool(new == old)


@dataclass(frozen=True)
class _Container:
    """A tuple, list or dict among arguments: its type, and its keys or its length."""

    kind: type
    keys: tuple[object, ...]


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the leaves of nested tuples, lists and dicts, and a `_Container` for each of these."""
    if type(value) in (tuple, list):
        yield _Container(type(value), (len(value),))
        for item in value:
            yield from _leaves(item)
    elif type(value) is dict:
        yield _Container(dict, tuple(value))
        for item in value.values():
            yield from _leaves(item)
    else:
        yield value


def _replaced(value: Any, replacements: Mapping[int, Any]) -> Any:
    """Return a copy of an output with the tensors `replacements` in it, by the id of the old
    tensor."""
    if type(value) in (tuple, list):
        return type(value)([_replaced(item, replacements) for item in value])
    if type(value) is dict:
        return {key: _replaced(item, replacements) for key, item in value.items()}
    if isinstance(value, Tensor):
        return replacements[id(value)]
    if not isinstance(value, PLAIN):
        raise DifferentUnits
    return value
