"""Weights of parts of a batch: plain numbers, or scalar tensors on the device of the labels.

Labels on an accelerator are counted there, and what depends on the count is computed there too, so
that the host never waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from schedlang.runtime.device import has_float64, on_accelerator, plain_numbers, send_to_device

Number = float | Tensor  # a tensor: 0-dim, on an accelerator


def as_numbers(values: Sequence[Number], target: torch.device | None = None) -> list[Number]:
    """Return weights in one form: tensors on a device if any of them is on an accelerator, else
    plain.

    there  the device to use instead of theirs
    """
    devices = dict.fromkeys([tensor.device for tensor in values if isinstance(tensor, Tensor)])
    device = next((candidate for candidate in devices if on_accelerator(candidate)), None)
    if device is None:
        return list(plain_numbers(values))
    device = target or device
    dtype = torch.float64 if has_float64(device) else torch.float32

    def put(value: Number) -> Tensor:
        if not isinstance(value, Tensor):
            return torch.full((), value, dtype=dtype, device=device)
        value = value.detach().reshape(()).to(dtype)
        return value.to(device) if on_accelerator(value) else send_to_device(value, device)

    return list(torch.stack([put(value) for value in values]).unbind())


def are_on_host(values: Sequence[Number]) -> bool:
    """Return whether all of these numbers are plain, so known to the host."""
    return not any(isinstance(value, Tensor) for value in values)


def sum_numbers(values: Sequence[Number]) -> Number:
    """Return the sum of the tensors, if there are any, else of the plain numbers."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return torch.stack(tensors).sum() if tensors else float(sum(values))


def stack_numbers(values: Sequence[Number]) -> Tensor:
    """Stack numbers into one tensor: in float64, on the device of the first tensor among them."""
    like = next((value for value in values if isinstance(value, Tensor)), None)
    if like is None:
        return torch.tensor(values, dtype=torch.float64)
    return torch.stack([filled_like(like, value) for value in values])


def if_positive(value: Number, fallback: float, tested: Number | None = None) -> Number:
    """Return `value`, or `fallback` where `tested` (by default `value`) is not above zero."""
    tested = value if tested is None else tested
    if isinstance(tested, Tensor):
        return torch.where(tested > 0, value, fallback)
    return value if tested > 0 else fallback


def nonzero_weight(total: Number) -> Number:
    """Return a weight to divide by: 1 for a weight of zero."""
    return if_positive(total, 1.0)


def filled_like(like: Tensor, value: Number) -> Tensor:
    """Return a tensor like another one, filled with a number: used as the gradient of a loss."""
    if isinstance(value, Tensor):
        return value.to(like).expand_as(like)
    return torch.full_like(like, value)
