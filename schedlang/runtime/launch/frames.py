"""Run calls whose interpreter frames are in one piece of memory, however deep they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
_SLOTS = 1 << 16  # stack size of a frame for which CPython allocates a piece of 1 MiB


def call_in_one_piece(call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Return `call(*args, **kwargs)`, with all frames from here on in one piece of memory.

    CPython allocates frames in pieces of 16 KiB. A loop whose calls begin at the end of a piece
    allocates and frees a new piece for each call, at a hundred times the cost of a call; a step of
    a model is such a loop. A piece is as large as its first frame requires, so after one large
    frame, which is never filled, there is room for all frames of its calls.
    """
    return call(*args, **kwargs)


call_in_one_piece.__code__ = call_in_one_piece.__code__.replace(co_stacksize=_SLOTS)
