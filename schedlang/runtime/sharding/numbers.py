"""The whole numbers that a module counts by: its own attributes, and those of its configuration."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


def numbers_of(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Every whole number above one of a module, by its path: `heads`, `config.heads`.

    Objects that hold settings are looked into; tensors, modules and containers are not.
    """
    for name, value in vars(module).items():
        if _counts(value):
            yield name, value
        elif name[:1] != "_" and _settings(value):
            yield from ((f"{name}.{k}", v) for k, v in vars(value).items() if _counts(v))


def number_at(module: nn.Module, path: str) -> Any:
    """The number at a path, or None."""
    holder, _, last = path.rpartition(".")
    found = vars(module).get(holder) if holder else module
    return vars(found).get(last) if found is not None else None


def set_number(module: nn.Module, path: str, value: int) -> None:
    """Set a number of this module alone: settings that it shares with others are copied first."""
    holder, _, last = path.rpartition(".")
    if not holder:
        setattr(module, last, value)
        return
    own = copy.copy(vars(module)[holder])
    vars(own)[last] = value  # past any setter that would change other settings with it
    setattr(module, holder, own)


def _counts(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 1


def _settings(value: Any) -> bool:
    plain = hasattr(value, "__dict__") and not callable(value)
    return plain and not isinstance(value, Tensor | nn.Module | type)
