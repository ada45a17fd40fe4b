"""Copy a module, also one in whose attributes a forward has left tensors with a history."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from schedlang.diagnostics.diagnostic import Refusal

if TYPE_CHECKING:
    from torch import nn

M = TypeVar("M", bound="nn.Module")


def copied(module: M) -> M:
    """Copy a module deeply; of what a forward left in it (old weight norms do) the values.

    torch refuses to copy a tensor that is no leaf of the graph.
    """
    from torch import Tensor
    from torch.utils._pytree import tree_leaves

    held = (leaf for value in _attributes(module) for leaf in tree_leaves(value))
    made = (leaf for leaf in held if isinstance(leaf, Tensor) and not leaf.is_leaf)
    return deeply_copied(module, {id(leaf): leaf.detach().clone() for leaf in made})


def deeply_copied(module: M, memo: dict[int, Any]) -> M:
    """Copy a module as `copy.deepcopy(module, memo)` does, in half of its time.

    Each of its modules has a dozen tables of hooks, most of them empty: `copy` asks each for how it
    is made.  Raises the Refusal S867 where a module cannot be copied.
    """
    for one in module.modules():
        for value in vars(one).values():
            if type(value) in _CONTAINERS and not value:
                memo.setdefault(id(value), type(value)())
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise _without_copy(module, error) from error


_CONTAINERS = (dict, OrderedDict, list, set)
_PLAIN = (bool, int, float, str, type(None))


def _attributes(module: nn.Module) -> Iterator[Any]:
    """Yield the attributes of all modules inside that may hold a tensor."""
    for one in module.modules():
        for value in vars(one).values():
            kind = type(value)
            if kind not in _PLAIN and (kind not in _CONTAINERS or value):
                yield value


def _without_copy(module: nn.Module, error: Exception) -> Refusal:
    """S867: a module of which `copy.deepcopy` raises this error."""
    name, said = type(module).__name__, f"{type(error).__name__}: {error}"
    return Refusal.of(
        "S867",
        f"the model `{name}` cannot be copied",
        notes=(f"`copy.deepcopy(model)` raises {said}",),
        helps=(
            "keep locks, files and generators out of its attributes",
            "or give the class that holds them a `__deepcopy__`",
            "let a `__getattr__` raise AttributeError for what it does not know",
        ),
    )
