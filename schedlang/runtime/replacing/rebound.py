"""Copies of a forward in which something else is found: other names, or another innermost function.

A class's own function is never changed: what is copied belongs to the modules that run it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import CellType, FunctionType
from typing import Any


def decorated(function: Any, change: Callable[[Any], Any]) -> Any:
    """What `change` makes of the innermost function, in copies of the decorators around it."""
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        return change(function)
    made = decorated(inner, change)
    cells = tuple(CellType(made) if _holds(cell, inner) else cell for cell in function.__closure__)
    copied = _copied(function, function.__globals__, cells)
    copied.__wrapped__ = made
    return copied


def other_names(function: Any, named: Mapping[str, Any]) -> Any:
    """A copy that finds other values under some of its file's names."""
    # torch.compile would look the names up in the file, if it knew which file that is
    space = {n: v for n, v in function.__globals__.items() if n != "__name__"} | dict(named)
    return _copied(function, space, function.__closure__)


def _copied(function: FunctionType, space: dict[str, Any], cells: Any) -> Any:
    made: Any = FunctionType(
        function.__code__, space, function.__name__, function.__defaults__, cells
    )
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update(function.__dict__)
    return made


def _holds(cell: CellType, value: Any) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # empty
        return False
