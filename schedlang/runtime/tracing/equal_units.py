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

# units of a kind that run: the first may get other arguments than the rest, as the second shows
RUNS_PER_KIND = 2
PLAIN = (bool, int, float, str, type(None))
Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, bool]


class DifferentUnits(Exception):
    """Raised if a unit is called differently from those of its kind: then all units have to run."""


class UnitObserver:
    """Observer of the units of a forward: it notes for imitated ones what those that ran have left.

    A method raises DifferentUnits where the units are not equal to the observer.
    """

    def before(self, name: str, leaves: Sequence[Any]) -> None:
        """Observe the arguments of a unit that is about to run."""

    def ran(self, name: str, leaves: Sequence[Any], results: Sequence[Tensor]) -> None:
        """Observe a unit that has run, and the tensors that it has made and returned."""

    def imitated(
        self, name: str, shown: ShownCall, leaves: Sequence[Any], results: Sequence[Tensor]
    ) -> None:
        """Observe a unit that did not run: the call that stands for it, and its new tensors."""


@dataclass(frozen=True)
class ShownCall:
    """One call of a unit that ran: its name, the leaves of its arguments, its output."""

    name: str
    arguments: Sequence[Any]
    output: Any

    @property
    def results(self) -> list[Tensor]:
        """The tensors of the output that are not among the arguments."""
        input_ids = set(map(id, self.arguments))
        return [
            t
            for t in argument_leaves(self.output)
            if isinstance(t, Tensor) and id(t) not in input_ids
        ]


class EqualUnits:
    """Runs two units of each kind, and imitates the others: calls `passed(name, backward)`.

    kinds      unit -> its kind
    reached    unit -> the numbers of its results that have got a gradient
    imitated   the number of imitated units
    different  whether DifferentUnits was raised, which a model's own code may catch
    Raises DifferentUnits if a unit is not called once, or if its arguments differ from those of the
    second unit of its kind: tensors of another form, other numbers, or neither tensors nor plain
    values; or where the observer does.
    """

    def __init__(
        self,
        model: nn.Module,
        kinds: Mapping[str, object],
        passed: Callable[[str, bool], None] | None = None,
        observer: UnitObserver | None = None,
    ) -> None:
        self.model, self.names, self.kinds, self.passed = model, tuple(kinds), kinds, passed
        self.observer = observer or UnitObserver()
        self.imitated, self.different = 0, False
        self.reached: dict[str, set[int]] = {name: set() for name in kinds}
        self._calls: Counter[object] = Counter()
        self._called: set[str] = set()
        self._shown: dict[object, ShownCall] = {}

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
        try:
            return self._run(self.names[unit], original, args, kwargs)
        except DifferentUnits:
            self.different = True
            raise

    def _run(self, name: str, original: Any, args: Any, kwargs: Any) -> Any:
        if name in self._called:
            raise DifferentUnits
        self._called.add(name)
        kind, leaves = self.kinds[name], list(argument_leaves((args, kwargs)))
        self._calls[kind] += 1
        if self._calls[kind] > RUNS_PER_KIND:
            return self._imitate(name, self._shown[kind], leaves)
        with torch._C.DisableTorchFunction():
            self.observer.before(name, leaves)
        output = original(*args, **kwargs)
        self._shown[kind] = shown = ShownCall(name, leaves, output)
        with torch._C.DisableTorchFunction():  # not seen by function modes
            for output_index, tensor in enumerate(shown.results):
                if tensor.requires_grad and self.passed is not None:
                    tensor.register_hook(partial(self._reach, name, output_index))  # type: ignore[no-untyped-call]
            self.observer.ran(name, leaves, shown.results)
        return output

    def _reach(self, name: str, output_index: int, grad: object) -> None:
        self.reached[name].add(output_index)

    def _imitate(self, name: str, shown: ShownCall, leaves: Sequence[Any]) -> Any:
        """Return the imitated output of a unit whose arguments equal those of a unit that ran."""
        with torch._C.DisableTorchFunction():  # not seen by function modes
            arguments = shown.arguments
            same_count = len(leaves) == len(arguments)
            if not (same_count and all(map(_same_argument, leaves, arguments))):
                raise DifferentUnits
            replacements = {id(old): new for old, new in zip(arguments, leaves)}
            learns = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
            forms = list(map(_form, shown.results))
            if any(form[3] for form in forms) and not learns:
                raise DifferentUnits
            self.imitated += 1
            if self.passed is not None:
                self.passed(name, False)
            on_backward = partial(self._pass_back, name)
            outputs = _Imitated.apply(on_backward, forms, *learns) if forms else ()  # type: ignore[no-untyped-call]
            replacements |= {id(old): output for old, output in zip(shown.results, outputs)}
            output = _replaced(shown.output, replacements)
            self.observer.imitated(name, shown, leaves, outputs)
            return output

    def _pass_back(self, name: str, output_indices: Iterable[int]) -> None:
        self.reached[name].update(output_indices)
        if self.passed is not None:
            self.passed(name, True)


class _Imitated(torch.autograd.Function):
    """Function from tensors that require a gradient to new tensors of given forms, on meta."""

    @staticmethod
    def forward(
        ctx: Any, on_backward: Callable[[Iterable[int]], None], forms: Any, *inputs: Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.on_backward, ctx.inputs = on_backward, [(t.shape, t.dtype) for t in inputs]
        outputs = [
            torch.empty_strided(size, stride, dtype=dtype, device="meta")
            for size, stride, dtype, _ in forms
        ]
        ctx.mark_non_differentiable(*(t for t, form in zip(outputs, forms) if not form[3]))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.on_backward(index for index, grad in enumerate(grads) if grad is not None)
        input_grads = [torch.empty(size, dtype=dtype, device="meta") for size, dtype in ctx.inputs]
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
    return type(new) is type(old) and isinstance(new, (*PLAIN, Container)) and bool(new == old)


@dataclass(frozen=True)
class Container:
    """A tuple, list or dict among arguments: its type, and its keys or its length."""

    kind: type
    keys: tuple[object, ...]


def argument_leaves(value: Any) -> Iterator[Any]:
    """Yield the leaves of nested tuples, lists and dicts, and a `Container` for each of these."""
    if type(value) in (tuple, list):
        yield Container(type(value), (len(value),))
        for item in value:
            yield from argument_leaves(item)
    elif type(value) is dict:
        yield Container(dict, tuple(value))
        for item in value.values():
            yield from argument_leaves(item)
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
