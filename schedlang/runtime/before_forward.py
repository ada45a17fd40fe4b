"""Plain attributes of modules as they are before a forward: a second run of it begins with them.

What a forward sets (a count, a running mean, a list of notes) is what it was for the second run,
and afterwards what the first one has made of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.inside import Modules

OWN = frozenset({*vars(nn.Module()), "_compiled_call_impl"})
GONE = object()  # of a name that was not there before
_OPEN = frozenset({Tensor, list, dict})  # what a forward may write into
Space = dict[str, Any]


class Before:
    """The plain attributes of modules, noted before a forward; `settle` keeps those it changes."""

    def __init__(self, inside: Modules) -> None:
        # torch's own modules set none in a forward
        spaces = (
            (p, vars(m)) for p, m in inside if not m.__module__.startswith("torch.nn.modules")
        )
        self._noted = [(path, space, space.copy(), _contents(space)) for path, space in spaces]
        self._set: list[tuple[Space, str, Any]] = []
        self._filled: list[tuple[Any, Any]] = []

    def settle(self, name: str) -> None:
        """Keep what the forward has changed; refuse (S813) a tensor that it has written into."""
        for path, space, before, contents in self._noted:
            if len(space) != len(before) or not all(map(is_, space.values(), before.values())):
                keys = [k for k in {**before, **space} if _users(k)]
                told = [(space, k, before.get(k, GONE)) for k in keys]
                self._set += [one for one in told if one[2] is not space.get(one[1], GONE)]
            for key, value, content in contents:
                if isinstance(value, Tensor):
                    if value._version != content and torch.is_grad_enabled():
                        raise _written(name, f"{path}.{key}".lstrip("."))
                elif len(value) != len(content) or not all(map(is_, _of(value), _of(content))):
                    self._filled.append((value, content))
        self._noted.clear()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Let attributes be what they were before the forward, within."""
        now = [(space, key, space.get(key, GONE)) for space, key, _ in self._set]
        full = [(value, value.copy()) for value, _ in self._filled]
        _put(self._set, self._filled)
        try:
            yield
        finally:
            _put(now, full)


def _contents(space: Space) -> list[tuple[str, Any, Any]]:
    """Return what stands in lists and tables, and how often tensors were written into."""
    return [
        (key, value, _noted(value))
        for key, value in space.items()
        if type(value) in _OPEN and key not in OWN and _users(key)
    ]


def _users(name: str) -> bool:
    return name not in OWN and not name.startswith("_schedlang")


def _noted(value: Any) -> Any:
    if isinstance(value, Tensor):
        return 0 if value.is_inference() else value._version
    return value.copy()


def _of(value: Any) -> Any:
    return value.values() if isinstance(value, Mapping) else value


def _put(places: list[tuple[Space, str, Any]], filled: list[tuple[Any, Any]]) -> None:
    for space, key, value in places:
        if value is GONE:
            space.pop(key, None)
        else:
            space[key] = value
    for held, content in filled:
        held.clear()
        held.update(content) if isinstance(held, dict) else held.extend(content)


def _written(name: str, attribute: str) -> Refusal:
    return Refusal.of(
        "S813",
        f"`{name}` writes into its attribute `{attribute}`, and is recomputed",
        notes=("recomputation would start from the values that its forward has written",),
        helps=(
            "assign a new tensor: `self.total = self.total + x`, not `self.total += x`",
            "or checkpoint other modules",
        ),
    )
