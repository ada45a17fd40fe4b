"""Copies of modules, also where a forward has left non-leaf tensors in their attributes.

Used wherever a model is built or changed: the user's module itself is never changed.
"""

from __future__ import annotations

import copy
import copyreg
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakKeyDictionary

from schedlang.diagnostics.diagnostic import Refusal

if TYPE_CHECKING:
    from torch import Tensor, nn

M = TypeVar("M", bound="nn.Module")


def copy_module(module: M) -> M:
    """Copy a module deeply; a non-leaf tensor that a forward left in it (old weight norms) by
    value.

    torch refuses to copy a tensor that is not a leaf of the graph.
    """
    tensors = (leaf for leaf in _held_tensors(module) if not leaf.is_leaf)
    return deepcopy_module(module, {id(leaf): leaf.detach().clone() for leaf in tensors})


def deepcopy_module(module: M, memo: dict[int, Any], inside: bool = False) -> M:
    """Copy a module as `copy.deepcopy(module, memo)` does, in half the time.

    Each module has a dozen tables of hooks, most of them empty, and as many plain attributes:
    `copy` looks up for each how to copy it. A class with its own way to copy uses that.

    Functions in attributes and hooks that hold modules, tensors or containers of the model in their
    closures or defaults are made again, and hold the copies: `copy` would leave the originals in.

    Raises Refusal S867 where a module cannot be copied; with `inside`, the original error.
    """
    if (existing := memo.get(id(module))) is not None:
        return cast(M, existing)
    kind: Any = type(module)
    if (by_hand := _COPIED_BY_HAND.get(kind)) is None:
        from torch import nn

        copies_as_torch = all(
            getattr(kind, method) is getattr(nn.Module, method) for method in TORCH_METHODS
        )
        custom = kind in copyreg.dispatch_table or any(
            hasattr(kind, method) for method in CUSTOM_COPY_METHODS
        )
        by_hand = _COPIED_BY_HAND[kind] = copies_as_torch and not custom
    try:
        if not by_hand or "__deepcopy__" in vars(module):
            return copy.deepcopy(module, memo)
        duplicate = memo[id(module)] = kind.__new__(kind)
        state: dict[str, Any] = {}
        values: Any = module
        for name, value in values.__getstate__().items():
            if type(value) in _PLAIN:
                state[name] = value
            elif type(value) in _CONTAINERS and not value:
                state[name] = memo.setdefault(id(value), type(value)())
            elif name == "_modules" and type(value) is dict:
                copied: dict[str, Any] = {}
                state[name] = memo[id(value)] = copied
                for child, entry in value.items():
                    copied[child] = None if entry is None else deepcopy_module(entry, memo, True)
            else:
                if type(value) in _HOLDERS and name not in ("_parameters", "_buffers"):
                    _make_functions(value, memo)
                state[name] = copy.deepcopy(value, memo)
        duplicate.__setstate__(state)
        if not inside and _FUNCTIONS in memo:
            _fill_functions(memo)
        return cast(M, duplicate)
    except Exception as error:
        if inside:
            raise
        raise _refuse_copy(module, error) from error


# methods that must be torch's own, and attributes that must be absent, for a copy by hand
TORCH_METHODS = (
    "__new__",
    "__reduce__",
    "__reduce_ex__",
    "__getstate__",
    "__setstate__",
    "__getattr__",
)
CUSTOM_COPY_METHODS = ("__deepcopy__", "__getnewargs__", "__getnewargs_ex__", "__slots__")
_COPIED_BY_HAND: WeakKeyDictionary[type, bool] = WeakKeyDictionary()  # by class
_CONTAINERS = (dict, OrderedDict, list, set)
_PLAIN = (bool, int, float, str, type(None))


_HOLDERS = (FunctionType, partial, dict, OrderedDict, list, tuple)  # of functions
_FUNCTIONS: Any = "functions"  # key of a memo: the functions to fill when all is copied


def _make_functions(value: Any, memo: dict[int, Any]) -> None:
    """Put an empty copy of each function in an attribute into the memo, if it holds anything."""
    kind = type(value)
    if kind is FunctionType:
        if id(value) not in memo and (value.__closure__ or value.__defaults__):
            cells = tuple(CellType() for _ in value.__closure__ or ())
            function = FunctionType(value.__code__, value.__globals__, value.__name__, None, cells)
            memo[id(value)] = function
            memo.setdefault(_FUNCTIONS, []).append((value, function))
            for held in _held_by(value):
                _make_functions(held, memo)
    elif kind is partial:
        _make_functions((value.func, *value.args, *value.keywords.values()), memo)
    elif kind in (dict, OrderedDict, list, tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            _make_functions(inner, memo)


def _held_by(function: FunctionType) -> Iterator[Any]:
    """Yield what a function holds: in its closure, in its defaults, in its attributes."""
    for cell in function.__closure__ or ():
        if cell != CellType():
            yield cell.cell_contents
    yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    yield from vars(function).values()


def _fill_functions(memo: dict[int, Any]) -> None:
    """Let the copied functions hold the copies of what the originals hold."""

    def copied(value: Any) -> Any:
        if id(value) in memo:
            return memo[id(value)]
        if type(value) is MethodType and id(value.__self__) in memo:
            return MethodType(value.__func__, memo[id(value.__self__)])
        if type(value) in (list, tuple):
            items = [copied(item) for item in value]
            changed = any(item is not old for item, old in zip(items, value))
            return type(value)(items) if changed else value  # else shared, as a log outside is
        if type(value) is partial:
            keywords = {name: copied(item) for name, item in value.keywords.items()}
            return partial(copied(value.func), *map(copied, value.args), **keywords)
        return value

    for original, function in memo.pop(_FUNCTIONS):
        for cell, filled in zip(original.__closure__ or (), function.__closure__ or ()):
            if cell != CellType():
                filled.cell_contents = copied(cell.cell_contents)
        function.__defaults__ = copied(original.__defaults__)
        keywords = original.__kwdefaults__ or {}
        function.__kwdefaults__ = {name: copied(value) for name, value in keywords.items()} or None
        function.__qualname__, function.__module__ = original.__qualname__, original.__module__
        vars(function).update({name: copied(value) for name, value in vars(original).items()})


def _held_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors in attributes of all modules inside, also in containers; no parameters."""
    from torch import Tensor
    from torch.utils._pytree import tree_leaves

    for submodule in module.modules():
        for name, value in vars(submodule).items():
            kind = type(value)
            if kind in _PLAIN or name in ("_modules", "_parameters"):
                continue
            if kind not in _CONTAINERS or value:
                yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _refuse_copy(module: nn.Module, error: Exception) -> Refusal:
    """Return S867 for a module on which `copy.deepcopy` raises this error."""
    name, message = type(module).__name__, f"{type(error).__name__}: {error}"
    return Refusal.of(
        "S867",
        f"the model `{name}` cannot be copied",
        notes=(f"`copy.deepcopy(model)` raises {message}",),
        helps=(
            "keep locks, files and generators out of its attributes",
            "or give the class that holds them a `__deepcopy__`",
            "let a `__getattr__` raise AttributeError for what it does not know",
        ),
    )
