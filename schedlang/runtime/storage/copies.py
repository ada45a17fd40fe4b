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
        return into_host(empty(source.shape, source.dtype, beside=source.device), source)


def into_host(host: Tensor, source: Tensor) -> Tensor:
    """The host's memory, into which a copy begins at once, and ends later as of `to_host`."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
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


def into_device(value: Tensor, host: Tensor) -> None:
    """Write into memory of the device; what comes next on its current stream runs behind."""
    made, event = to_device(host, value.device)
    with torch._C.DisableTorchFunction(), torch.no_grad():
        value.copy_(ready(made, event))


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
    if device not in _streams:
        _streams[device] = new_stream(device)
    return _streams[device]
