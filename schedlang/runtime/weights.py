"""Weights of parts of a batch: plain numbers, or numbers on the device where the labels lie.

Labels that lie on an accelerator are counted there, and what follows from their number is computed
there, too: the host, which has work to hand out, never waits to know it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from schedlang.runtime.device import has_float64, numbers, on_accelerator, sent

Number = float | Tensor  # a tensor: of no dims, on an accelerator


def counted(values: Sequence[Number], there: torch.device | None = None) -> list[Number]:
    """Numbers as they may be computed with: on a device if any of them lies on one, else plain; on
    `there`, where that is told, also if they lie on another."""
    homes = dict.fromkeys([one.device for one in values if isinstance(one, Tensor)])
    device = next((home for home in homes if on_accelerator(home)), None)
    if device is None:
        return list(numbers(values))
    device = there or device
    kind = torch.float64 if has_float64(device) else torch.float32

    def put(value: Number) -> Tensor:
        if not isinstance(value, Tensor):
            return torch.full((), value, dtype=kind, device=device)
        value = value.detach().reshape(()).to(kind)
        return value.to(device) if on_accelerator(value) else sent(value, device)

    return list(torch.stack([put(value) for value in values]).unbind())


def known(values: Sequence[Number]) -> bool:
    """Return whether the host knows all of these numbers."""
    return not any(isinstance(value, Tensor) for value in values)


def added(values: Sequence[Number]) -> Number:
    """The sum of some numbers."""
    there = [value for value in values if isinstance(value, Tensor)]
    return torch.stack(there).sum() if there else float(sum(values))


def together(values: Sequence[Number]) -> Tensor:
    """One tensor of some numbers, in float64: where one of them lies, if any does."""
    there = next((one for one in values if isinstance(one, Tensor)), None)
    if there is None:
        return torch.tensor(values, dtype=torch.float64)
    return torch.stack([filled(there, one) for one in values])


def instead(value: Number, other: float, asked: Number | None = None) -> Number:
    """A number; another one where `asked` (by default the number itself) is not above zero."""
    asked = value if asked is None else asked
    if isinstance(asked, Tensor):
        return torch.where(asked > 0, value, other)
    return value if asked > 0 else other


def positive(total: Number) -> Number:
    """A weight to divide by: of what weighs nothing, 1."""
    return instead(total, 1.0)


def filled(like: Tensor, value: Number) -> Tensor:
    """A tensor of one number, shaped like another one: the gradient that a loss is given."""
    if isinstance(value, Tensor):
        return value.to(like).expand_as(like)
    return torch.full_like(like, value)
