"""Run a function on several local gloo ranks and collect what it returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from schedlang.runtime.launch import pool


def run_ranks(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call a function with (rank, *args) on local ranks; return all results, or raise an error.

    The ranks come from the fork server: a fork of the test process, which has threads, could wait
    forever for a lock.
    """
    return pool.shared_pool().run(_rank, world, function, args)


def _rank(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(dist.get_rank() if dist.is_initialized() else 0, *args)
