"""Run a function on several local gloo ranks and collect what it returns."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _rank(rank: int, world: int, folder: str, work: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    store, limit = f"file://{folder}/store", timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=limit)
    torch.save(work(rank, *args), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(world: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """`work(rank, *args)` on forked ranks; what each returned. A failing rank raises here."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (world, folder, work, args), world, start_method="fork")
        return [torch.load(f"{folder}/{r}.pt", weights_only=False) for r in range(world)]
