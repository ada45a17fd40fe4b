"""Copies between device and host: on an accelerator pinned, asynchronous, on their own streams.

Each direction has one stream, so that copies to the device do not wait behind copies to the host.
On a CPU they are synchronous copies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from schedlang.runtime.device import (
    current_stream,
    follow,
    has_streams,
    indexed,
    new_stream,
    on_stream,
    record,
    synchronize,
    used_on,
    wait,
)
from schedlang.runtime.storage.tiers import Scratch, empty


def to_host(
    source: Tensor, scratch: Scratch | None = None, behind: torch.Event | None = None
) -> Tensor:
    """Start a contiguous copy to host memory, or with `scratch` to a file, and return it.

    From an accelerator the copy ends later: a reader on the host must call `settle` first, or wait
    for a `mark`; `to_device` waits by itself. The copy waits for the current stream so far, or only
    for the event `behind`, if `source` was complete before.
    """
    with torch._C.DisableTorchFunction():
        source = source.detach()
        if source.is_meta:  # a dry run counts it only
            return torch.empty_like(source)
        if scratch is not None:
            return scratch.put(source)
        host = empty(source.shape, source.dtype, beside=source.device)
        if not has_streams(source.device):
            return host.copy_(source)
        stream = side_stream(source.device)
        wait(behind or record(current_stream(source.device)), stream)
        with on_stream(stream):
            host.copy_(source, non_blocking=True)
        used_on(source, stream)  # its memory is not reused before the copy is done
        _copy_events[host] = record(stream)
        return host


def to_device(host: Tensor, device: torch.device) -> tuple[Tensor, torch.Event | None]:
    """Start a copy to a device; return it, and the event to wait for (by `ready`) before use."""
    with torch._C.DisableTorchFunction():
        if not has_streams(device):
            return torch.empty(host.shape, dtype=host.dtype, device=device).copy_(host), None
        stream = side_stream(device, back=True)
        wait(_copy_events.get(host), stream)  # the copy to the host ends before
        with on_stream(stream):
            made = torch.empty(host.shape, dtype=host.dtype, device=device)
            made.copy_(host, non_blocking=True)
        return made, record(stream)


def onto(value: Tensor, source: Tensor) -> None:
    """Write into memory of the device; later work on its current stream runs after the write."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        if value.device == source.device or not has_streams(value.device):
            value.copy_(source)
            return
        stream, current = side_stream(value.device, back=True), current_stream(value.device)
        follow(stream, current)  # readers of the old values
        with on_stream(stream):
            value.copy_(source, non_blocking=True)
        wait(record(stream), current)
        used_on(value, stream)


def ready(tensor: Tensor, event: torch.Event | None) -> Tensor:
    """Let the current stream wait for a copy; return the copy."""
    if event is not None:
        stream = current_stream(tensor.device)
        wait(event, stream)
        used_on(tensor, stream)
    return tensor


def settle() -> None:
    """Wait until all copies to the host are done, and copies to a device have read the host."""
    for (place, back), stream in _streams.items():
        if not back:
            follow(stream, _streams.get((place, True)))
            synchronize(stream)


def mark(device: torch.device) -> torch.Event | None:
    """Return an event behind all copies of a device to the host so far; None: they are done."""
    return record(side_stream(device)) if has_streams(device) else None


_copy_events: Any = (
    WeakTensorKeyDictionary()
)  # tensor in host memory -> event behind the copy into it
_streams: dict[tuple[torch.device, bool], torch.Stream | None] = {}


def side_stream(device: torch.device, back: bool = False) -> torch.Stream | None:
    """Return the stream for copies of a device to the host, or `back` to the device."""
    place = indexed(device)  # one stream for all names of the device
    if (place, back) not in _streams:
        _streams[place, back] = new_stream(place)
    return _streams[place, back]
