"""Copies between device and host: on an accelerator pinned, later, and on streams of their own.

There is one stream for each way, so that what comes does not stand behind what goes. On a CPU they
are copies all the same, and done at once.
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
    """A contiguous copy in host memory, or with `scratch` in a file; it begins at once.

    From an accelerator into memory it ends later: what reads it on the host calls `settle` first,
    or waits for a `mark`, and `to_device` comes after it by itself.  It waits for what the current
    stream does so far, or, where `source` was there before, for an event alone.
    """
    with torch._C.DisableTorchFunction():
        source = source.detach()
        if source.is_meta:  # counted, and not there
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
        _left[host] = record(stream)
        return host


def to_device(host: Tensor, device: torch.device) -> tuple[Tensor, torch.Event | None]:
    """A copy on a device, and what to wait for (by `ready`) before it is used."""
    with torch._C.DisableTorchFunction():
        if not has_streams(device):
            return torch.empty(host.shape, dtype=host.dtype, device=device).copy_(host), None
        stream = side_stream(device, back=True)
        wait(_left.get(host), stream)  # what left it is there before it comes back
        with on_stream(stream):
            made = torch.empty(host.shape, dtype=host.dtype, device=device)
            made.copy_(host, non_blocking=True)
        return made, record(stream)


def onto(value: Tensor, source: Tensor) -> None:
    """Write into memory of the device; what comes next on its current stream runs behind."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        if value.device == source.device or not has_streams(value.device):
            value.copy_(source)
            return
        stream, current = side_stream(value.device, back=True), current_stream(value.device)
        follow(stream, current)  # whoever reads what it was
        with on_stream(stream):
            value.copy_(source, non_blocking=True)
        wait(record(stream), current)
        used_on(value, stream)


def ready(tensor: Tensor, event: torch.Event | None) -> Tensor:
    """A copy that the current stream may use."""
    if event is not None:
        stream = current_stream(tensor.device)
        wait(event, stream)
        used_on(tensor, stream)
    return tensor


def settle() -> None:
    """Wait until all copies to the host are there, and those to a device have read the host."""
    for (place, back), stream in _streams.items():
        if not back:
            follow(stream, _streams.get((place, True)))
            synchronize(stream)


def mark(device: torch.device) -> torch.Event | None:
    """An event behind all copies of a device to the host so far; None: they are done."""
    return record(side_stream(device)) if has_streams(device) else None


_left: Any = WeakTensorKeyDictionary()  # by tensor in host memory: behind the copy into it
_streams: dict[tuple[torch.device, bool], torch.Stream | None] = {}


def side_stream(device: torch.device, back: bool = False) -> torch.Stream | None:
    """The stream on which copies of a device to the host run, or those back."""
    place = indexed(device)  # one stream, whichever way the current device is told
    if (place, back) not in _streams:
        _streams[place, back] = new_stream(place)
    return _streams[place, back]
