"""Copies between device and host: on an accelerator pinned, on a stream of their own, and later.

On a CPU they are copies all the same, and done at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
from schedlang.runtime.storage.scratch import Scratch
from schedlang.runtime.storage.tiers import empty


def to_host(source: Tensor, scratch: Scratch | None = None) -> Tensor:
    """A contiguous copy in host memory, or with `scratch` in a file; it begins at once.

    From an accelerator into memory it ends later: what reads it on the host calls `settle` first,
    or waits for a `mark`, and `to_device` comes after it by itself.
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
        follow(stream, current_stream(source.device))
        with on_stream(stream):
            host.copy_(source, non_blocking=True)
        used_on(source, stream)  # its memory is not reused before the copy is done
        return host


def to_device(host: Tensor, device: torch.device) -> tuple[Tensor, torch.Event | None]:
    """A copy on a device, and what to wait for (by `ready`) before it is used."""
    with torch._C.DisableTorchFunction():
        if not has_streams(device):
            return torch.empty(host.shape, dtype=host.dtype, device=device).copy_(host), None
        stream = side_stream(device)  # it runs in order: this comes after the copy out
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
        stream, current = side_stream(value.device), current_stream(value.device)
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
    """Wait until all copies to the host are there."""
    for stream in _streams.values():
        synchronize(stream)


def mark(device: torch.device) -> torch.Event | None:
    """What to wait for until all copies of a device so far are done; None: they are."""
    return record(side_stream(device)) if has_streams(device) else None


_streams: dict[torch.device, torch.Stream | None] = {}


def side_stream(device: torch.device) -> torch.Stream | None:
    """The stream on which copies of a device run."""
    place = indexed(device)  # one stream, whichever way the current device is told
    if place not in _streams:
        _streams[place] = new_stream(place)
    return _streams[place]
