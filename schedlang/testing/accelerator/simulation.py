"""One simulation: devices are there inside of it, and what it saw can be asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from schedlang.testing.accelerator.device import registered

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
    """What `check` raises; `reports` are all that were made."""

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
        """Whether an order puts this after the other."""
        return other.index < len(self.clock) and self.clock[other.index] >= other.time


def could_overlap(a: Operation, b: Operation) -> bool:
    """Whether two operations could run at once: neither is ordered after the other."""
    return not a.after(b) and not b.after(a)


class Simulation:
    """What a simulation saw; it goes on while this is asked."""

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
        """Inside, a report is raised where it is made, and so is a synchronisation."""
        with self.raising(), self.no_synchronisation():
            yield

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Inside, a report is raised where it is made (that of an early use of the host at the
        end, since operators of the CPU go on): a debugger stops there."""
        check, before = self._core.set_check(_RAISE), len(self.reports())
        try:
            yield
        finally:
            self._core.set_check(check)
        if found := [one for one in self.reports()[before:] if one.kind == "early use"]:
            raise Raced(found)

    @contextlib.contextmanager
    def no_synchronisation(self) -> Iterator[None]:
        """Inside, a synchronisation of host and device is an error."""
        forbid = self._core.set_forbid(True)
        try:
            yield
        finally:
            self._core.set_forbid(forbid)

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Inside, synchronisations are neither counted nor forbidden: those of a test itself."""
        counting = self._core.set_counting(False)
        try:
            yield
        finally:
            self._core.set_counting(counting)

    @contextlib.contextmanager
    def unchecked(self) -> Iterator[None]:
        """Inside, no accesses are followed: what is known to race is looked at by its values."""
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
