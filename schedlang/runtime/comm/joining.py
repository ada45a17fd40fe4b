"""Come into the job that a launcher has started, and leave it together."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import time
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist

from schedlang.runtime import device as devices
from schedlang.runtime.comm.world import HOSTS, barrier, forget, here

TIMEOUT = timedelta(minutes=10)  # of a collective that others do not join
_FOREVER = timedelta(hours=12)  # where whoever started the ranks decides what a hang is
_SETTLE = 0.1  # seconds at the end of a process for gloo's threads to let go of their tensors
_PR_SET_PDEATHSIG = 1


def to_join() -> bool:
    """Whether torchrun has started this process for a job that it has not joined yet."""
    return not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ


def join_world() -> None:
    """Join the job that torchrun started, if there is one and nobody has joined yet.

    LOCAL_RANK chooses the device; the world is that of its backend alone, so that groups can be
    split off it.
    """
    _settle_at_exit()
    _end_with_torchrun()
    if not to_join():
        return
    device = devices.own_device()
    if devices.on_host(device):
        dist.init_process_group(HOSTS, timeout=TIMEOUT)
    else:
        kind = dist.get_default_backend_for_device(device)
        dist.init_process_group(kind, timeout=TIMEOUT, device_id=device)
    here().ours = True


def join_locally(rank: int, size: int, path: str) -> None:
    """Be a rank of a job on this machine that meets in a file, without a port to agree on."""
    from torch._C._distributed_c10d import FileStore

    store = FileStore(path, size)
    dist.init_process_group(HOSTS, store=store, rank=rank, world_size=size, timeout=_FOREVER)


def leave() -> None:
    """Leave the job together: whoever closes first could cut off what is still on its way.

    Its world goes now: torch remembers the meshes of DTensors that it met, and these the group.
    """
    if dist.is_initialized():
        barrier()
        forget()
        dist.destroy_process_group()


def own_store() -> Any:
    """The store of the job through a connection of its own, for another thread."""
    from torch.distributed.distributed_c10d import _get_default_store

    store: Any = _get_default_store()
    return store.clone()


@cache
def _end_with_torchrun() -> None:
    """Have Linux end this rank with the torchrun that started it.

    An agent that is killed ends nobody, and its ranks would hold their devices and wait for each
    other.  Of other starters nothing is known: Linux counts the end of the thread that started us.
    """
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != 1:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@cache
def _settle_at_exit() -> None:
    """Give gloo's threads a moment before the interpreter ends, in which they can take its lock.

    A thread drops the tensors of a collective after it has told the waiting rank; if it needs the
    interpreter for that and the interpreter is ending, Python ends the thread inside a C++
    destructor, and the process aborts.  The groups live as long as a Program holds them, so
    `destroy_process_group` does not join the threads.
    """
    atexit.register(time.sleep, _SETTLE)
