"""Gradients that move off the device as they are made, and wait for the optimizer step elsewhere.

Autograd adds a gradient to a parameter; a hook moves it at once to the gradients of earlier
microbatches (Ren et al., ZeRO-Offload, 2021). The rest of the runtime reads gradients by
`gradient_of` and the other functions here, because a tensor on another device than its parameter
cannot be its `.grad`. On an accelerator the copy runs on when the hook returns; the host waits when
a gradient is read, or when so many later copies were started that it must have ended.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from schedlang.runtime.device import has_streams, host_wait
from schedlang.runtime.storage import copies
from schedlang.runtime.storage.quantized_parameters import quantized_of
from schedlang.runtime.storage.tiers import CPU, ScratchFiles, set_tier

F = TypeVar("F", bound=Callable[..., Any])
_IN_BACKWARD = "_schedlang_in_backward"  # of a hook
_SLOT, OFFLOADED = "_schedlang_gradient", "_schedlang_gradient_leaves"
# limits of pending copies in host memory: bytes, and batches of gradients
_MAX_BYTES, _MAX_BATCHES = 25 * 2**20, 4


@dataclass
class _CopyBatch:
    """Gradients that are copied to the host behind one event, on the stream of a `source`."""

    event: object
    source: object
    gradients: list[weakref.ref[_Offloaded]] = field(default_factory=list)
    bytes: int = 0


class _PendingCopies:
    """Gradients that are in host memory but not added yet; a copied parameter has none."""

    def __init__(self) -> None:
        self._queue: deque[_CopyBatch] = deque()
        self._bytes = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return _PendingCopies, ()

    def put(self, offloaded: _Offloaded, event: object, source: object, size: int) -> None:
        """Add a pending copy; above the limit, add up the older half after one wait of the host."""
        if not self._queue or self._queue[-1].event is not event:
            self._queue.append(_CopyBatch(event, source))
        self._queue[-1].gradients.append(weakref.ref(offloaded))
        self._queue[-1].bytes += size
        self._bytes += size
        if self._bytes > _MAX_BYTES and len(self._queue) > _MAX_BATCHES:
            self._add_older()

    def _add_older(self) -> None:
        older: list[tuple[_Offloaded, _CopyBatch]] = []
        while self._bytes > _MAX_BYTES // 2 and len(self._queue) > _MAX_BATCHES:
            copied = self._queue.popleft()
            self._bytes -= copied.bytes
            alive = [item for reference in copied.gradients if (item := reference()) is not None]
            older += [(item, copied) for item in alive if item.awaits(copied.event)]
        # the last event of a source implies the earlier ones
        last: dict[object, Any] = {copied.source: copied.event for _, copied in older}
        for event in last.values():
            host_wait(event)
        for item, copied in older:
            item.add_until(copied.event)


class _Offloaded:
    """A gradient off the device: the sum of those that were added, and pending ones.

    `external`: pending ones are copied on a stream of other code, not on that of our copies.
    """

    def __init__(
        self, host: Tensor, event: torch.Event | None = None, *, external: bool = False
    ) -> None:
        self._host, self._event, self.external = host, event, external
        self._pending: list[tuple[Tensor, torch.Event | None]] = []

    def add_pending(self, host: Tensor, event: torch.Event | None) -> None:
        """Add a pending copy."""
        self._pending.append((host, event))

    def awaits(self, event: object) -> bool:
        """Return whether a copy behind this event is still pending."""
        return any(pending_event is event for _, pending_event in self._pending)

    def add_until(self, event: object) -> None:
        """Add all copies up to an event for which the host has waited."""
        self._event = None  # earlier on the same stream
        while self.awaits(event):
            host, _ = self._pending.pop(0)
            with torch._C.DisableTorchFunction():
                self._host.add_(host)

    def mark_arrived(self) -> None:
        """Note that the host has waited for all copies."""
        self._event, self._pending = None, [(host, None) for host, _ in self._pending]

    def total(self) -> Tensor:
        """Wait for pending copies; return the sum."""
        host_wait(self._event)
        self._event, pending, self._pending = None, self._pending, []
        for host, event in pending:
            host_wait(event)
            with torch._C.DisableTorchFunction():
                self._host.add_(host)
        return self._host


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Return the gradient of a parameter, on the device or off it."""
    offloaded: _Offloaded | None = vars(parameter).get(_SLOT)
    return parameter.grad if offloaded is None else offloaded.total()


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor | None]:
    """Return the gradients of parameters; those on the device without a call of Python."""
    return [p.grad if _SLOT not in p.__dict__ else gradient_of(p) for p in parameters]


def offloads_gradient(parameter: Tensor) -> bool:
    """Return whether the gradients of a parameter are offloaded."""
    return OFFLOADED in vars(parameter)


def set_gradient(parameter: Tensor, value: Tensor) -> None:
    """Set the gradient of a parameter, off the device if its gradients are offloaded."""
    if offloads_gradient(parameter):
        setattr(parameter, _SLOT, _Offloaded(value))
    else:
        parameter.grad = value


def drop_gradient(parameter: Tensor) -> None:
    """Remove the gradient of a parameter."""
    vars(parameter).pop(_SLOT, None)
    parameter.grad = None


def drop_gradients(parameters: Iterable[Tensor]) -> None:
    """Remove the gradients of parameters."""
    for parameter in parameters:
        parameter.__dict__.pop(_SLOT, None)
        parameter.grad = None


def offload_gradients(
    parameters: Iterable[nn.Parameter],
    scratch: ScratchFiles | None = None,
    notified: Collection[nn.Parameter] = (),
) -> None:
    """Offload gradients of these parameters as they are made, with `scratch` to disk.

    Other code makes the gradients of `notified` off the device, and calls `accumulate_offloaded`.
    """
    pending, tells = _PendingCopies(), set(notified)
    for parameter in parameters:
        if parameter.requires_grad and not parameter.is_meta:
            vars(parameter)[OFFLOADED] = pending
            if parameter in tells:
                continue
            hook = in_backward(partial(_offload, scratch))
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def gradient_device(parameter: Tensor) -> torch.device:
    """Return the device of a parameter's gradient at the end of a step, also if it has none now."""
    return torch.device("cpu") if offloads_gradient(parameter) else local_tensor(parameter).device


def wait_for_offloaded(parameters: Iterable[Tensor]) -> None:
    """Wait once for the pending gradients of these parameters, if there are any."""
    gradients = [
        offloaded
        for parameter in parameters
        if (offloaded := vars(parameter).get(_SLOT)) is not None
    ]
    # external ones wait when read
    gradients = [offloaded for offloaded in gradients if not offloaded.external]
    if gradients:
        copies.wait_all()
    for offloaded in gradients:
        offloaded.mark_arrived()


def accumulate_offloaded(parameter: Tensor, event: torch.Event | None) -> None:
    """Take a gradient that was made in host memory; with `event` it is complete behind that."""
    grad: Tensor | None = parameter.grad
    if grad is None:
        return
    offloaded: _Offloaded | None = vars(parameter).get(_SLOT)
    parameter.grad = None
    with torch._C.DisableTorchFunction():
        part = local_tensor(grad)
        if event is not None:
            _add(parameter, set_tier(part, CPU), event)
        elif offloaded is None:
            setattr(parameter, _SLOT, _Offloaded(copies.to_host(part)))
        else:
            offloaded.total().add_(part)


def in_backward(hook: F) -> F:
    """Mark a hook on gradients that runs in each backward of a step; a user's waits for its end."""
    setattr(hook, _IN_BACKWARD, True)
    return hook


def runs_in_backward(hook: object) -> bool:
    """Return whether `in_backward` has marked a hook."""
    return getattr(hook, _IN_BACKWARD, False)


def run_hooks(parameter: Tensor) -> None:
    """Run the hooks of a parameter, after a gradient was added by hand."""
    for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(parameter)


def restore_gradient(parameter: nn.Parameter) -> None:
    """Move an offloaded gradient to `.grad`, on the device of the parameter."""
    offloaded = vars(parameter).pop(_SLOT, None)
    if offloaded is None:
        return
    parameter.grad = as_dtensor_like(
        offloaded.total().to(local_tensor(parameter).device), parameter
    )


def local_tensor(value: Tensor) -> Tensor:
    """Return the local shard of a tensor as a plain tensor; the values, if it is in codes."""
    quantized = quantized_of(value)
    if quantized is not None:
        return quantized.value()
    part: Tensor = value.to_local() if hasattr(value, "to_local") else value.detach()
    return part


def as_dtensor_like(part: Tensor, parameter: Tensor) -> Tensor:
    """Return a local shard as a DTensor like the parameter; itself if the parameter is plain."""
    if not isinstance(parameter, DTensor):
        return part
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _offload(scratch: ScratchFiles | None, parameter: Tensor) -> None:
    grad: Tensor | None = parameter.grad
    offloaded: _Offloaded | None = vars(parameter).get(_SLOT)
    if grad is None:
        return
    parameter.grad = None
    with torch._C.DisableTorchFunction():
        part = local_tensor(grad)
        if scratch is not None:
            part = part if offloaded is None else offloaded.total() + part.cpu()
            setattr(parameter, _SLOT, _Offloaded(copies.to_host(part, scratch)))
        elif offloaded is not None and not has_streams(part.device):
            offloaded.total().add_(part)
        else:
            _add(parameter, copies.to_host(part), copies.record_copies(part.device), part.device)


def _add(
    parameter: Tensor, host: Tensor, event: torch.Event | None, source: torch.device | None = None
) -> None:
    """Add a pending gradient, which is being copied to the host, to that of earlier microbatches.

    `source`: the device from which our copies bring it; None: other code copies it.
    """
    offloaded: _Offloaded | None = vars(parameter).get(_SLOT)
    if offloaded is None:
        setattr(parameter, _SLOT, _Offloaded(host, event, external=source is None))
        return
    offloaded.add_pending(host, event)
    in_flight: _PendingCopies = vars(parameter)[OFFLOADED]
    in_flight.put(offloaded, event, event if source is None else source, host.nbytes)
