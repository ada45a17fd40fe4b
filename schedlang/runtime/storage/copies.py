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
    has_streams,
    hold_for_stream,
    mark_stream,
    new_stream,
    on_stream,
    queue_event_wait,
    queue_stream_wait,
    synchronize,
    with_index,
)
from schedlang.runtime.storage.tiers import ScratchFiles, empty_on_host


def to_host(
    source: Tensor, scratch: ScratchFiles | None = None, behind: torch.Event | None = None
) -> Tensor:
    """Start a contiguous copy to host memory, or with `scratch` to a file, and return it.

    From an accelerator the copy ends later: a reader on the host must call `wait_all` first, or
    wait for a `record_copies`; `to_device` waits by itself. The copy waits for the current stream
    so far, or only for the event `behind`, if `source` was complete before.
    """
    with torch._C.DisableTorchFunction():
        source = source.detach()
        if source.is_meta:  # a dry run counts it only
            return torch.empty_like(source)
        if scratch is not None:
            return scratch.store(source)
        host = empty_on_host(source.shape, source.dtype, beside=source.device)
        if not has_streams(source.device):
            return host.copy_(source)
        stream = side_stream(source.device)
        queue_event_wait(behind or mark_stream(current_stream(source.device)), stream)
        with on_stream(stream):
            host.copy_(source, non_blocking=True)
        hold_for_stream(source, stream)  # its memory is not reused before the copy is done
        _copy_events[host] = mark_stream(stream)
        return host


def to_device(host: Tensor, device: torch.device) -> tuple[Tensor, torch.Event | None]:
    """Start a copy to a device; return it, and the event to wait for (by `wait_copy`) before
    use."""
    with torch._C.DisableTorchFunction():
        if not has_streams(device):
            return torch.empty(host.shape, dtype=host.dtype, device=device).copy_(host), None
        stream = side_stream(device, back=True)
        queue_event_wait(_copy_events.get(host), stream)  # the copy to the host ends before
        with on_stream(stream):
            copied = torch.empty(host.shape, dtype=host.dtype, device=device)
            copied.copy_(host, non_blocking=True)
        return copied, mark_stream(stream)


def copy_into(value: Tensor, source: Tensor) -> None:
    """Write into memory of the device; later work on its current stream runs after the write."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        if value.device == source.device or not has_streams(value.device):
            value.copy_(source)
            return
        stream, current = side_stream(value.device, back=True), current_stream(value.device)
        queue_stream_wait(stream, current)  # readers of the old values
        with on_stream(stream):
            value.copy_(source, non_blocking=True)
        queue_event_wait(mark_stream(stream), current)
        hold_for_stream(value, stream)


def wait_copy(tensor: Tensor, event: torch.Event | None) -> Tensor:
    """Let the current stream wait for a copy; return the copy."""
    if event is not None:
        stream = current_stream(tensor.device)
        queue_event_wait(event, stream)
        hold_for_stream(tensor, stream)
    return tensor


def wait_all() -> None:
    """Wait until all copies to the host are done, and copies to a device have read the host."""
    for (device, back), stream in _streams.items():
        if not back:
            queue_stream_wait(stream, _streams.get((device, True)))
            synchronize(stream)


def record_copies(device: torch.device) -> torch.Event | None:
    """Return an event behind all copies of a device to the host so far; None: they are done."""
    return mark_stream(side_stream(device)) if has_streams(device) else None


# tensor in host memory -> event behind the copy into it
_copy_events: Any = WeakTensorKeyDictionary()
_streams: dict[tuple[torch.device, bool], torch.Stream | None] = {}


def side_stream(device: torch.device, back: bool = False) -> torch.Stream | None:
    """Return the stream for copies of a device to the host, or `back` to the device."""
    indexed = with_index(device)  # one stream for all names of the device
    if (indexed, back) not in _streams:
        _streams[indexed, back] = new_stream(indexed)
    return _streams[indexed, back]
