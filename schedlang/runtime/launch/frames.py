"""Calls whose frames lie in one piece of memory, however deep they go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
_SLOTS = 1 << 16  # of a frame for which CPython asks for a piece of 1 MiB


def in_one_piece(call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Return `call(*args, **kwargs)`, with all frames from here on in one piece of memory.

    CPython keeps frames in pieces of 16 KiB.  A loop whose calls begin at the end of one maps a new
    piece for each of them and gives it back, at a hundred times the price of a call; a step of a
    model is such a loop.  A piece is as large as its first frame asks for, so behind a wide one,
    which is never filled, there is room for all that is called from it.
    """
    return call(*args, **kwargs)


in_one_piece.__code__ = in_one_piece.__code__.replace(co_stacksize=_SLOTS)
