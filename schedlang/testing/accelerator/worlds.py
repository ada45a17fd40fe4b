"""Ranks on simulated devices: processes of this machine, kept warm, each on its own device."""

from __future__ import annotations

import atexit
import datetime
import os
from collections.abc import Callable, Mapping
from typing import Any

from schedlang.testing.accelerator import device

_PRELOAD = ("torch", "torch.distributed", "cloudpickle", "schedlang.testing.accelerator.warm")
_pool: Any = None


def spawn(
    fn: Callable[..., Any],
    *args: Any,
    ranks: int = 2,
    backend: str | None = "simccl",
    devices: int | None = None,
    bind: bool = False,
    set_device: bool = True,
    check: bool = True,
    timeline: bool = False,
    lines: bool = True,
    timeout: float | None = 120.0,
    environ: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call `fn(*args)` on each of some ranks and return what each of them returned.

    Rank i is on `sim:i`, in a world of `backend` ("cpu:gloo,sim:simccl" has both kinds; None starts
    none, as torchrun does), bound to its device where `bind` says so (`device_id`). `RANK`,
    `LOCAL_RANK` and `WORLD_SIZE` are set. With `check`, a report on any rank raises `Raced`.
    `set_device=False` leaves all ranks on `sim:0`, as a script does that forgets to choose.

    `current()` is the simulation of a rank. An error of a rank is raised as
    `schedlang.runtime.launch.pool.RankDied`.
    """
    if reason := device.unavailable():
        raise device.Unavailable(reason)
    options = {
        "backend": backend,
        "devices": devices or max(8, ranks),
        "bind": bind,
        "set_device": set_device,
        "timeline": timeline,
        "lines": lines,
    }
    found = _ranks().run(
        _on_rank, ranks, fn, args, options, timeout=timeout, environ=dict(environ or {})
    )
    reports = [report for _, some in found for report in some]
    if check and reports:
        from schedlang.testing.accelerator.simulation import Raced

        raise Raced(reports)
    return [result for result, _ in found]


def current() -> Any:
    """The simulation of this rank, inside of `spawn`."""
    if _here is None:
        raise RuntimeError("no rank of `spawn`: use `simulated()`")
    return _here


_here: Any = None


def _ranks() -> Any:
    """The ranks of this process, and none of the ordinary ones: the device stays in them."""
    global _pool
    from schedlang.runtime.launch.pool import Pool

    if _pool is None or not _pool._finalizer.alive or _pool._owner != os.getpid():
        device.load()  # compiled here, where an error can be told
        _pool = Pool(preload=_PRELOAD)
        atexit.register(_pool.close)
    return _pool


def close() -> None:
    """End the ranks; the next call of `spawn` starts others."""
    global _pool
    if _pool is not None:
        _pool.close()
        _pool = None


def _on_rank(fn: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """What a rank does: another world than the one that it was given, and a simulation."""
    import dataclasses

    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    from schedlang.testing.accelerator.simulation import simulated

    global _here
    rank, size = dist.get_rank(), dist.get_world_size()
    store = PrefixStore("simulated", dist.distributed_c10d._get_default_store())
    dist.barrier()  # whoever closes first could cut off those that are still connecting
    dist.destroy_process_group()
    with simulated(
        options["devices"], timeline=options["timeline"], lines=options["lines"]
    ) as simulation:
        _here = simulation
        if options["set_device"]:
            torch.accelerator.set_device_index(rank)
        torch.manual_seed(0)
        if options["backend"] is not None:
            dist.init_process_group(
                options["backend"],
                store=store,
                rank=rank,
                world_size=size,
                timeout=datetime.timedelta(seconds=120),
                device_id=torch.device("sim", rank) if options["bind"] else None,
            )
        try:
            result = fn(*args)
            simulation.settle()
            reports = [dataclasses.replace(one, rank=rank) for one in simulation.reports()]
            _all_here(store, "done", size)
        finally:
            _here = None
            if dist.is_initialized():
                dist.destroy_process_group()
    again = PrefixStore("after", store)
    dist.init_process_group("gloo", store=again, rank=rank, world_size=size)  # as it was found
    return result, reports


def _all_here(store: Any, name: str, size: int) -> None:
    """Wait until each rank has come so far."""
    if store.add(name, 1) == size:
        store.set(f"all {name}", "1")
    store.get(f"all {name}")
