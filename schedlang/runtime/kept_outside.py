"""What the code of a model keeps outside of it, in globals and caches, as it was before a run."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import partial
from types import CellType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from schedlang.ir import pytree

OTHERS = frozenset({"torch", "numpy", "schedlang", "builtins", *sys.stdlib_module_names})
LARGE = frozenset({"transformers", "diffusers"})  # of these only what defines the classes is seen
CACHED = type(functools.cache(lambda: None))
DEPTH = 3  # of containers in containers

Undo = list[Callable[[], None]]


@contextmanager
def kept_outside(model: nn.Module, meta: bool = False) -> Iterator[None]:
    """Run code of a model without values, or in another dtype, and forget what it keeps of that.

    Masks and tables of positions are often made once, and kept in a global dict, in a variable, in
    a class or by `functools.lru_cache`: the model itself would meet them afterwards.  With `meta`
    tensors that are kept there already lie on the meta device meanwhile, as those of the model do.
    """
    undo: Undo = []
    try:
        for names, put in _spaces(model):
            _remember(names, put, meta, undo, 0)
        yield
    finally:
        for back in undo:
            back()


def _spaces(model: nn.Module) -> Iterator[tuple[Any, Callable[[Any, Any], None] | None]]:
    """The names of modules, classes, functions and their cells, each with what sets one."""
    classes = {cls for one in model.modules() for cls in type(one).__mro__}
    classes = {cls for cls in classes if _root(cls) not in OTHERS}
    homes = {name for cls in classes if (name := cls.__module__) in sys.modules}
    near = {_home(value) for name in homes for value in tuple(vars(sys.modules[name]).values())}
    homes |= {n for n in near if n in sys.modules and n.split(".")[0] not in OTHERS | LARGE}
    found: list[Any] = [vars(sys.modules[name]) for name in sorted(homes)]
    for space in found:
        yield space, space.__setitem__
    for cls in classes:
        yield vars(cls), partial(setattr, cls)
    functions = {f for s in (*found, *map(vars, classes)) for f in _functions(s, homes)}
    for function in functions:
        yield function.__dict__, function.__dict__.__setitem__
        for cell in function.__closure__ or ():
            yield cell, None


def _root(cls: type) -> str:
    return cls.__module__.split(".")[0]


def _home(value: Any) -> str:
    """The module that a value of a module's globals is, or comes from."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
    return name if isinstance(name, str) else ""


def _functions(space: Any, homes: Iterable[str]) -> Iterator[FunctionType]:
    for value in tuple(space.values()):
        if isinstance(value, ModuleType):  # one that imports what it is asked for
            continue
        for one in (value, getattr(value, "__wrapped__", value)):  # of a decorator
            if isinstance(one, FunctionType) and one.__module__ in homes:
                yield one


def _remember(
    space: Any, put: Callable[[Any, Any], None] | None, meta: bool, undo: Undo, depth: int
) -> None:
    """Add what puts names back, and what they hold, to `undo`."""
    before = _contents(space)
    undo.append(lambda: _put_back(space, before, put))
    for key, value in before.items():
        if isinstance(value, CACHED):
            _remember_cache(value, meta, undo)
        elif isinstance(value, (dict, list)) and depth < DEPTH and key != "__builtins__":
            setter = value.__setitem__
            _remember(value, setter, meta, undo, depth + 1)
        elif meta and put is not None and isinstance(value, Tensor) and not value.is_meta:
            put(key, value.to("meta"))


def _contents(space: Any) -> dict[Any, Any]:
    if isinstance(space, CellType):
        try:
            return {0: space.cell_contents}
        except ValueError:  # not bound yet
            return {}
    return dict(enumerate(space)) if isinstance(space, list) else dict(space)


def _remember_cache(cache: Any, meta: bool, undo: Undo) -> None:
    if meta and cache.cache_info().currsize:
        cache.cache_clear()
    before = cache.cache_info().misses

    def back() -> None:
        if cache.cache_info().misses != before:
            cache.cache_clear()

    undo.append(back)


def _put_back(space: Any, before: dict[Any, Any], put: Callable[[Any, Any], None] | None) -> None:
    now = _contents(space)
    changed = [k for k, v in now.items() if k not in before or before[k] is not v]
    if not any(_holds(now[k]) or _holds(before.get(k)) for k in changed):
        return
    if isinstance(space, list):
        space[:] = before.values()
        return
    for key in changed:
        if not (_holds(now[key]) or _holds(before.get(key))):
            continue
        if isinstance(space, CellType):
            space.cell_contents = before.get(0)
        elif key in before and put is not None:
            put(key, before[key])
        elif isinstance(space, MutableMapping | dict):
            space.pop(key, None)


def _holds(value: Any) -> bool:
    if isinstance(value, (Tensor, tuple, list, dict)):
        return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))
    return False
