"""Restore plain attributes of modules for a second run of a forward (activation checkpointing).

A forward may set attributes (a count, a running mean, a list) and register hooks. The second run of
the forward begins with those from before the first run, and after it they are as the first run left
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.submodules import Modules, hooks_since, next_hook

MODULE_ATTRIBUTES = frozenset({*vars(nn.Module()), "_compiled_call_impl"})
MISSING = object()  # value of a name that did not exist before
_OPEN = frozenset({Tensor, list, dict})  # types of values that a forward may modify in place
Space = dict[str, Any]


class AttributeSnapshot:
    """The plain attributes of modules before a forward; `store_changes` stores those that it
    changes."""

    def __init__(self, inside: Modules) -> None:
        self._inside, self._next_hook = inside, next_hook()
        # torch's own modules set no attributes in a forward
        self._spaces = [
            (p, vars(m)) for p, m in inside if not m.__module__.startswith("torch.nn.modules")
        ]
        self._noted = [
            (path, space, space.copy(), _contents(space)) for path, space in self._spaces
        ]
        self._set: list[tuple[Space, str, Any]] = []
        self._filled: list[tuple[Any, Any]] = []

    def store_changes(self, name: str) -> None:
        """Store the attributes that the forward has changed; refuse (S813) a tensor modified in
        place."""
        for path, space, before, contents in self._noted:
            if len(space) != len(before) or not all(map(is_, space.values(), before.values())):
                names = [k for k in {**before, **space} if _is_users_name(k)]
                previous = [(space, k, before.get(k, MISSING)) for k in names]
                self._set += [old for old in previous if old[2] is not space.get(old[1], MISSING)]
            for key, value, content in contents:
                if isinstance(value, Tensor):
                    if torch.is_grad_enabled() and _noted(value) != content:
                        raise _in_place_refusal(name, f"{path}.{key}".lstrip("."))
                elif len(value) != len(content) or not all(
                    map(is_, _entries(value), _entries(content))
                ):
                    self._filled.append((value, content))
        self._filled += hooks_since([module for _, module in self._inside], self._next_hook)
        self._noted.clear()

    @property
    def has_changes(self) -> bool:
        """Whether changes are stored."""
        return bool(self._set or self._filled)

    def undo(self) -> str:
        """Restore the attributes from before the forward; return the name of a changed one."""
        names = [key for _, key, _ in self._set]
        names += [
            key
            for value, _ in self._filled
            for _, space in self._spaces
            for key, other in space.items()
            if other is value
        ]
        _restore(self._set, self._filled)
        return names[0] if names else ""

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore, within the block, the attributes from before the forward."""
        current = [(space, key, space.get(key, MISSING)) for space, key, _ in self._set]
        contents = [(value, value.copy()) for value, _ in self._filled]
        _restore(self._set, self._filled)
        try:
            yield
        finally:
            _restore(current, contents)


def _contents(space: Space) -> list[tuple[str, Any, Any]]:
    """Return the contents of lists and dicts, and the versions of tensors, by attribute name."""
    return [
        (key, value, _noted(value))
        for key, value in space.items()
        if type(value) in _OPEN and key not in MODULE_ATTRIBUTES and _is_users_name(key)
    ]


def _is_users_name(name: str) -> bool:
    return name not in MODULE_ATTRIBUTES and not name.startswith("_schedlang")


def _noted(value: Any) -> Any:
    if isinstance(value, Tensor):
        return 0 if value.is_inference() else value._version
    return value.copy()


def _entries(value: Any) -> Any:
    return value.values() if isinstance(value, Mapping) else value


def _restore(attributes: list[tuple[Space, str, Any]], filled: list[tuple[Any, Any]]) -> None:
    for space, key, value in attributes:
        if value is MISSING:
            space.pop(key, None)
        else:
            space[key] = value
    for container, content in filled:
        container.clear()
        container.update(content) if isinstance(container, dict) else container.extend(content)


def _in_place_refusal(name: str, attribute: str) -> Refusal:
    return Refusal.of(
        "S813",
        f"`{name}` writes into its attribute `{attribute}`, and is recomputed",
        notes=("recomputation would start from the values that its forward has written",),
        helps=(
            "assign a new tensor: `self.total = self.total + x`, not `self.total += x`",
            "or checkpoint other modules",
        ),
    )
