"""Copy a module, also one in whose attributes a forward has left tensors with a history."""

from __future__ import annotations

import copy
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

    held = (leaf for one in module.modules() for leaf in tree_leaves(vars(one)))
    made = (leaf for leaf in held if isinstance(leaf, Tensor) and not leaf.is_leaf)
    memo: dict[int, Any] = {id(leaf): leaf.detach().clone() for leaf in made}
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise without_copy(module, error) from error


def without_copy(module: nn.Module, error: Exception) -> Refusal:
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
