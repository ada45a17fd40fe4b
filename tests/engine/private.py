"""The thread backend of torch.distributed; the only module here that uses private names of torch.

Process groups are torch's own and their operators (`c10d::allreduce_` and others) pass through the
dispatcher as with any backend, so dispatch modes observe them as usual.  Only the CPU kernels are
replaced; outside of rank threads these call the original kernels.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    FakeProcessGroup,
    HashStore,
    PythonCallbackWork,
    _set_thread_isolation_mode,
)
from torch.distributed import distributed_c10d as c10d

from schedlang.runtime.comm import agreement
from tests.engine.exchange import Exchange, Wait
from tests.engine.ops import OPS

BACKEND = "threads"
UNSUPPORTED = ("recv_any_source_", "monitored_barrier_")


class _ThreadState(threading.local):
    exchange: Exchange | None = None  # in rank threads only
    rank: int = -1
    world: Any = None  # this rank's registry of process groups


_thread_state = _ThreadState()


def current_rank() -> int:
    """Return the rank of this thread; -1 if it is not a rank."""
    return _thread_state.rank


@contextmanager
def below_dispatch() -> Iterator[None]:
    """Run below autograd and all modes: backend operations are not the model's."""
    with (
        torch._C.DisableTorchFunction(),
        torch._C._AutoDispatchBelowAutograd(),
        torch._C._DisableTorchDispatch(),  # type: ignore[no-untyped-call]
    ):
        yield


# -- kernels ---------------------------------------------------------------------------------------


@cache
def install() -> Any:
    """Register the backend and its kernels once; returns the library that holds them."""
    dist.Backend.register_backend(BACKEND, _backend, devices=["cpu"])
    library = torch.library.Library("c10d", "IMPL")
    kernels: dict[str, Callable[..., Any]] = {name: partial(_collective, name) for name in OPS}
    kernels |= {name: partial(_refuse, name) for name in UNSUPPORTED}
    kernels |= {"send": _send, "recv_": _receive}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered")
        for name, kernel in kernels.items():
            torch_kernel = torch.library.get_kernel(f"c10d::{name}", "CPU")
            wrapped = partial(_dispatch_kernel, kernel, torch_kernel)
            library.impl(name, wrapped, "CPU", with_keyset=True, allow_override=True)
    return library


def _dispatch_kernel(kernel: Callable[..., Any], torch_kernel: Any, keys: Any, *args: Any) -> Any:
    if _thread_state.exchange is None:
        return torch_kernel.call_boxed(keys, *args)
    with below_dispatch():
        return kernel(*map(_unbox, args))


def _unbox(arg: Any) -> Any:
    if not isinstance(arg, torch.ScriptObject):
        return arg
    if arg._type().name() == "ReduceOp":
        return dist.ReduceOp.RedOpType(arg.op())
    return dist.ProcessGroup.unbox(arg)


def _exchange() -> Exchange:
    assert _thread_state.exchange is not None
    return _thread_state.exchange


def _collective(name: str, *args: Any) -> Any:
    call = OPS[name](*args)
    ranks = c10d.get_process_group_ranks(call.group)
    handle = _make_work(
        _exchange().post(call.group.group_name, ranks, call.group.rank(), call.post)
    )
    return handle if call.returned is None else (call.returned, handle)


def _send(tensors: Any, group: Any, target: int, tag: int) -> Any:
    lane, ends = _message_lane(group, group.rank(), target, tag)
    return _make_work(_exchange().send(lane, ends, tensors[0]))


def _receive(tensors: Any, group: Any, source: int, tag: int) -> Any:
    lane, ends = _message_lane(group, source, group.rank(), tag)
    return _make_work(_exchange().receive(lane, ends, tensors[0]))


def _message_lane(group: Any, source: int, target: int, tag: int) -> Any:
    ranks = c10d.get_process_group_ranks(group)
    ends = (ranks[source], ranks[target])
    return (group.group_name, tuple(ranks), *ends, tag), ends


def _refuse(name: str, *args: Any) -> Any:
    raise NotImplementedError(f"c10d::{name} is not supported on threads")


def _make_work(wait: Wait) -> Any:
    done: list[bool] = []

    def callback(_timeout: object) -> bool:
        if not done:
            with below_dispatch():
                wait()
            done.append(True)
        return True

    return PythonCallbackWork(callback).boxed()


# -- the registries of torch.distributed, one for each rank ----------------------------------------


def _backend(_store: Any, rank: int, world: int, _timeout: Any) -> Any:
    return FakeProcessGroup._create_internal(rank, world)  # never asked to communicate


class _PerRankWorld:
    """Replaces torch's registry of process groups by the one of the current rank thread."""

    def __init__(self, world: Any) -> None:
        self.__dict__["plain"] = world

    def __getattr__(self, name: str) -> Any:
        return getattr(_thread_state.world or self.plain, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_thread_state.world or self.plain, name, value)


def _registry() -> Any:
    maps = "pg_map pg_names pg_group_ranks pg_backend_config tags_to_pg pg_to_tag pg_coalesce_state"
    return SimpleNamespace(
        default_pg=None, group_count=0, comms=[], **{m: {} for m in maps.split()}
    )


@contextmanager
def many_ranks() -> Iterator[Any]:
    """Let threads act as ranks inside this context; yields their shared store."""
    install()
    world, hook = c10d._world, sys.excepthook  # init_process_group replaces the hook
    poll = agreement.poll_until
    agreement.poll_until = partial(_poll_until, poll)
    c10d._world = _PerRankWorld(world)  # type: ignore[assignment]
    _set_thread_isolation_mode(True)
    try:
        yield HashStore()
    finally:
        _set_thread_isolation_mode(False)
        c10d._world, sys.excepthook = world, hook
        agreement.poll_until = poll


def _poll_until(
    poll: Callable[..., bool], ready: Callable[[], bool], seconds: float, *rest: float
) -> bool:
    """Poll the store; on a rank thread let other ranks compute meanwhile."""
    if _thread_state.exchange is None:
        return poll(ready, seconds, *rest)
    if not ready():
        _thread_state.exchange.baton.wait(
            _thread_state.rank, ready, "the others in the store of the job"
        )
    return True


@contextmanager
def acting_rank(rank: int, world: int, exchange: Exchange, store: Any) -> Iterator[None]:
    """Make this thread a rank of a process group of size `world`."""
    _thread_state.exchange, _thread_state.rank, _thread_state.world = exchange, rank, _registry()
    try:
        dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world)
        yield
    finally:
        if _thread_state.world.default_pg is not None:
            dist.destroy_process_group()
        _thread_state.exchange, _thread_state.rank, _thread_state.world = None, -1, None
