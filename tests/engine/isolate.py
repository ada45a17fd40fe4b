"""Private copies of a function and its arguments per rank, as if sent to another process."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from schedlang.runtime.launch import pickling


def pack_job(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Serialize a job; modules and their functions are referenced, not copied."""
    return pickling.dump_job((fn, args))


def unpack_job(blob: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return one rank's copies of the function and its arguments."""
    fn, args = pickle.loads(blob)
    return fn, args
