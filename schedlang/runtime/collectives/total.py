"""A sum over ranks whose gradients are summed as well: every rank's loss depends on the total."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from schedlang.runtime.collectives.collective import Group, all_reduce


class Total(torch.autograd.Function):
    """The sum over ranks, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        """What all ranks have, added up."""
        ctx.group = group
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Each rank used the total for its own rows or positions."""
        return all_reduce(grads[0], ctx.group), None


def summed(x: Tensor, group: Group) -> Tensor:
    """The sum of `x` over the ranks of a group, whose gradients are summed too."""
    return cast(Tensor, Total.apply(x, group))  # type: ignore[no-untyped-call]
