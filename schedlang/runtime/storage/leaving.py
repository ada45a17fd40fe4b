"""Gradients that leave the device as they are made, and wait for the step elsewhere.

Autograd adds a gradient to a parameter, and it is moved at once to where the gradients of earlier
microbatches wait (Ren et al., ZeRO-Offload, 2021).  `gradient_of` and its kin are how the rest of
the runtime asks: a tensor on another device than its parameter cannot be its `.grad`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from schedlang.runtime.storage import copies
from schedlang.runtime.storage.scratch import Scratch

_SLOT, _AWAY = "_schedlang_gradient", "_schedlang_gradient_leaves"


def gradient_of(parameter: Tensor) -> Tensor | None:
    """The gradient of a parameter, wherever it lies."""
    away: Tensor | None = vars(parameter).get(_SLOT)
    return parameter.grad if away is None else away


def leaves(parameter: Tensor) -> bool:
    """Whether the gradients of a parameter leave."""
    return _AWAY in vars(parameter)


def set_gradient(parameter: Tensor, value: Tensor) -> None:
    """Give a parameter a gradient, away if its gradients leave."""
    if leaves(parameter):
        setattr(parameter, _SLOT, value)
    else:
        parameter.grad = value


def drop_gradient(parameter: Tensor) -> None:
    """Let there be none."""
    vars(parameter).pop(_SLOT, None)
    parameter.grad = None


def let_leave(parameters: Iterable[nn.Parameter], scratch: Scratch | None = None) -> None:
    """From now on gradients of these leave as they are made, with `scratch` to disk."""
    for parameter in parameters:
        if parameter.requires_grad and not parameter.is_meta:
            vars(parameter)[_AWAY] = True
            hook = partial(_leave, scratch)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def gradient_device(parameter: Tensor) -> torch.device:
    """Where the gradient of a parameter lies at the end of a step, also if it has none now."""
    return torch.device("cpu") if leaves(parameter) else local(parameter).device


def accumulated(parameter: Tensor) -> None:
    """Tell the hooks of a parameter that a gradient was added by hand."""
    for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(parameter)


def give_back(parameter: nn.Parameter) -> None:
    """The gradient becomes the parameter's own, where the parameter lies."""
    away = vars(parameter).pop(_SLOT, None)
    if away is None:
        return
    part = away.to(local(parameter).device)
    if isinstance(parameter, DTensor):
        part = DTensor.from_local(
            part, parameter.device_mesh, parameter.placements, run_check=False,
            shape=parameter.shape, stride=parameter.stride(),
        )  # fmt: skip
    parameter.grad = part


def local(value: Tensor) -> Tensor:
    """A tensor's part on this rank, as a plain tensor."""
    part: Tensor = value.to_local() if hasattr(value, "to_local") else value.detach()
    return part


def _leave(scratch: Scratch | None, parameter: Tensor) -> None:
    made, away = parameter.grad, vars(parameter).get(_SLOT)
    if made is None:
        return
    parameter.grad = None
    with torch._C.DisableTorchFunction():
        if away is not None:
            copies.settle()
            made = local(made).to(away.device) if scratch is None else away + local(made).cpu()
        if away is not None and scratch is None:
            away.add_(made)
        else:
            setattr(parameter, _SLOT, copies.to_host(local(made), scratch))
