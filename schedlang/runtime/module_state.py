"""Snapshot and restore the state that user code keeps in a model's modules and in a loss.

This is: plain attributes of a model's modules; attributes of a loss, and variables in its closure.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, MutableMapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.ir import pytree
from schedlang.runtime.submodules import hooks_since, next_hook

MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
PLAIN_TYPES = (bool, int, float, complex, str, type(None), Tensor, list, dict, tuple)
MAX_DEPTH = 3  # nested objects of a loss
MAX_ENTRIES = 4096  # entries of a list or dict
LIBRARY_PACKAGES = frozenset({"torch", "numpy", "schedlang", "builtins", *sys.stdlib_module_names})
# of models: their configs are not state of a forward
LIBRARIES = LIBRARY_PACKAGES | {"transformers", "diffusers"}
# what these import to load and to run models: no forward stores anything there
LIBRARY_TOOLS = frozenset(
    {"accelerate", "filelock", "httpx", "httpx2", "huggingface_hub", "packaging", "PIL"}
    | {"regex", "requests", "safetensors", "tokenizers", "tqdm", "yaml"}
)
Space = MutableMapping[str, Any]


class StateSnapshot:
    """A snapshot of the plain attributes and hooks of a model's modules, and of the state of its
    loss."""

    def __init__(self, model: nn.Module | None, loss: Any = None) -> None:
        self._modules = [] if model is None else [*model.modules()]
        self._next_hook = next_hook()
        self._before = [(name, space, _snapshot(space)) for name, space in _spaces(model, loss)]

    def changed(self) -> dict[str, Any]:
        """Return the values that have changed or been added since, by name."""
        return {name: value for name, _, _, value in self._changes()}

    def restore(self) -> None:
        """Restore all values; remove hooks that were registered since."""
        for _, space, (old_values, key), _ in [*self._changes()]:
            if key in old_values:
                space[key] = _restored(*old_values[key])
            else:
                del space[key]
        for table, hooks in hooks_since(self._modules, self._next_hook):
            table.clear()
            table.update(hooks)

    def _changes(self) -> Iterator[tuple[str, Space, tuple[Mapping[str, Any], str], Any]]:
        for name, space, old_values in self._before:
            for key, value in _plain_entries(space).items():
                if key not in old_values or not same_values(old_values[key][1], value):
                    yield f"{name}.{key}".lstrip("."), space, (old_values, key), value


def _restored(container: Any, old_value: Any) -> Any:
    """Return the value to restore: the same list or dict object, with its former contents."""
    if type(container) is list:
        container[:] = _copied(old_value)
    elif type(container) is dict:
        container.clear()
        container.update(_copied(old_value))
    else:
        return _copied(old_value)
    return container


class ClosureVariables(MutableMapping[str, Any]):
    """The variables in a function's closure, by name."""

    def __init__(self, function: FunctionType) -> None:
        names = function.__code__.co_freevars
        cells: dict[str, CellType] = dict(zip(names, function.__closure__ or ()))
        self.cells = {name: cell for name, cell in cells.items() if _is_bound(cell)}

    def __getitem__(self, name: str) -> Any:
        return self.cells[name].cell_contents

    def __setitem__(self, name: str, value: Any) -> None:
        self.cells[name].cell_contents = value

    def __delitem__(self, name: str) -> None:
        del self.cells[name].cell_contents

    def __iter__(self) -> Iterator[str]:
        return iter([name for name, cell in self.cells.items() if _is_bound(cell)])

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _is_bound(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _spaces(model: nn.Module | None, loss: Any) -> Iterator[tuple[str, Space]]:
    visited = set[int]()
    for name, module in () if model is None else model.named_modules():
        yield name, vars(module)
        entries = [
            (key, value) for key, value in vars(module).items() if _is_users_class(type(value))
        ]
        for key, value in entries:
            if not isinstance(value, nn.Module):
                path = f"{name}.{key}".lstrip(".")
                yield from ((path, space) for space in _spaces_of(value, visited, 1))
    yield from (("the loss", space) for space in _spaces_of(loss, set(), MAX_DEPTH))


def _spaces_of(owner: Any, visited: set[int], depth: int) -> Iterator[Space]:
    """Yield the attributes of an object and of the objects that it holds, and closures of
    functions."""
    if id(owner) in visited:
        return
    visited.add(id(owner))
    inner: list[Any] = []
    if isinstance(owner, nn.Module):
        yield from (space for m in owner.modules() for space in (vars(m), m._buffers))
        return
    if isinstance(owner, MethodType):
        inner = [owner.__self__]
    elif isinstance(owner, partial):
        inner = [owner.func, *owner.args, *owner.keywords.values()]
    elif isinstance(owner, FunctionType):
        cells = ClosureVariables(owner)
        yield cells
        yield owner.__dict__
        inner = [*cells.values(), *(owner.__defaults__ or ())]
    elif type(owner) in (list, tuple, dict):
        inner = [*owner.values()] if isinstance(owner, dict) else [*owner]
    elif not isinstance(owner, (type, Tensor)) and hasattr(owner, "__dict__"):
        yield vars(owner)
        inner = [*vars(owner).values()]
    for m in inner if depth else ():
        if callable(m) or type(m) in (list, tuple, dict) or _is_users_class(type(m)):
            yield from _spaces_of(m, visited, depth - 1)


def _is_users_class(kind: type) -> bool:
    return kind not in PLAIN_TYPES and kind.__module__.split(".")[0] not in LIBRARIES


def _plain_entries(space: Space) -> dict[str, Any]:
    return {k: v for k, v in space.items() if k not in MODULE_ATTRIBUTES and is_plain(v)}


def is_plain(value: Any) -> bool:
    """Return whether a value is plain; tables of data, which no forward changes, are excluded."""
    if isinstance(value, (list, dict, tuple)):
        return len(value) <= MAX_ENTRIES
    return isinstance(value, PLAIN_TYPES)


def _snapshot(space: Space) -> dict[str, tuple[Any, Any]]:
    """Return, for each name, the object that is held, and a copy of it."""
    return {key: (value, _copied(value)) for key, value in _plain_entries(space).items()}


def _copied(value: Any) -> Any:
    if not isinstance(value, (Tensor, list, dict, tuple)):
        return value
    return pytree.tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, value)


def same_values(a: Any, b: Any) -> bool:
    """Return whether two values are equal; tensors in them are compared by value."""
    if a is b:
        return True
    leaves_a, leaves_b = pytree.tree_leaves(a), pytree.tree_leaves(b)
    return len(leaves_a) == len(leaves_b) and all(map(_equal, leaves_a, leaves_b))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        same_type = (a.device, a.dtype, a.shape) == (b.device, b.dtype, b.shape)
        return same_type and (a.is_meta or _allclose(a, b))
    if a is b:
        return True
    try:
        return type(a) is type(b) and not isinstance(a, Tensor) and bool(a == b)
    except Exception:  # `==` of its class raises: it is another object
        return False


def _allclose(a: Tensor, b: Tensor) -> bool:
    return bool(torch.allclose(a.detach(), b.detach(), rtol=1e-9, atol=1e-12, equal_nan=True))
