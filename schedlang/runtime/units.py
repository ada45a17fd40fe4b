"""Units of a model: who they are, and a switch in front of every call to one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from schedlang.runtime.constants import OnMeta
from schedlang.runtime.graph import refusal
from schedlang.runtime.meta import hollow_batch, hollow_model

Handler = Callable[[int, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class Switch:
    """Stands in front of every call to a unit, hooks included, and hands it to a handler.

    Without a handler (also in recomputation) a unit is called as it is. This is the one place
    that uses `Module._compiled_call_impl`, torch's own override of a module's call.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.modules = tuple(model.get_submodule(name) for name in names)
        self.handler: Handler | None = None
        self._before = [m.__dict__.get("_compiled_call_impl") for m in self.modules]
        for index, module in enumerate(self.modules):
            module._compiled_call_impl = self._route(index, module, self._before[index])

    def _route(self, index: int, module: nn.Module, before: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            original = before if before is not None else module._call_impl
            if self.handler is None:
                return original(*args, **kwargs)
            return self.handler(index, original, args, kwargs)

        return call

    @contextmanager
    def using(self, handler: Handler) -> Iterator[None]:
        """Hand calls to `handler` within."""
        outer, self.handler = self.handler, handler
        try:
            yield
        finally:
            self.handler = outer

    def remove(self) -> None:
        """Leave the modules as they were."""
        for module, before in zip(self.modules, self._before):
            if before is None:
                module.__dict__.pop("_compiled_call_impl", None)
            else:
                module._compiled_call_impl = before


def units_of(
    model: nn.Module, kwargs: Mapping[str, Any], at: Sequence[str] = (), *, meta: bool = True
) -> tuple[str, ...]:
    """The modules between which the model may be cut, in call order, from one forward.

    The trunk's elements (children of module lists, of a Sequential where there is no list, of the
    model where there is neither) and the modules `at`; and before, between and after them every
    outermost module that has parameters. A module called twice outside the trunk is left to the
    code between units. `kwargs` are the model's arguments; with `meta` the forward runs on a copy
    on the meta device, else on the model itself.
    """
    calls = _calls(model, kwargs, meta)
    named = dict(model.named_modules())
    for name in at:
        if name not in named:
            raise refusal("S613", name, "is not a module of this model")
    trunk = _trunk(named, calls)
    containers = {""}
    for name in (*trunk, *at):
        parts = name.split(".")
        containers |= {".".join(parts[:k]) for k in range(len(parts))}
    found = []
    for name, count in calls.items():
        parents = name.split(".")[:-1]
        outermost = all(".".join(parents[: k + 1]) in containers for k in range(len(parents)))
        if name in containers or not outermost:
            continue
        if next(named[name].parameters(), None) is None:
            continue
        if count > 1 and (name in trunk or name in at):
            raise refusal(
                "S601",
                name,
                f"is called {count} times in one forward; a cut falls between two calls made once",
                "cut outside the loop that calls it",
            )
        if count == 1:
            found.append(name)
    for name in at:
        if name not in found:
            why = "is never called" if name not in calls else "cannot be the start of a stage"
            raise refusal("S601", name, why)
    return tuple(found)


def in_trunk(model: nn.Module, units: Sequence[str]) -> tuple[bool, ...]:
    """Which units are elements of the trunk, and not what stands before, between or after it."""
    elements = _trunk(dict(model.named_modules()), dict.fromkeys(units, 1))
    return tuple(unit in elements for unit in units)


def _calls(model: nn.Module, kwargs: Mapping[str, Any], meta: bool) -> dict[str, int]:
    """How often each module is called, in the order of first calls."""
    given = dict(hollow_batch(dict(kwargs)) if meta else kwargs)
    model = hollow_model(model, {}) if meta else model
    calls: dict[str, int] = {}
    handles = []
    for name, module in model.named_modules():

        def before(module: nn.Module, args: Any, name: str = name) -> None:
            calls[name] = calls.get(name, 0) + 1

        handles.append(module.register_forward_pre_hook(before))
    try:
        mode: Any = OnMeta(kwargs, given) if meta else nullcontext()
        at_home = torch.device("meta") if meta else nullcontext()
        with torch.random.fork_rng(devices=[]), torch.no_grad(), at_home, mode:
            model(**given)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _trunk(named: Mapping[str, nn.Module], calls: Mapping[str, int]) -> set[str]:
    """The elements of the outermost lists of called modules."""

    def elements(kind: type[nn.Module] | tuple[type[nn.Module], ...]) -> set[str]:
        found: set[str] = set()
        for name, module in named.items():
            if not isinstance(module, kind):
                continue
            inside = any(name.startswith(f"{e}.") or name == e for e in found)
            prefix = f"{name}." if name else ""
            children = [prefix + child for child, _ in module.named_children()]
            called = [c for c in children if c in calls]
            if len(called) >= 2 and not inside:
                found |= set(called)
        return found

    root = {name for name in calls if name and "." not in name}
    return elements((nn.ModuleList, nn.ModuleDict)) or elements(nn.Sequential) or root
