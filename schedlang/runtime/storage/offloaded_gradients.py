"""Gradients that leave the device as they are made, and wait for the step elsewhere.

Autograd adds a gradient to a parameter, and it is moved at once to where the gradients of earlier
microbatches wait (Ren et al., ZeRO-Offload, 2021).  `gradient_of` and its kin are how the rest of
the runtime asks: a tensor on another device than its parameter cannot be its `.grad`.  On an
accelerator the copy is under way when the hook returns; the host waits for it when somebody asks,
or when so many others have left behind it that it has long been there.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from schedlang.runtime.device import has_streams, settled
from schedlang.runtime.storage import copies
from schedlang.runtime.storage.coded import coded_of
from schedlang.runtime.storage.tiers import CPU, Scratch, mark

_SLOT, OFFLOADED = "_schedlang_gradient", "_schedlang_gradient_leaves"
# what lies twice in host memory, yet to be added: so many bytes, or gradients (units of them)
_MOST, _FEW = 25 * 2**20, 4


@dataclass
class _Copied:
    """Gradients that come to the host behind one event, on the stream of a `source`."""

    event: object
    source: object
    gradients: list[weakref.ref[_Offloaded]] = field(default_factory=list)
    bytes: int = 0


class _InFlight:
    """Gradients that lie twice in host memory; of a parameter that is copied, none do."""

    def __init__(self) -> None:
        self._queue: deque[_Copied] = deque()
        self._bytes = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return _InFlight, ()

    def put(self, away: _Offloaded, event: object, source: object, size: int) -> None:
        """One more; where there are many, the older half is added: the host waits for it once."""
        if not self._queue or self._queue[-1].event is not event:
            self._queue.append(_Copied(event, source))
        self._queue[-1].gradients.append(weakref.ref(away))
        self._queue[-1].bytes += size
        self._bytes += size
        if self._bytes > _MOST and len(self._queue) > _FEW:
            self._add_older()

    def _add_older(self) -> None:
        found: list[tuple[_Offloaded, _Copied]] = []
        while self._bytes > _MOST // 2 and len(self._queue) > _FEW:
            copied = self._queue.popleft()
            self._bytes -= copied.bytes
            alive = [one for reference in copied.gradients if (one := reference()) is not None]
            found += [(one, copied) for one in alive if one.waits_for(copied.event)]
        # of one source the last event stands for those before it
        last: dict[object, Any] = {copied.source: copied.event for _, copied in found}
        for event in last.values():
            settled(event)
        for one, copied in found:
            one.add_until(copied.event)


class _Offloaded:
    """A gradient off the device: the sum of those that were added, and those on their way.

    `apart`: they come on a stream of somebody else, not on that of our copies.
    """

    def __init__(
        self, host: Tensor, event: torch.Event | None = None, *, apart: bool = False
    ) -> None:
        self._host, self._event, self.apart = host, event, apart
        self._more: list[tuple[Tensor, torch.Event | None]] = []

    def come(self, host: Tensor, event: torch.Event | None) -> None:
        """Another one is on its way."""
        self._more.append((host, event))

    def waits_for(self, event: object) -> bool:
        """Return whether what comes behind an event is yet to be added."""
        return any(one is event for _, one in self._more)

    def add_until(self, event: object) -> None:
        """Add what comes behind an event for which the host has waited, and all before it."""
        self._event = None  # of the same stream, and before
        while self.waits_for(event):
            host, _ = self._more.pop(0)
            with torch._C.DisableTorchFunction():
                self._host.add_(host)

    def arrived(self) -> None:
        """The host has waited for all copies."""
        self._event, self._more = None, [(host, None) for host, _ in self._more]

    def whole(self) -> Tensor:
        """The sum of all that have left; waits for those that are on their way."""
        settled(self._event)
        self._event, more, self._more = None, self._more, []
        for host, event in more:
            settled(event)
            with torch._C.DisableTorchFunction():
                self._host.add_(host)
        return self._host


def gradient_of(parameter: Tensor) -> Tensor | None:
    """The gradient of a parameter, wherever it lies."""
    away: _Offloaded | None = vars(parameter).get(_SLOT)
    return parameter.grad if away is None else away.whole()


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor | None]:
    """Theirs; what is on the device is asked without a call of Python."""
    return [p.grad if _SLOT not in p.__dict__ else gradient_of(p) for p in parameters]


def offloads_gradient(parameter: Tensor) -> bool:
    """Return whether the gradients of a parameter leave."""
    return OFFLOADED in vars(parameter)


def set_gradient(parameter: Tensor, value: Tensor) -> None:
    """Give a parameter a gradient, away if its gradients leave."""
    if offloads_gradient(parameter):
        setattr(parameter, _SLOT, _Offloaded(value))
    else:
        parameter.grad = value


def drop_gradient(parameter: Tensor) -> None:
    """Let there be none."""
    vars(parameter).pop(_SLOT, None)
    parameter.grad = None


def drop_gradients(parameters: Iterable[Tensor]) -> None:
    """Let there be none of any."""
    for parameter in parameters:
        parameter.__dict__.pop(_SLOT, None)
        parameter.grad = None


def offload_gradients(
    parameters: Iterable[nn.Parameter],
    scratch: Scratch | None = None,
    told: Collection[nn.Parameter] = (),
) -> None:
    """Let gradients of these parameters leave as they are made, with `scratch` to disk.

    Those of `told` are made off the device by others, who tell it by `accumulate_offloaded`.
    """
    under_way, tells = _InFlight(), set(told)
    for parameter in parameters:
        if parameter.requires_grad and not parameter.is_meta:
            vars(parameter)[OFFLOADED] = under_way
            if parameter in tells:
                continue
            hook = partial(_offload, scratch)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def gradient_device(parameter: Tensor) -> torch.device:
    """The device of a parameter's gradient at the end of a step, also if it has none now."""
    return torch.device("cpu") if offloads_gradient(parameter) else local(parameter).device


def wait_for_offloaded(parameters: Iterable[Tensor]) -> None:
    """Wait once for the gradients of these that are on their way, if any are."""
    found = [away for parameter in parameters if (away := vars(parameter).get(_SLOT)) is not None]
    found = [away for away in found if not away.apart]  # waited for when they are read
    if found:
        copies.settle()
    for away in found:
        away.arrived()


def accumulate_offloaded(parameter: Tensor, event: torch.Event | None) -> None:
    """A gradient of a parameter was made in host memory; with `event` it is there behind that."""
    made: Tensor | None = parameter.grad
    if made is None:
        return
    away: _Offloaded | None = vars(parameter).get(_SLOT)
    parameter.grad = None
    with torch._C.DisableTorchFunction():
        part = local(made)
        if event is not None:
            _add(parameter, mark(part, CPU), event)
        elif away is None:
            setattr(parameter, _SLOT, _Offloaded(copies.to_host(part)))
        else:
            away.whole().add_(part)


def run_hooks(parameter: Tensor) -> None:
    """Tell the hooks of a parameter that a gradient was added by hand."""
    for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(parameter)


def restore_gradient(parameter: nn.Parameter) -> None:
    """The gradient becomes the parameter's own, where the parameter lies."""
    away = vars(parameter).pop(_SLOT, None)
    if away is None:
        return
    parameter.grad = placed_like(away.whole().to(local(parameter).device), parameter)


def local(value: Tensor) -> Tensor:
    """A tensor's part on this rank, as a plain tensor; of one that lies in codes its values."""
    held = coded_of(value)
    if held is not None:
        return held.value()
    part: Tensor = value.to_local() if hasattr(value, "to_local") else value.detach()
    return part


def placed_like(part: Tensor, parameter: Tensor) -> Tensor:
    """A local part with the mesh and placements of a parameter; itself if that is plain."""
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


def _offload(scratch: Scratch | None, parameter: Tensor) -> None:
    made: Tensor | None = parameter.grad
    away: _Offloaded | None = vars(parameter).get(_SLOT)
    if made is None:
        return
    parameter.grad = None
    with torch._C.DisableTorchFunction():
        part = local(made)
        if scratch is not None:
            part = part if away is None else away.whole() + part.cpu()
            setattr(parameter, _SLOT, _Offloaded(copies.to_host(part, scratch)))
        elif away is not None and not has_streams(part.device):
            away.whole().add_(part)
        else:
            _add(parameter, copies.to_host(part), copies.mark(part.device), part.device)


def _add(
    parameter: Tensor, host: Tensor, event: torch.Event | None, source: torch.device | None = None
) -> None:
    """A gradient is on its way to the host, where it is added to that of earlier microbatches.

    `source`: the device from which our copies bring it; None: somebody else does.
    """
    away: _Offloaded | None = vars(parameter).get(_SLOT)
    if away is None:
        setattr(parameter, _SLOT, _Offloaded(host, event, apart=source is None))
        return
    away.come(host, event)
    in_flight: _InFlight = vars(parameter)[OFFLOADED]
    in_flight.put(away, event, event if source is None else source, host.nbytes)
