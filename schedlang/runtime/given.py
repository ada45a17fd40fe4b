"""Which keys of a batch the forward of a model takes: what else is there is for the loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from torch import nn


def called(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    """The output of a model for a batch, of which it is given what its forward takes."""
    return model(**taken(model, batch))


def taken(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a forward: the keys that it names, or all if it has `**kwargs`."""
    names = named_arguments(model)
    return {key: value for key, value in batch.items() if names is None or key in names}


def named_arguments(model: nn.Module | None) -> frozenset[str] | None:
    """The arguments that a forward takes by name; None if it takes any.

    A wrapper that says nothing but `*args, **kwargs` speaks for the forward of its class.
    """
    if model is None:
        return None
    own = vars(model).get("forward")
    found = _named(own) if own is not None else None
    return found if found is not None else _of_class(type(model).forward)


def _named(forward: Callable[..., Any], skipped: int = 0) -> frozenset[str] | None:
    try:
        given = list(inspect.signature(forward).parameters.values())[skipped:]
    except (TypeError, ValueError):  # compiled code that tells nothing
        return None
    if any(one.kind is one.VAR_KEYWORD for one in given):
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(one.name for one in given if one.kind in by_name)


@lru_cache(maxsize=256)
def _of_class(forward: Callable[..., Any]) -> frozenset[str] | None:
    return _named(forward, skipped=1)
