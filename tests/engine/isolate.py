"""A function and its arguments as each rank gets them: its own copies, as if sent to a process."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from schedlang.runtime.launch import pickling


def packed(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """What `unpacked` makes copies from: modules and their functions stay those of this process."""
    return pickling.dump_job((fn, args))


def unpacked(blob: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """One rank's own copies."""
    fn, args = pickle.loads(blob)
    return fn, args
