"""Copies of modules, also where a forward has left non-leaf tensors in their attributes.

Used wherever a model is built or changed: the user's module itself is never changed.
"""

from __future__ import annotations

import copy
import copyreg
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakKeyDictionary

from schedlang.diagnostics.diagnostic import Refusal

if TYPE_CHECKING:
    from torch import nn

M = TypeVar("M", bound="nn.Module")


def copy_module(module: M) -> M:
    """Copy a module deeply; a non-leaf tensor that a forward left in it (old weight norms) by
    value.

    torch refuses to copy a tensor that is not a leaf of the graph.
    """
    from torch import Tensor
    from torch.utils._pytree import tree_leaves

    leaves = (leaf for value in _tensor_attributes(module) for leaf in tree_leaves(value))
    tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_leaf)
    return deepcopy_module(module, {id(leaf): leaf.detach().clone() for leaf in tensors})


def deepcopy_module(module: M, memo: dict[int, Any], inside: bool = False) -> M:
    """Copy a module as `copy.deepcopy(module, memo)` does, in half the time.

    Each module has a dozen tables of hooks, most of them empty, and as many plain attributes:
    `copy` looks up for each how to copy it. A class with its own way to copy uses that.

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
                state[name] = copy.deepcopy(value, memo)
        duplicate.__setstate__(state)
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


def _tensor_attributes(module: nn.Module) -> Iterator[Any]:
    """Yield the attributes of all modules inside that may hold a tensor."""
    for submodule in module.modules():
        for value in vars(submodule).values():
            kind = type(value)
            if kind not in _PLAIN and (kind not in _CONTAINERS or value):
                yield value


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
