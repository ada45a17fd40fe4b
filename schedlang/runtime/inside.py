"""The modules inside of a module, without a call of Python for each: for what runs in a step.

* Hooks that are there for a while, and calls that are noted by some.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

Call = tuple[Any, Any]  # arguments, and those by name
Modules = list[tuple[str, nn.Module]]  # by path, outermost first


def modules_in(module: nn.Module) -> Modules:
    """A module and all inside of it by path, each once, outermost first."""
    found: Modules = []
    seen: set[int] = set()
    waiting = [("", module)]
    while waiting:
        path, one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        found.append((path, one))
        front = path + "." if path else ""
        for name, child in reversed(one._modules.items()):
            if child is not None:
                waiting.append((front + name, child))
    return found


class Inside:
    """The modules inside of one, walked anew only where a child came, went or was replaced."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.found: Modules = []
        self._children: list[dict[str, nn.Module | None]] = []

    def now(self) -> Modules:
        """Return what `modules_in` gives."""
        changed = [k for (_, one), k in zip(self.found, self._children) if one._modules != k]
        if changed or not self.found:
            self.found = modules_in(self.module)
            self._children = [dict(one._modules) for _, one in self.found]
        return self.found


@contextmanager
def hooked(handles: Iterable[Any]) -> Iterator[None]:
    """Take hooks off at the end of a block, each by what torch gave for it."""
    there = [*handles]
    try:
        yield
    finally:
        for handle in there:
            handle.remove()


@contextmanager
def first_calls(model: nn.Module, names: Iterable[str]) -> Iterator[dict[str, Call]]:
    """Note the arguments of the first call of each of these modules."""
    calls: dict[str, Call] = {}

    def note(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        calls.setdefault(name, (args, kwargs))

    each = [(model.get_submodule(name), partial(note, name)) for name in sorted(names)]
    with hooked(m.register_forward_pre_hook(n, with_kwargs=True) for m, n in each):
        yield calls
