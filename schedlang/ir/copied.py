"""Copy a module, also one in whose attributes a forward has left tensors with a history."""

from __future__ import annotations

import copy
import copyreg
from collections import OrderedDict
from collections.abc import Iterator
from functools import cache
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
    """Copy a module as `copy.deepcopy(module, memo)` does, in a quarter of the time.

    Each of its modules has a dozen tables of hooks, most of them empty, and twice as many plain
    attributes: `copy` asks each for how it is made.  Raises the Refusal S867 where a module cannot
    be copied.
    """
    try:
        found: M = _copied(module, memo)
        return found
    except Exception as error:
        raise _without_copy(module, error) from error


def _copied(one: Any, memo: dict[int, Any]) -> Any:
    """Copy a module, and those inside; one that says itself how it is copied does so."""
    if (known := memo.get(id(one))) is not None:
        return known
    kind: Any = type(one)
    if not _as_torch_has_it(kind) or "__deepcopy__" in vars(one):
        return copy.deepcopy(one, memo)
    made = memo[id(one)] = kind.__new__(kind)
    state: dict[str, Any] = {}
    for name, value in one.__getstate__().items():
        of = type(value)
        if of in _PLAIN:
            state[name] = value
        elif of in _CONTAINERS and not value:
            state[name] = memo.setdefault(id(value), of())
        elif name == "_modules" and of is dict:
            held: dict[str, Any] = {}
            state[name] = memo[id(value)] = held
            for child, inner in value.items():
                held[child] = None if inner is None else _copied(inner, memo)
        else:
            state[name] = copy.deepcopy(value, memo)
    made.__setstate__(state)
    return made


@cache
def _as_torch_has_it(kind: Any) -> bool:
    """Return whether values of a class are copied in `copy`'s way, and their state in torch's."""
    from torch import nn

    ways = ("__new__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getattr__")
    alike = all(getattr(kind, way) is getattr(nn.Module, way) for way in ways)
    own = ("__deepcopy__", "__getnewargs__", "__getnewargs_ex__", "__slots__")
    return alike and kind not in copyreg.dispatch_table and not any(hasattr(kind, o) for o in own)


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
