"""Copy a module, also one in whose attributes a forward has left tensors with a history."""

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


def copied(module: M) -> M:
    """Copy a module deeply; of what a forward left in it (old weight norms do) the values.

    torch refuses to copy a tensor that is no leaf of the graph.
    """
    from torch import Tensor
    from torch.utils._pytree import tree_leaves

    held = (leaf for value in _attributes(module) for leaf in tree_leaves(value))
    made = (leaf for leaf in held if isinstance(leaf, Tensor) and not leaf.is_leaf)
    return deeply_copied(module, {id(leaf): leaf.detach().clone() for leaf in made})


def deeply_copied(module: M, memo: dict[int, Any], inside: bool = False) -> M:
    """Copy a module as `copy.deepcopy(module, memo)` does, in half of its time.

    Each of its modules has a dozen tables of hooks, most of them empty, and as many plain
    attributes: `copy` asks each for how it is made.  One that says itself how it is copied does so.
    Raises the Refusal S867 where a module cannot be copied; of one `inside` what is raised there.
    """
    if (known := memo.get(id(module))) is not None:
        return cast(M, known)
    kind: Any = type(module)
    if (plain := _PLAINLY.get(kind)) is None:
        from torch import nn

        alike = all(getattr(kind, way) is getattr(nn.Module, way) for way in WAYS)
        own = kind in copyreg.dispatch_table or any(hasattr(kind, way) for way in OWN)
        plain = _PLAINLY[kind] = alike and not own
    try:
        if not plain or "__deepcopy__" in vars(module):
            return copy.deepcopy(module, memo)
        made = memo[id(module)] = kind.__new__(kind)
        state: dict[str, Any] = {}
        values: Any = module
        for name, value in values.__getstate__().items():
            if type(value) in _PLAIN:
                state[name] = value
            elif type(value) in _CONTAINERS and not value:
                state[name] = memo.setdefault(id(value), type(value)())
            elif name == "_modules" and type(value) is dict:
                held: dict[str, Any] = {}
                state[name] = memo[id(value)] = held
                for child, one in value.items():
                    held[child] = None if one is None else deeply_copied(one, memo, True)
            else:
                state[name] = copy.deepcopy(value, memo)
        made.__setstate__(state)
        return cast(M, made)
    except Exception as error:
        if inside:
            raise
        raise _without_copy(module, error) from error


# what a class has of torch's if its modules are copied in the usual way, and what it then has not
WAYS = ("__new__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getattr__")
OWN = ("__deepcopy__", "__getnewargs__", "__getnewargs_ex__", "__slots__")
_PLAINLY: WeakKeyDictionary[type, bool] = WeakKeyDictionary()  # classes that were asked
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
