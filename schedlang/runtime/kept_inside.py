"""State that code of the user's keeps between calls, as it is now, and put back after a run.

Plain attributes of a model's modules; those of a loss, and what it closes over.
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

STANDARD = frozenset(vars(nn.Module()))
PLAIN = (bool, int, float, complex, str, type(None), Tensor, list, dict, tuple)
DEPTH = 3  # of objects in objects of a loss
MOST = 4096  # entries of a list, or of a table
OTHERS = frozenset({"torch", "numpy", "schedlang", "builtins", *sys.stdlib_module_names})
LARGE = frozenset({"transformers", "diffusers"})  # their configs are no state of a forward
Space = MutableMapping[str, Any]


class Kept:
    """The plain attributes of a model's modules, and of its loss, as they are now."""

    def __init__(self, model: nn.Module | None, loss: Any = None) -> None:
        self._before = [(name, space, _noted(space)) for name, space in _spaces(model, loss)]

    def changed(self) -> dict[str, Any]:
        """Return those that have changed since, or have come, by name, with their values."""
        return {name: value for name, _, _, value in self._changes()}

    def put_back(self) -> None:
        """Let all be as it was."""
        for _, space, (before, key), _ in [*self._changes()]:
            if key in before:
                space[key] = _as_it_was(*before[key])
            else:
                del space[key]

    def _changes(self) -> Iterator[tuple[str, Space, tuple[Mapping[str, Any], str], Any]]:
        for name, space, before in self._before:
            for key, value in _plain(space).items():
                if key not in before or not alike(before[key][1], value):
                    yield f"{name}.{key}".lstrip("."), space, (before, key), value


def _as_it_was(held: Any, before: Any) -> Any:
    """The very list or table that was held, which others may hold too, with what was in it."""
    if type(held) is list:
        held[:] = _copied(before)
    elif type(held) is dict:
        held.clear()
        held.update(_copied(before))
    else:
        return _copied(before)
    return held


class Cells(MutableMapping[str, Any]):
    """The variables that a function closes over, by name."""

    def __init__(self, function: FunctionType) -> None:
        names = function.__code__.co_freevars
        cells: dict[str, CellType] = dict(zip(names, function.__closure__ or ()))
        self.cells = {name: cell for name, cell in cells.items() if _bound(cell)}

    def __getitem__(self, name: str) -> Any:
        return self.cells[name].cell_contents

    def __setitem__(self, name: str, value: Any) -> None:
        self.cells[name].cell_contents = value

    def __delitem__(self, name: str) -> None:
        del self.cells[name].cell_contents

    def __iter__(self) -> Iterator[str]:
        return iter([name for name, cell in self.cells.items() if _bound(cell)])

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _bound(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _spaces(model: nn.Module | None, loss: Any) -> Iterator[tuple[str, Space]]:
    met = set[int]()
    for name, one in () if model is None else model.named_modules():
        yield name, vars(one)
        held = [(key, value) for key, value in vars(one).items() if _of_a_user(type(value))]
        for key, value in held:
            if not isinstance(value, nn.Module):
                path = f"{name}.{key}".lstrip(".")
                yield from ((path, space) for space in _inside(value, met, 1))
    yield from (("the loss", space) for space in _inside(loss, set(), DEPTH))


def _inside(owner: Any, met: set[int], depth: int) -> Iterator[Space]:
    """Yield the attributes of an object, of those that it holds, and what functions close over."""
    if id(owner) in met:
        return
    met.add(id(owner))
    inner: list[Any] = []
    if isinstance(owner, nn.Module):
        yield from (space for one in owner.modules() for space in (vars(one), one._buffers))
        return
    if isinstance(owner, MethodType):
        inner = [owner.__self__]
    elif isinstance(owner, partial):
        inner = [owner.func, *owner.args, *owner.keywords.values()]
    elif isinstance(owner, FunctionType):
        cells = Cells(owner)
        yield cells
        yield owner.__dict__
        inner = [*cells.values(), *(owner.__defaults__ or ())]
    elif type(owner) in (list, tuple, dict):
        inner = [*owner.values()] if isinstance(owner, dict) else [*owner]
    elif not isinstance(owner, (type, Tensor)) and hasattr(owner, "__dict__"):
        yield vars(owner)
        inner = [*vars(owner).values()]
    for one in inner if depth else ():
        if callable(one) or type(one) in (list, tuple, dict) or _of_a_user(type(one)):
            yield from _inside(one, met, depth - 1)


def _of_a_user(kind: type) -> bool:
    return kind not in PLAIN and kind.__module__.split(".")[0] not in OTHERS | LARGE


def _plain(space: Space) -> dict[str, Any]:
    return {k: v for k, v in space.items() if k not in STANDARD and _small(v)}


def _small(value: Any) -> bool:
    """Return whether a value is plain; tables of data, which no forward changes, are left out."""
    if isinstance(value, (list, dict, tuple)):
        return len(value) <= MOST
    return isinstance(value, PLAIN)


def _noted(space: Space) -> dict[str, tuple[Any, Any]]:
    """Return what is held under each name, and a copy of it."""
    return {key: (value, _copied(value)) for key, value in _plain(space).items()}


def _copied(value: Any) -> Any:
    if not isinstance(value, (Tensor, list, dict, tuple)):
        return value
    return pytree.tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, value)


def alike(a: Any, b: Any) -> bool:
    """Return whether two values are equal, tensors in them by their numbers."""
    if a is b:
        return True
    mine, theirs = pytree.tree_leaves(a), pytree.tree_leaves(b)
    return len(mine) == len(theirs) and all(map(_equal, mine, theirs))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        same = (a.device, a.dtype, a.shape) == (b.device, b.dtype, b.shape)
        return same and (a.is_meta or _close(a, b))
    if a is b:
        return True
    try:
        return type(a) is type(b) and not isinstance(a, Tensor) and bool(a == b)
    except Exception:  # whatever `==` of its class raises: it is another object
        return False


def _close(a: Tensor, b: Tensor) -> bool:
    return bool(torch.allclose(a.detach(), b.detach(), rtol=1e-9, atol=1e-12, equal_nan=True))
