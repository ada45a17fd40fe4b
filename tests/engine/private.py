"""The one place that uses private names of torch: a backend whose kernels are functions of ours.

The process group is torch's own, and its operators (`c10d::allreduce_` and so on) go through the
dispatcher as with any backend, so that modes over them see what they always see; only the kernels
for the CPU are replaced, and outside of rank threads they call the ones that they replaced.
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
REFUSED = ("recv_any_source_", "monitored_barrier_")


class _Here(threading.local):
    exchange: Exchange | None = None  # in rank threads only
    rank: int = -1
    world: Any = None  # this rank's registry of process groups


_here = _Here()


def here() -> int:
    """The rank that this thread is; -1 if it is none."""
    return _here.rank


@contextmanager
def plainly() -> Iterator[None]:
    """Below autograd and every mode: what a backend does is no part of the model's arithmetic."""
    with (
        torch._C.DisableTorchFunction(),
        torch._C._AutoDispatchBelowAutograd(),
        torch._C._DisableTorchDispatch(),  # type: ignore[no-untyped-call]
    ):
        yield


# -- kernels ---------------------------------------------------------------------------------------


@cache
def install() -> Any:
    """Register the backend and its kernels, once; the result keeps them registered."""
    dist.Backend.register_backend(BACKEND, _backend, devices=["cpu"])
    library = torch.library.Library("c10d", "IMPL")
    kernels: dict[str, Callable[..., Any]] = {name: partial(_collective, name) for name in OPS}
    kernels |= {name: partial(_refuse, name) for name in REFUSED}
    kernels |= {"send": _send, "recv_": _receive}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered")
        for name, kernel in kernels.items():
            before = torch.library.get_kernel(f"c10d::{name}", "CPU")
            run = partial(_run, kernel, before)
            library.impl(name, run, "CPU", with_keyset=True, allow_override=True)
    return library


def _run(kernel: Callable[..., Any], before: Any, keys: Any, *args: Any) -> Any:
    if _here.exchange is None:
        return before.call_boxed(keys, *args)
    with plainly():
        return kernel(*map(_unboxed, args))


def _unboxed(arg: Any) -> Any:
    if not isinstance(arg, torch.ScriptObject):
        return arg
    if arg._type().name() == "ReduceOp":
        return dist.ReduceOp.RedOpType(arg.op())
    return dist.ProcessGroup.unbox(arg)


def _exchange() -> Exchange:
    assert _here.exchange is not None
    return _here.exchange


def _collective(name: str, *args: Any) -> Any:
    call = OPS[name](*args)
    ranks = c10d.get_process_group_ranks(call.group)
    work = _work(_exchange().post(call.group.group_name, ranks, call.group.rank(), call.post))
    return work if call.returned is None else (call.returned, work)


def _send(tensors: Any, group: Any, target: int, tag: int) -> Any:
    lane, ends = _lane(group, group.rank(), target, tag)
    return _work(_exchange().send(lane, ends, tensors[0]))


def _receive(tensors: Any, group: Any, source: int, tag: int) -> Any:
    lane, ends = _lane(group, source, group.rank(), tag)
    return _work(_exchange().receive(lane, ends, tensors[0]))


def _lane(group: Any, source: int, target: int, tag: int) -> Any:
    ranks = c10d.get_process_group_ranks(group)
    ends = (ranks[source], ranks[target])
    return (group.group_name, tuple(ranks), *ends, tag), ends


def _refuse(name: str, *args: Any) -> Any:
    raise NotImplementedError(f"c10d::{name} is not supported on threads")


def _work(wait: Wait) -> Any:
    done: list[bool] = []

    def callback(_timeout: object) -> bool:
        if not done:
            with plainly():
                wait()
            done.append(True)
        return True

    return PythonCallbackWork(callback).boxed()


# -- the registries of torch.distributed, one for each rank ----------------------------------------


def _backend(_store: Any, rank: int, world: int, _timeout: Any) -> Any:
    return FakeProcessGroup._create_internal(rank, world)  # never asked to communicate


class _Worlds:
    """In place of torch's registry of process groups: that of this thread's rank, if it is one."""

    def __init__(self, plain: Any) -> None:
        self.__dict__["plain"] = plain

    def __getattr__(self, name: str) -> Any:
        return getattr(_here.world or self.plain, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_here.world or self.plain, name, value)


def _registry() -> Any:
    maps = "pg_map pg_names pg_group_ranks pg_backend_config tags_to_pg pg_to_tag pg_coalesce_state"
    return SimpleNamespace(
        default_pg=None, group_count=0, comms=[], **{m: {} for m in maps.split()}
    )


@contextmanager
def many_ranks() -> Iterator[Any]:
    """While this lasts, threads may be ranks; gives the store that they share."""
    install()
    plain, hook = c10d._world, sys.excepthook  # which joining a group replaces
    patient = agreement.poll_until
    agreement.poll_until = partial(_until, patient)
    c10d._world = _Worlds(plain)  # type: ignore[assignment]
    _set_thread_isolation_mode(True)
    try:
        yield HashStore()
    finally:
        _set_thread_isolation_mode(False)
        c10d._world, sys.excepthook = plain, hook
        agreement.poll_until = patient


def _until(
    patient: Callable[..., bool], ready: Callable[[], bool], seconds: float, *most: float
) -> bool:
    """A rank that looks into the store again and again lets the others compute meanwhile."""
    if _here.exchange is None:
        return patient(ready, seconds, *most)
    if not ready():
        _here.exchange.baton.wait(_here.rank, ready, "the others in the store of the job")
    return True


@contextmanager
def being(rank: int, world: int, exchange: Exchange, store: Any) -> Iterator[None]:
    """This thread is a rank, in a process group of the world."""
    _here.exchange, _here.rank, _here.world = exchange, rank, _registry()
    try:
        dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world)
        yield
    finally:
        if _here.world.default_pg is not None:
            dist.destroy_process_group()
        _here.exchange, _here.rank, _here.world = None, -1, None
