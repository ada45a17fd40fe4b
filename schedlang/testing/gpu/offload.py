"""What lies on the host while a step runs: results as ever, pinned memory, fewer bytes here."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from schedlang.passes.lower.build import build
from schedlang.runtime import device as devices
from schedlang.testing.gpu import models
from schedlang.testing.gpu.case import Case, Setup, Skipped, Told, Wrong
from schedlang.testing.gpu.programs import Subject, against, plan_of, shape_of, trained

MOVED = {
    "activations": Subject("blocks.*  offload(activations)"),
    "parameters": Subject("blocks.*  offload(parameters)"),
    "parameters, gradients and optimizer": Subject(
        "blocks.*  offload(parameters)\nblocks.*  offload(gradients)\noffload(optimizer)",
        make=models.adamw,
    ),
}

STAYS = "verify(train)"  # a row that changes nothing


def cases(setup: Setup) -> list[Case]:
    """Copies themselves, then what steps keep on the host, then what that saves."""
    return [
        Case("copies to the host and back", partial(_copies, setup)),
        *(Case(name, partial(_moved, one, setup)) for name, one in MOVED.items()),
        Case("bytes at the peak", partial(_peak, setup)),
    ]


def _copies(setup: Setup) -> Told:
    """A tensor goes and comes on a stream of its own; the host memory is pinned."""
    if setup.device == "cpu":
        raise Skipped("a CPU has no memory apart from the host's")
    device = torch.device(setup.device, 0)
    x = torch.randn(setup.pick(2**26, 2**24, 2**8), device=device)
    held = devices.host_empty(x.shape, x.dtype, beside=device)
    if not held.is_pinned():
        raise Wrong("host memory beside the device is not pinned")
    back, side, here = (
        torch.zeros_like(x),
        devices.new_stream(device),
        devices.current_stream(device),
    )
    assert side is not None and here is not None
    side.wait_stream(here)
    spans = []
    for into, source in ((held, x), (back, held)):
        start, end = (torch.Event(device, enable_timing=setup.timed) for _ in range(2))
        with side:
            side.record_event(start)
            into.copy_(source, non_blocking=True)
            side.record_event(end)
        side.synchronize()
        if setup.timed:
            spans.append(start.elapsed_time(end) / 1e3)
    here.wait_stream(side)
    for one in (x, back):
        one.record_stream(side)
    if not torch.equal(back, x):
        raise Wrong("what came back is not what went")
    rates = [x.nbytes / span / 1e9 for span in spans]
    names = ("to the host", "back")
    said = ", ".join(f"{rate:.1f} GB/s {name}" for rate, name in zip(rates, names, strict=False))
    return Told(said, {"bytes_per_second": [rate * 1e9 for rate in rates]})


def _moved(subject: Subject, setup: Setup) -> Told:
    shape = shape_of(setup)
    return against(subject, shape, setup.device, trained(subject, shape, setup.device))


def _peak(setup: Setup) -> Told:
    """The most bytes on the device in a step, with activations here and on the host."""
    device = torch.device(setup.device)
    if devices.peak_bytes(device) is None:
        raise Skipped("nobody counts the bytes of this device")
    shape = replace(shape_of(setup), rows=4 * shape_of(setup).rows, depth=8)
    peak = [_step_peak(rows, shape, setup.device) for rows in (STAYS, MOVED["activations"].rows)]
    if peak[1] >= peak[0]:
        raise Wrong(f"{peak[1]} bytes with activations on the host, {peak[0]} without")
    return Told(f"{peak[1] / peak[0]:.2f} of those without", {"peak": peak})


def _step_peak(rows: str, shape: models.Shape, device: str) -> int:
    subject = Subject(rows)
    program = build(plan_of(subject, shape, device), models.batch(shape, 0), optimizer=subject.make)
    given = models.batches(shape, device)
    program.train_step(given[0])
    devices.reset_peak(torch.device(device))
    program.train_step(given[1])
    return devices.peak_bytes(torch.device(device)) or 0
