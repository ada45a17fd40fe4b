"""Checks of modules that run again in backward, on one process and on the meta device.

`RepeatCheck` checks that a second run calls torch with the same arguments; `SavedResults` plays,
for a comparison, the results that a program saves for the second run.
"""

from __future__ import annotations

import random
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.remat import RecomputedRegion
from schedlang.runtime.activation_memory.selective import NumberedCalls, numbering_of
from schedlang.runtime.device import RestoredGenerators, module_generators, on_host
from schedlang.runtime.forward_attributes import AttributeSnapshot
from schedlang.runtime.global_state import host_generator_states
from schedlang.runtime.pipeline.argument_templates import fill_template, split_tensors
from schedlang.runtime.scope import capture_scope, current_site
from schedlang.runtime.storage.saved_tensors_slot import (
    VersionedTensor,
    outer_pack,
    pack_hooks,
    pack_unchanged,
    unpack,
)
from schedlang.runtime.submodules import modules_in
from schedlang.runtime.tracing.meta_runs import name_of
from schedlang.runtime.tracing.units import CallHook, CallSwitch, intercept_hooks

# ---- Whether modules compute the same when they run again: which call of torch differs, and
# where.
# Recomputation replays the generators of torch. It cannot replay draws from Python or numpy, or
# state that a module keeps from call to call. Such a module calls torch with other numbers in its
# next run, which shows on the meta device: the calls of two runs are compared, with all arguments
# that are no tensors.


SHOWN = 40  # characters of a value in a message
_OURS = ("torch", "schedlang")
_NAMES = {"lift_fresh": "from_numpy"}  # the only call that makes a tensor of data


@dataclass(frozen=True)
class Difference:
    """The first call of torch in which two runs of a module differ.

    `first` and `second` are its arguments, or "" where a run does not make the call.  If `drawn` is
    set, there is no such call: the module has drawn random numbers from this generator.
    """

    module: str
    function: str
    place: str
    first: str
    second: str
    drawn: str = ""


class RepeatCheck:
    """Runs each kind of module twice more than it is called, and compares the calls of torch."""

    def __init__(self, model: nn.Module, kinds: Mapping[str, object]) -> None:
        self.model, self.names, self.kinds = model, tuple(kinds), kinds
        self.seen: set[object] = set()
        self.found: list[Difference] = []

    def run(self, forward: Any) -> list[Difference]:
        """Return the differences during `forward()`, which calls the model."""
        switch = CallSwitch(self.model, self.names)
        try:
            with switch.using(self._call):
                forward()
        finally:
            switch.remove()
        return self.found

    def _call(self, unit: int, original: Any, args: Any, kwargs: Any) -> Any:
        name = self.names[unit]
        kind = self.kinds[name]
        if kind in self.seen:
            output, draw_differences = self._run_recorded(name, original, args, kwargs)
            self.found += draw_differences
            return output
        self.seen.add(kind)
        if torch._C._are_functorch_transforms_active():
            raise Refusal.of(
                "S843",
                f"`{name}` is called inside of a transform of `torch.func`",
                notes=("a recomputation comes after the transform has ended",),
                helps=("checkpoint a module around the one that transforms",),
            )
        tensors: list[Tensor] = []
        template = split_tensors((args, kwargs), tensors)
        module = self.model.get_submodule(name)
        draws = RestoredGenerators(
            [torch.default_generator, *module_generators(modules_in(module))]
        )
        # state made at the first call exists after it
        output, draw_differences = self._run_recorded(name, original, args, kwargs)
        before = AttributeSnapshot(modules_in(module))
        with draws, intercept_hooks(module, _call_inner_hook):
            first = _calls(original, fill_template(template, tensors))
        before.store_changes(name)
        with draws, before.restored(), intercept_hooks(module, _call_inner_hook):
            second = _calls(original, fill_template(template, tensors))
        self.found += list(_differences(name, first, second))[:1] or draw_differences
        return output

    def _run_recorded(
        self, name: str, original: Any, args: Any, kwargs: Any
    ) -> tuple[Any, list[Difference]]:
        """Run one call; return its output, and a difference if a generator has moved.

        The drawn numbers do not show it: a layer with a low drop rate may draw the same twice, and
        a layer with rate 0 does not represent the others.
        """
        module = self.model.get_submodule(name)
        before = _generator_states(module)
        output = original(*args, **kwargs)
        after = _generator_states(module)
        changed = [label for label, state in after.items() if before.get(label, state) != state]
        return output, [Difference(name, "", "", "", "", label) for label in changed[:1]]


def _call_inner_hook(name: str, _: int, call: CallHook, arguments: Any, output: Any) -> Any:
    """Call a hook of a module inside; those of the module itself are called once, see `checkpoint`.

    They may count the module's calls, or keep its outputs in order.
    """
    return call(arguments, output) if name else None


def _generator_states(module: nn.Module) -> dict[str, object]:
    """Return the states of the generators that a recomputation does not replay, by name."""
    states = host_generator_states()
    for _, child in modules_in(module):
        for name, value in vars(child).items():
            if isinstance(value, random.Random):
                states[f"its own generator `{name}`"] = value.getstate()
            elif type(value).__module__.startswith("numpy.random") and hasattr(
                value, "bit_generator"
            ):
                states[f"its own generator `{name}`"] = str(value.bit_generator.state)
    return states


@dataclass(frozen=True)
class _TorchCall:
    """A call of torch: its function, the line of the model, its arguments except tensor values."""

    function: str
    place: str
    given: str


def _differences(
    module: str, first: Sequence[_TorchCall], second: Sequence[_TorchCall]
) -> Iterator[Difference]:
    for a, b in zip_longest(first, second):
        if a is None or b is None or (a.function, a.given) != (b.function, b.given):
            call = a or b
            same_function = a is not None and b is not None and a.function == b.function
            yield Difference(
                module,
                call.function,
                call.place,
                a.given if a is not None else "",
                b.given if b is not None and same_function else "",
            )


def _calls(original: Any, arguments: Any) -> list[_TorchCall]:
    args, kwargs = arguments
    recorder = _CallRecorder()
    with recorder:
        original(*args, **kwargs)
    return recorder.calls


class _CallRecorder(TorchFunctionMode):
    """Records every call of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_TorchCall] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        text = ", ".join(filter(None, map(_describe, tree_leaves((args, kwargs)))))
        name = name_of(func).removesuffix(".default")
        self.calls.append(_TorchCall(_NAMES.get(name, name), _line(), text))
        return func(*args, **kwargs)


def _describe(value: Any) -> str:
    """Return a value as text; for tensors, all that is known without data."""
    if isinstance(value, Tensor):
        text = f"{list(value.shape)}"
        if type(value) is Tensor and on_host(value) and not value.requires_grad:
            return text + "".join(map(repr, value.flatten()[:SHOWN].tolist()))
        return text
    if isinstance(value, (bool, int, float, complex, str)):
        return repr(value)
    if hasattr(value, "tobytes"):  # of numpy
        return str(value.tolist())
    return ""


def _line() -> str:
    """Return the line of the model from which torch was called."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in _OURS:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


# ---- Tensors as the outer saved-tensor hooks give them back: a second run begins with those.


def pass_through_hooks(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors after the innermost saved-tensor hooks, detached; requires_grad is
    kept."""
    pairs = zip(tensors, save_tensors(tensors)())
    return [copied.detach().requires_grad_(original.requires_grad) for original, copied in pairs]


# ---- Results of operators that are saved for a second run, in the process of a comparison.
# Programs use `selective.py`: here the first run ends before anything is saved.


@dataclass
class _Result:
    """The result of one operator: its place, its tensors with their versions, and copies of these.

    `whole`: the result is saved unquantized; if it was written into since (`stale`), the second run
    computes it again.
    """

    place: Callable[[], Any]
    leaves: list[Any]
    spec: Any
    whole: bool
    copies: list[tuple[int, Tensor]]
    stale: bool = False

    def keep(self) -> None:
        """Pass the result through the saved-tensor hooks around the operator's module."""
        saved = iter(self.copies)
        for k, leaf in enumerate(self.leaves):
            if isinstance(leaf, Tensor):
                version, copy = next(saved)
                current = leaf if leaf._version == version else copy
                self.stale |= self.whole and current is copy
                with self.place():
                    (value,) = [current] if self.whole else pass_through_hooks([current])
                self.leaves[k] = value.detach()

    def given(self) -> Any:
        """Return the result with cloned tensors, for a caller that may write into them."""
        leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.spec)


class SavedResults:
    """The results that are saved of one call of a module; unquantized in some `parts` of it."""

    def __init__(self, region: RecomputedRegion, parts: Collection[str] = ()) -> None:
        self.some, self.parts = region.saves_results, parts
        self.numbers, self.chosen = numbering_of(
            region.saved_classes, region.saved_operators, coded=True
        )
        self.found: dict[Hashable, _Result] = {}

    def is_saved(self, key: Hashable | None) -> bool:
        """Return whether the result of the call with this key is saved."""
        return key is not None and (self.chosen is None or key in self.chosen)

    def run_first(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the first run."""
        if not self.some:
            return inner(*args, **kwargs)
        with NumberedCalls(self.numbers, self._store):
            return inner(*args, **kwargs)

    def save(self) -> None:
        """Save the results in their order."""
        for result in self.found.values():
            result.keep()

    def run_second(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the second run, with saved results in place of the operators."""
        if not self.some:
            return inner(*args, **kwargs)
        with NumberedCalls(self.numbers, self._replace):
            return inner(*args, **kwargs)

    def _store(self, calls: NumberedCalls, func: Any, args: Any, kwargs: Any) -> Any:
        key = calls.turns.next_key(func, args, kwargs)
        output = func(*args, **kwargs)
        if self.is_saved(key):
            leaves, spec = tree_flatten(output)
            # a later operator may write into them
            copies = [(t._version, t.clone()) for t in leaves if isinstance(t, torch.Tensor)]
            is_part = any(_is_inside(current_site(), part) for part in self.parts)
            self.found[key] = _Result(capture_scope(), leaves, spec, is_part, copies)
        return output

    def _replace(self, calls: NumberedCalls, func: Any, args: Any, kwargs: Any) -> Any:
        saved = self.found.get(calls.turns.next_key(func, args, kwargs))
        return func(*args, **kwargs) if saved is None or saved.stale else saved.given()


def _is_inside(fqn: str, part: str) -> bool:
    return fqn == part or fqn.startswith(f"{part}.")


# -- saved tensors that are dropped, and made again by the second run ------------------------------

Facts = tuple[torch.Size, torch.dtype, torch.device]


class _Placeholder:
    """The placeholder of a saved tensor; the first one that is unpacked restores all."""

    __slots__ = ("__weakref__", "dropped", "value")

    dropped: DroppedTensors
    value: Tensor | None

    def tensor(self) -> Tensor:
        """Return the tensor once: another backward runs the forward again."""
        if self.value is None:
            self.dropped.restore()
        value, self.value = self.value, None
        assert value is not None
        return value


class DroppedTensors(ABC):
    """The tensors that autograd saves in one forward, replaced by placeholders.

    Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), by saved-tensor hooks, as
    in the non-reentrant torch.utils.checkpoint, with less work for each tensor.
    """

    def __init__(self) -> None:
        self.notes: list[weakref.ref[_Placeholder]] = []
        self.facts: list[Facts] = []  # of each saved tensor

    @abstractmethod
    def rerun(self) -> None:
        """Run the forward again."""

    @abstractmethod
    def describe_modules(self) -> str:
        """Return the names of the modules that run, for a message."""

    def drop_saved(self) -> saved_tensors_hooks:
        """Drop, within a block, all tensors that autograd saves."""
        return saved_tensors_hooks(self.pack, _Placeholder.tensor)

    def pack(self, tensor: Tensor) -> _Placeholder:
        """Drop one tensor, and return its placeholder."""
        note = _Placeholder()
        note.dropped, note.value = self, None
        self.notes.append(weakref.ref(note))
        self.facts.append((tensor.shape, tensor.dtype, tensor.device))
        return note

    def restore(self) -> None:
        """Run the forward again up to its last saved tensor; fill the placeholders still in use."""
        count, last = 0, len(self.notes)

        def fill(tensor: Tensor) -> Tensor:
            nonlocal count
            note, facts = self.notes[count](), self.facts[count]
            count += 1
            value = tensor.detach() if tensor.requires_grad else tensor
            if note is not None:
                current = value.shape, value.dtype, value.device
                if current != facts:
                    self._fail(
                        f"saved {_text(current)} the second time where it saved {_text(facts)} the"
                        " first"
                    )
                note.value = value
            if count == last:
                raise _AllRestored
            return value

        try:
            with torch.enable_grad(), pack_hooks(fill):
                self.rerun()
        except _AllRestored:
            return
        self._fail(f"saved {count} tensors the second time, {last} the first")

    def _fail(self, change: str) -> None:
        raise RuntimeError(
            f"recomputation of {self.describe_modules()} ran differently: it {change}"
        )


def _text(facts: Facts) -> str:
    shape, dtype, device = facts
    return f"{dtype}{list(shape)} on {device}"


class _AllRestored(BaseException):
    """Raised when the last tensor is restored; not an Exception, so that no model catches it."""


def save_tensors(tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """Save tensors as autograd does; the returned function gives them back, any number of times.

    They come back detached. A tensor that was written into since raises an error, as in autograd.
    """
    pack = outer_pack()
    if pack is pack_unchanged:
        saved: list[Any] = [VersionedTensor(tensor) for tensor in tensors]
    else:
        with torch.no_grad():
            saved = [pack(tensor.detach()) for tensor in tensors]
    return lambda: [unpack(entry) for entry in saved]
