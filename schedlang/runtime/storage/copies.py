"""Copies between the device and the host: on a GPU pinned, on a stream of their own, and later.

On a CPU they are copies all the same, and done at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from schedlang.runtime.storage.scratch import Scratch
from schedlang.runtime.storage.tiers import empty


def to_host(source: Tensor, scratch: Scratch | None = None) -> Tensor:
    """A contiguous copy in host memory, or with `scratch` in a file; it begins at once.

    From a GPU into memory it ends later: what reads it on the host calls `settle` first, and
    `to_device` comes after it by itself.
    """
    with torch._C.DisableTorchFunction():
        source = source.detach()
        if source.is_meta:  # counted, and not there
            return torch.empty_like(source)
        if scratch is not None:
            return scratch.put(source)
        host = empty(source.shape, source.dtype, pinned=source.is_cuda)
        if not source.is_cuda:
            return host.copy_(source)
        stream = side_stream(source.device)
        stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(stream):
            host.copy_(source, non_blocking=True)
        source.record_stream(stream)  # its memory is not reused before the copy is done
        return host


def to_device(host: Tensor, device: torch.device) -> tuple[Tensor, torch.cuda.Event | None]:
    """A copy on a device, and what to wait for (by `ready`) before it is used."""
    with torch._C.DisableTorchFunction():
        if device.type != "cuda":
            return torch.empty(host.shape, dtype=host.dtype, device=device).copy_(host), None
        stream = side_stream(device)  # it runs in order: this comes after the copy out
        with torch.cuda.stream(stream):
            made = torch.empty(host.shape, dtype=host.dtype, device=device)
            made.copy_(host, non_blocking=True)
            return made, stream.record_event()


def ready(tensor: Tensor, event: torch.cuda.Event | None) -> Tensor:
    """A copy that the current stream may use."""
    if event is not None:
        stream = torch.cuda.current_stream(tensor.device)
        stream.wait_event(event)
        tensor.record_stream(stream)
    return tensor


def settle() -> None:
    """Wait until all copies to the host are there."""
    for stream in _streams.values():
        stream.synchronize()


def mark(device: torch.device) -> torch.cuda.Event | None:
    """What to wait for until all copies of a device so far are done; None: they are."""
    if device.type != "cuda":
        return None
    event: torch.cuda.Event = side_stream(device).record_event()
    return event


_streams: dict[torch.device, torch.cuda.Stream] = {}


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which copies of a device run."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device]
