"""Walk the modules inside a module fast, without a Python call for each: used within steps.

Also: hooks for the time of a block, hooks that a forward registers, and the arguments of first
calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

Hooks = dict[int, Any]  # by number: torch counts up
CallArguments = tuple[Any, Any]  # positional arguments, and keyword arguments
Modules = list[tuple[str, nn.Module]]  # by path, outermost first


def modules_in(module: nn.Module) -> Modules:
    """Return a module and all modules inside it by path, each once, outermost first."""
    found: Modules = []
    seen: set[int] = set()
    pending = [("", module)]
    while pending:
        path, current = pending.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        found.append((path, current))
        prefix = path + "." if path else ""
        for name, child in reversed(current._modules.items()):
            if child is not None:
                pending.append((prefix + name, child))
    return found


class ModuleWalk:
    """The modules inside a module; walked anew only if a child was added, removed or replaced."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.found: Modules = []
        self._children: list[dict[str, nn.Module | None]] = []

    def current(self) -> Modules:
        """Return the current result of `modules_in`."""
        changed = [k for (_, child), k in zip(self.found, self._children) if child._modules != k]
        if changed or not self.found:
            self.found = modules_in(self.module)
            self._children = [dict(child._modules) for _, child in self.found]
        return self.found


HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs"),
    "_forward_hooks_always_called",
)


def next_hook() -> int:
    """Return the number that torch gives to the next hook."""
    return RemovableHandle.next_id


def hooks_since(modules: Iterable[nn.Module], first: int) -> list[tuple[Hooks, Hooks]]:
    """Return the tables of hooks in modules that have hooks numbered from `first` on, each with
    the hooks that it has besides.

    transformers registers hooks when a forward is first asked for hidden states.
    """
    if RemovableHandle.next_id == first:
        return []
    tables: list[Hooks] = [vars(module)[name] for module in modules for name in HOOKS]
    return [
        (table, {number: hook for number, hook in table.items() if number < first})
        for table in tables
        if any(number >= first for number in table)
    ]


@contextmanager
def remove_hooks_after(handles: Iterable[Any]) -> Iterator[None]:
    """Remove hooks at the end of a block, by the handles that torch returned for them."""
    registered = [*handles]
    try:
        yield
    finally:
        for handle in registered:
            handle.remove()


@contextmanager
def record_first_calls(
    model: nn.Module, names: Iterable[str]
) -> Iterator[dict[str, CallArguments]]:
    """Record, within a block, the arguments of the first call of each of these modules."""
    calls: dict[str, CallArguments] = {}

    def note(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        calls.setdefault(name, (args, kwargs))

    hooks = [(model.get_submodule(name), partial(note, name)) for name in sorted(names)]
    with remove_hooks_after(m.register_forward_pre_hook(n, with_kwargs=True) for m, n in hooks):
        yield calls
