"""Run a function on several local gloo ranks and collect what it returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from schedlang.runtime.launch import pool


def run_ranks(world: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """`work(rank, *args)` on local ranks; what each returned. A failing rank raises here.

    They come from the fork server: to fork a process that has threads, as that of the tests has by
    then, can leave a rank waiting for a lock that nobody holds.
    """
    return pool.shared_pool().run(_rank, world, work, args)


def _rank(work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return work(dist.get_rank() if dist.is_initialized() else 0, *args)
