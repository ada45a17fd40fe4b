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
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from schedlang.runtime.device import has_streams, settled
from schedlang.runtime.storage import copies
from schedlang.runtime.storage.tiers import CPU, Scratch, mark

_SLOT, OFFLOADED = "_schedlang_gradient", "_schedlang_gradient_leaves"
_MOST = 4  # gradients, or units of them, that lie twice in host memory: they are yet to be added


class _InFlight:
    """Gradients that lie twice in host memory; of a parameter that is copied, none do."""

    def __init__(self) -> None:
        self._queue: deque[tuple[object, list[weakref.ref[_Offloaded]]]] = deque()  # by their event

    def __reduce__(self) -> tuple[Any, ...]:
        return _InFlight, ()

    def put(self, away: _Offloaded, event: object) -> None:
        """One more; the oldest are added, for which the host waits."""
        if not self._queue or self._queue[-1][0] is not event:
            self._queue.append((event, []))
        self._queue[-1][1].append(weakref.ref(away))
        while len(self._queue) > _MOST:
            for reference in self._queue.popleft()[1]:
                oldest = reference()
                if oldest is not None:
                    oldest.whole()


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
    """Whether the gradients of a parameter leave."""
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
    """From now on gradients of these leave as they are made, with `scratch` to disk.

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
            _add(parameter, mark(part, CPU), event, apart=True)
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
    part = away.whole().to(local(parameter).device)
    if isinstance(parameter, DTensor):
        part = DTensor.from_local(
            part,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    parameter.grad = part


def local(value: Tensor) -> Tensor:
    """A tensor's part on this rank, as a plain tensor."""
    part: Tensor = value.to_local() if hasattr(value, "to_local") else value.detach()
    return part


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
            _add(parameter, copies.to_host(part), copies.mark(part.device))


def _add(parameter: Tensor, host: Tensor, event: torch.Event | None, apart: bool = False) -> None:
    """A gradient is on its way to the host, where it is added to that of earlier microbatches."""
    away: _Offloaded | None = vars(parameter).get(_SLOT)
    if away is None:
        setattr(parameter, _SLOT, _Offloaded(host, event, apart=apart))
        return
    away.come(host, event)
    under_way: _InFlight = vars(parameter)[OFFLOADED]
    under_way.put(away, event)
