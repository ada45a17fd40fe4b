"""Calls of torch's functions as a mode sees them: their names, and the tensors among arguments."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from schedlang.runtime import nests as pytree


def name_of(func: Any) -> str:
    """A readable name of a torch function or tensor method."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__") and hasattr(func, "__self__"):
        return getattr(func.__self__, "__name__", name)
    return name


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors of a nest of lists, tuples and dicts, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
