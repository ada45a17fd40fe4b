"""Parameters that a forward reads, replaces or writes outside of the modules that hold them.

Sharded state (ZeRO 3) is gathered when a module is called, and freed after the call.  A parameter
that is read while no enclosing module runs was never gathered; a replacement of it, or a write into
it, is lost.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from schedlang.runtime.adapters.torch_tensor import unchecked
from schedlang.runtime.tracing.meta_runs import tensors_in
from schedlang.runtime.tracing.model_lines import model_line

if TYPE_CHECKING:
    from schedlang.runtime.propagation.trace import RunningCall

_APPLY = inspect.unwrap(torch.autograd.Function.apply.__func__).__code__  # type: ignore[attr-defined]
BACKWARDS = (torch.autograd.grad, unchecked(torch.autograd.backward), Tensor.backward)
SETS_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]
WRITING_OPERATORS = {
    *("__setitem__", "__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__", "__ipow__")
}
TABLES = ("embedding", "embedding_bag")


class ParameterAccess:
    """Record of the parameters that one forward of a throwaway copy reads, replaces and writes.

    lent      (parameter, enclosing module): read or replaced while that module does not run
    written   parameters that are written into
    derives   modules whose own forward takes a gradient -> the model's line that takes it
    ungraded  modules that are called without a graph -> the `autograd.Function` that calls them
    entering  modules whose forward hooks run now: their parameters are gathered already
    """

    def __init__(self) -> None:
        self.lent: set[tuple[str, str]] = set()
        self.written: set[str] = set()
        self.derives: dict[str, str] = {}
        self.ungraded: dict[str, str] = {}
        self.entering: list[str] = []
        self._names: dict[int, list[str]] = {}  # names of a parameter, by its id
        self._by_storage: dict[int, list[str]] = {}  # names of parameters, by storage
        self._own: dict[str, tuple[nn.Module, dict[str, Any]]] = {}

    def as_arguments(self) -> dict[str, Any]:
        """Return the record as keyword arguments of `Original`."""
        lent, written = frozenset(self.lent), frozenset(self.written)
        return {
            "outside_parameters": lent,
            "rewritten_parameters": written,
            "differentiating_modules": self.derives,
            "no_grad_modules": self.ungraded,
        }

    def watch(self, model: nn.Module) -> None:
        """Register a model's parameters, and hooks that run before each module is called."""
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), []).append(name)
            self._by_storage.setdefault(_storage(parameter), []).append(name)
        for fqn, module in model.named_modules():
            self._own[fqn] = module, dict(module._parameters)
            if fqn and not isinstance(module, torch.jit.ScriptModule):  # accepts no such hooks
                module.register_forward_pre_hook(partial(self._enter, fqn), prepend=True)

    def _enter(self, fqn: str, *unused: object) -> None:
        self.entering.append(fqn)

    def begin(self, fqn: str, muted: bool = False) -> None:
        """Note that the forward of a module begins; `muted`: nothing is recorded inside of it."""
        module, owned = self._own[fqn]
        called = fqn in self.entering
        if called:
            self.entering.remove(fqn)
        if muted or isinstance(module, torch.jit.ScriptModule):
            return
        if not torch.is_grad_enabled():
            self.ungraded[fqn] = calling_function()
        if not called or torch._C._are_functorch_transforms_active():
            # `.forward` was called directly, so no hook runs, and none gathers the parameters; or a
            # transform of torch.func calls the module, where torch's own hooks drop gradients
            inner = (n for names in self._names.values() for n in names if n.startswith(f"{fqn}."))
            self.lent.update((name, fqn) for name in inner)
        for name, parameter in owned.items():
            if module._parameters.get(name, parameter) is not parameter:
                self.lent.update((f"{fqn}.{name}", m) for m in _around(f"{fqn}.{name}"))

    def after(self, call: RunningCall, running: Sequence[str]) -> None:
        """Note what a call reads and writes while the modules `running` run."""
        if unchecked(call.func) in BACKWARDS:  # a backward frees units while the forward continues
            params = (name for names in self._names.values() for name in names)
            self.lent.update((name, m) for name in params for m in _around(name))
            self.derives.setdefault(running[-1], model_line())
        for tensor in _written(call):
            self.written.update(self._by_storage.get(_storage(tensor), ()))
            # by id, too: the storage may have been replaced
            self.written.update(self._names.get(id(tensor), ()))
        # `x.to(other)` reads only the dtype of the other tensor
        if call.outputs and (call.name != "to" or len(call.inputs) == 1):
            for tensor in call.inputs:
                if id(tensor) in self._names:
                    self._read(self._names[id(tensor)], running)

    def _read(self, names: Sequence[str], running: Sequence[str]) -> None:
        """Note that a parameter with these names is read, unless a module that holds it runs."""
        away = [[m for m in idle_modules(name, running, self.entering)] for name in names]
        if all(away):
            self.lent.update((name, m) for name, idle in zip(names, away) for m in idle)


def calling_function() -> str:
    """Return the class of the innermost `torch.autograd.Function` whose forward runs; "": none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _APPLY:
            return str(frame.f_locals["cls"].__name__)
        frame = frame.f_back
    return ""


def idle_modules(fqn: str, running: Sequence[str], entering: Sequence[str] = ()) -> Iterator[str]:
    """Yield the modules around a module or parameter that do not run, nor any module in them."""
    busy = [*running, *entering]
    for around in _around(fqn):
        if not any(name == around or name.startswith(f"{around}.") for name in busy):
            yield around


def _around(name: str) -> Iterator[str]:
    """Yield the modules around a module or a parameter, without the model."""
    parts = name.split(".")
    return (".".join(parts[:depth]) for depth in range(1, len(parts)))


def _storage(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage, which its views share; 0 if it has none."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else 0


def _written(call: RunningCall) -> list[Tensor]:
    """Return the tensors that a call writes into."""
    if call.name in TABLES and call.argument(3, "max_norm") is not None:
        return tensors_in(call.argument(1, "weight"))  # renormalises rows in place
    return tensors_in(call.args[:1]) if _writes(call) else []


def _writes(call: RunningCall) -> bool:
    """Return whether a call writes into its first argument."""
    if call.name.startswith("__"):
        return call.name in WRITING_OPERATORS
    in_place = call.name.endswith("_") and call.name not in ("requires_grad_", "detach_")
    return in_place or call.name == "data" and call.func == SETS_DATA
