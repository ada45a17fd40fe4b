"""Simulations: devices exist inside of one, and its findings can be queried; also on ranks."""

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
    """One of the two accesses of a report."""

    op: str
    stream: str
    place: str
    tensor: str
    write: bool

    def __str__(self) -> str:
        does = "writes" if self.write else "reads"
        location = f"\n      at {self.place}" if self.place else ""
        return f"{self.op} {does} {self.tensor} on {self.stream}{location}"


@dataclass(frozen=True)
class Report:
    """Two uses of the same memory without an order between them.

    `kind` is `race`; `reuse`, of memory that was freed while another stream may still use it;
    `changed source`, of pinned memory that the host changed before a copy of it was done; or `early
    use`, of pinned memory that the host used before a copy into it was done.
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
        explanation = {
            "race": "nothing orders the second of these after the first",
            "reuse": "memory was freed, and may be taken again while another stream uses it: "
            "no record_stream and no order",
            "changed source": "the host changed what a copy had yet to read",
            "early use": "the host did not wait for the copy",
        }[self.kind]
        return (
            f"{self.kind}{on}: {explanation}{times}\n   1. {self.first}\n   2. {self.second}\n"
            f"   memory: {self.memory}"
        )


class Raced(AssertionError):
    """Raised by `check`; `reports` are all reports."""

    def __init__(self, reports: Sequence[Report]) -> None:
        suffix = f"\n... and {len(reports) - 8} more" if len(reports) > 8 else ""
        listing = "\n".join(str(report) for report in reports[:8])
        super().__init__(
            f"{len(reports)} report(s) of the simulated accelerator\n{listing}{suffix}"
        )
        self.reports = tuple(reports)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.reports,)


@dataclass(frozen=True)
class Synchronisation:
    """A wait of the host for the device: for what, and where in the program."""

    what: str
    place: str

    def __str__(self) -> str:
        return f"{self.what} at {self.place}" if self.place else self.what


@dataclass(frozen=True)
class Operation:
    """A launch: its stream, its number on it, and the launches known to be done before it."""

    name: str
    index: int
    stream: str
    time: int
    clock: tuple[int, ...]
    place: str
    label: str

    def after(self, other: Operation) -> bool:
        """Return whether this operation is ordered after the other."""
        return other.index < len(self.clock) and self.clock[other.index] >= other.time


def could_overlap(a: Operation, b: Operation) -> bool:
    """Return whether two operations could run at once: neither is ordered after the other."""
    return not a.after(b) and not b.after(a)


class Simulation:
    """The findings of a simulation, which continues while they are read."""

    def __init__(self, core: Any) -> None:
        self._core, self.device = core, torch.device("sim")

    def reports(self) -> list[Report]:
        """Return the races and other reports so far."""
        return [
            Report(kind, Side(**first), Side(**second), memory, count)
            for kind, first, second, memory, count in self._core.reports()
        ]

    def check(self) -> None:
        """Wait for the device, and raise `Raced` if there is a report."""
        self.settle()
        if reports := self.reports():
            raise Raced(reports)

    def settle(self) -> None:
        """Wait for all pending work, without counting it as a synchronisation."""
        with self.uncounted():
            for index in range(self._core.device_count()):
                torch.accelerator.synchronize(torch.device("sim", index))

    def synchronisations(self) -> list[Synchronisation]:
        """Return each wait of the host for the device, in order."""
        return [Synchronisation(*record) for record in self._core.synchronisations()]

    def operations(self) -> list[Operation]:
        """Return each launch, in the order of the host; needs `simulated(timeline=True)`."""
        return [
            Operation(name, index, stream, time, tuple(clock), place, label)
            for name, index, stream, time, clock, place, label in self._core.operations()
        ]

    def matching(self, pattern: str | Callable[[Operation], bool]) -> list[Operation]:
        """Return the operations whose name, place or label contains a text, or that a function
        accepts."""
        if callable(pattern):
            return [operation for operation in self.operations() if pattern(operation)]
        return [
            operation
            for operation in self.operations()
            if any(pattern in text for text in (operation.name, operation.place, operation.label))
        ]

    def could_overlap(
        self, a: str | Callable[[Operation], bool], b: str | Callable[[Operation], bool]
    ) -> list[tuple[Operation, Operation]]:
        """Return all pairs of operations that could run at once (see `matching`)."""
        others = self.matching(b)
        return [(x, y) for x in self.matching(a) for y in others if could_overlap(x, y)]

    def memory(self, device: int = 0) -> tuple[int, int]:
        """Return the bytes allocated on a device, and the peak since the last reset."""
        in_use, peak = self._core.memory(device)
        return in_use, peak

    def reset(self) -> None:
        """Drop all findings, and treat everything launched so far as done."""
        self.settle()
        self._core.reset()

    @contextlib.contextmanager
    def strict(self) -> Iterator[None]:
        """Raise reports where they occur, and synchronisations too, during a block."""
        with self.raising(), self.no_synchronisation():
            yield

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Raise a report where it occurs, during a block: a debugger stops there.

        The report of an early use by the host is raised at the end, since operators of the CPU
        continue.
        """
        check, before = self._core.set_check(_RAISE), len(self.reports())
        try:
            yield
        finally:
            self._core.set_check(check)
        if early := [report for report in self.reports()[before:] if report.kind == "early use"]:
            raise Raced(early)

    @contextlib.contextmanager
    def no_synchronisation(self) -> Iterator[None]:
        """Make a synchronisation of host and device an error, during a block."""
        forbid = self._core.set_forbid(True)
        try:
            yield
        finally:
            self._core.set_forbid(forbid)

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Neither count nor forbid synchronisations during a block: those of a test itself."""
        counting = self._core.set_counting(False)
        try:
            yield
        finally:
            self._core.set_counting(counting)

    @contextlib.contextmanager
    def unchecked(self) -> Iterator[None]:
        """Do not check accesses during a block: for code that is known to race, and is tested by
        its values."""
        check = self._core.set_check(_OFF)
        try:
            yield
        finally:
            self._core.set_check(check)

    @contextlib.contextmanager
    def label(self, text: str) -> Iterator[None]:
        """Label operations launched inside (by any thread), for `matching`."""
        before = self._core.set_label(text)
        try:
            yield
        finally:
            self._core.set_label(before)


@contextlib.contextmanager
def simulated(
    devices: int = 8, *, timeline: bool = False, lines: bool = True
) -> Iterator[Simulation]:
    """Make devices `sim:0`, `sim:1`, ... exist inside a block; findings are not raised by default.

    `timeline` records every operation; `lines=False` records no lines of Python, which is faster.
    """
    core = registered()
    before = core.set_devices(devices)
    timeline_before, lines_before = core.set_timeline(timeline), core.set_lines(lines)
    simulation = Simulation(core)
    try:
        core.set_device(0) if not before else None
        simulation.reset()
        with _single_thread_backward():
            yield simulation
    finally:
        try:
            simulation.settle()
        finally:
            core.set_timeline(timeline_before)
            core.set_lines(lines_before)
            core.set_devices(before)


@contextlib.contextmanager
def _single_thread_backward() -> Iterator[None]:
    """Run backward on this thread if the engine started before these devices were registered."""
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
    """Call `fn(*args)` on each of some ranks, and return the results.

    Rank i is on `sim:i`, in a world of `backend` ("cpu:gloo,sim:simccl" has both; None starts none,
    as torchrun does), bound to its device if `bind` (`device_id`). `RANK`, `LOCAL_RANK` and
    `WORLD_SIZE` are set. With `check`, a report on any rank raises `Raced`. `set_device=False`
    leaves all ranks on `sim:0`, like a script that forgets to choose.

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
    answers = _ranks().run(
        _on_rank, ranks, fn, args, options, timeout=timeout, environ=dict(environ or {})
    )
    reports = [report for _, rank_reports in answers for report in rank_reports]
    if check and reports:
        raise Raced(reports)
    return [result for result, _ in answers]


def current() -> Any:
    """Return the simulation of this rank, inside of `spawn`."""
    if _here is None:
        raise RuntimeError("no rank of `spawn`: use `simulated()`")
    return _here


_here: Any = None


def _ranks() -> Any:
    """Return the warm ranks for `spawn`, separate from ordinary ones, as the device stays
    registered."""
    global _pool
    from schedlang.runtime.launch.pool import Pool

    if _pool is None or not _pool._finalizer.alive or _pool._owner != os.getpid():
        load()  # compile here, where an error can be reported
        _pool = Pool(preload=_PRELOAD)
        atexit.register(_pool.close)
    return _pool


def close() -> None:
    """End the ranks; the next `spawn` starts others."""
    global _pool
    if _pool is not None:
        _pool.close()
        _pool = None


def _on_rank(fn: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Run a function on a rank in a new world, and return its result and the reports."""
    global _here
    rank, size = dist.get_rank(), dist.get_world_size()
    store = PrefixStore("simulated", dist.distributed_c10d._get_default_store())
    dist.barrier()  # else the first rank to close could disconnect ranks that are still connecting
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
            reports = [replace(report, rank=rank) for report in simulation.reports()]
            _wait_for_all(store, "done", size)
        finally:
            _here = None
            if dist.is_initialized():
                dist.destroy_process_group()
    after_store = PrefixStore("after", store)
    dist.init_process_group("gloo", store=after_store, rank=rank, world_size=size)  # as before
    return result, reports


def _wait_for_all(store: Any, name: str, size: int) -> None:
    """Wait until each rank has reached this point."""
    if store.add(name, 1) == size:
        store.set(f"all {name}", "1")
    store.get(f"all {name}")
