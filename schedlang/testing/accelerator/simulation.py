"""One simulation: devices are there inside of it, and what it saw can be asked for; or on ranks."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from schedlang.testing.accelerator.device import Unavailable, load, registered, unavailable

_OFF, _COLLECT, _RAISE = range(3)


@dataclass(frozen=True)
class Side:
    """One of the two that a report is about."""

    op: str
    stream: str
    place: str
    tensor: str
    write: bool

    def __str__(self) -> str:
        does = "writes" if self.write else "reads"
        at = f"\n      at {self.place}" if self.place else ""
        return f"{self.op} {does} {self.tensor} on {self.stream}{at}"


@dataclass(frozen=True)
class Report:
    """Two uses of the same memory that nothing puts in an order.

    `kind` is `race`; `reuse`, of memory that was freed while another stream may still use it;
    `changed source`, of pinned memory that the host changed before a copy of it was done; or
    `early use`, of pinned memory that the host used before a copy into it was done.
    """

    kind: str
    first: Side
    second: Side
    memory: str
    count: int
    rank: int | None = None

    def __str__(self) -> str:
        on = "" if self.rank is None else f" on rank {self.rank}"
        times = f" ({self.count} times)" if self.count > 1 else ""
        says = {
            "race": "nothing orders the second of these after the first",
            "reuse": "memory was freed, and may be taken again while another stream uses it: "
            "no record_stream and no order",
            "changed source": "the host changed what a copy had yet to read",
            "early use": "the host did not wait for the copy",
        }[self.kind]
        return (
            f"{self.kind}{on}: {says}{times}\n   1. {self.first}\n   2. {self.second}\n"
            f"   memory: {self.memory}"
        )


class Raced(AssertionError):
    """Raised by `check`; `reports` are all that were made."""

    def __init__(self, reports: Sequence[Report]) -> None:
        more = f"\n... and {len(reports) - 8} more" if len(reports) > 8 else ""
        some = "\n".join(str(one) for one in reports[:8])
        super().__init__(f"{len(reports)} report(s) of the simulated accelerator\n{some}{more}")
        self.reports = tuple(reports)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.reports,)


@dataclass(frozen=True)
class Synchronisation:
    """The host waited for the device: for what, and where in the program."""

    what: str
    place: str

    def __str__(self) -> str:
        return f"{self.what} at {self.place}" if self.place else self.what


@dataclass(frozen=True)
class Operation:
    """A launch: its stream, its number there, and the launches known to be done before it."""

    name: str
    index: int
    stream: str
    time: int
    clock: tuple[int, ...]
    place: str
    label: str

    def after(self, other: Operation) -> bool:
        """Return whether an order puts this after the other."""
        return other.index < len(self.clock) and self.clock[other.index] >= other.time


def could_overlap(a: Operation, b: Operation) -> bool:
    """Return whether two operations could run at once: neither is ordered after the other."""
    return not a.after(b) and not b.after(a)


class Simulation:
    """The reports of a simulation; it goes on while they are read."""

    def __init__(self, core: Any) -> None:
        self._core, self.device = core, torch.device("sim")

    def reports(self) -> list[Report]:
        """Races and their kin so far."""
        return [
            Report(kind, Side(**first), Side(**second), memory, count)
            for kind, first, second, memory, count in self._core.reports()
        ]

    def check(self) -> None:
        """Wait for the device, and raise `Raced` if there is a report."""
        self.settle()
        if found := self.reports():
            raise Raced(found)

    def settle(self) -> None:
        """Let everything end that is under way, without counting it as a synchronisation."""
        with self.uncounted():
            for index in range(self._core.device_count()):
                torch.accelerator.synchronize(torch.device("sim", index))

    def synchronisations(self) -> list[Synchronisation]:
        """Each time the host waited for the device, in order."""
        return [Synchronisation(*one) for one in self._core.synchronisations()]

    def operations(self) -> list[Operation]:
        """Each launch, in the order of the host; needs `simulated(timeline=True)`."""
        return [
            Operation(name, index, stream, time, tuple(clock), place, label)
            for name, index, stream, time, clock, place, label in self._core.operations()
        ]

    def matching(self, wanted: str | Callable[[Operation], bool]) -> list[Operation]:
        """Operations whose name, place or label contains a text, or that a function admits."""
        if callable(wanted):
            return [one for one in self.operations() if wanted(one)]
        return [
            one
            for one in self.operations()
            if any(wanted in text for text in (one.name, one.place, one.label))
        ]

    def could_overlap(
        self, a: str | Callable[[Operation], bool], b: str | Callable[[Operation], bool]
    ) -> list[tuple[Operation, Operation]]:
        """All pairs of the one and the other that could run at once (see `matching`)."""
        others = self.matching(b)
        return [(x, y) for x in self.matching(a) for y in others if could_overlap(x, y)]

    def memory(self, device: int = 0) -> tuple[int, int]:
        """Bytes alive on a device, and the most that were since the last reset."""
        now, peak = self._core.memory(device)
        return now, peak

    def reset(self) -> None:
        """Forget all that was seen, and take what ran so far as done."""
        self.settle()
        self._core.reset()

    @contextlib.contextmanager
    def strict(self) -> Iterator[None]:
        """Raise reports where they are made, and synchronisations too, for the time of a block."""
        with self.raising(), self.no_synchronisation():
            yield

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Raise a report where it is made, for the time of a block: a debugger stops there.

        The report of an early use of the host comes at the end, since operators of the CPU go on.
        """
        check, before = self._core.set_check(_RAISE), len(self.reports())
        try:
            yield
        finally:
            self._core.set_check(check)
        if found := [one for one in self.reports()[before:] if one.kind == "early use"]:
            raise Raced(found)

    @contextlib.contextmanager
    def no_synchronisation(self) -> Iterator[None]:
        """Make a synchronisation of host and device an error, for the time of a block."""
        forbid = self._core.set_forbid(True)
        try:
            yield
        finally:
            self._core.set_forbid(forbid)

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Neither count nor forbid synchronisations of a block: those of a test itself."""
        counting = self._core.set_counting(False)
        try:
            yield
        finally:
            self._core.set_counting(counting)

    @contextlib.contextmanager
    def unchecked(self) -> Iterator[None]:
        """Follow no accesses in a block: what is known to race is looked at by its values."""
        check = self._core.set_check(_OFF)
        try:
            yield
        finally:
            self._core.set_check(check)

    @contextlib.contextmanager
    def label(self, text: str) -> Iterator[None]:
        """Operations launched inside (by any thread) carry a label, to be found by `matching`."""
        before = self._core.set_label(text)
        try:
            yield
        finally:
            self._core.set_label(before)


@contextlib.contextmanager
def simulated(
    devices: int = 8, *, timeline: bool = False, lines: bool = True
) -> Iterator[Simulation]:
    """Devices `sim:0`, `sim:1`, ... are there inside; nothing is raised unless it is asked for.

    `timeline` keeps every operation; `lines=False` looks for no lines of Python, which is faster.
    """
    core = registered()
    before = core.set_devices(devices)
    kept, told = core.set_timeline(timeline), core.set_lines(lines)
    simulation = Simulation(core)
    try:
        core.set_device(0) if not before else None
        simulation.reset()
        with _backward():
            yield simulation
    finally:
        try:
            simulation.settle()
        finally:
            core.set_timeline(kept)
            core.set_lines(told)
            core.set_devices(before)


@contextlib.contextmanager
def _backward() -> Iterator[None]:
    """Backward runs on this thread where the engine began before it knew of these devices."""
    probe = torch.zeros(1, device="sim", requires_grad=True)
    try:
        probe.sum().backward()  # type: ignore[no-untyped-call]
    except RuntimeError:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    else:
        yield


# -- ranks on simulated devices: processes of this machine, kept warm, each on its own device ------

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
    if reason := unavailable():
        raise Unavailable(reason)
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
        load()  # compiled here, where an error can be told
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
    """Run a function on a rank, in another world than the one that it was given, and a
    simulation."""
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
            reports = [replace(one, rank=rank) for one in simulation.reports()]
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
