"""Differentiable collectives that move parts between ranks and add nothing up: all-to-all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from schedlang.runtime.collective import Group, count


def exchanged(
    x: Tensor, group: Group, give: Sequence[int] = (), take: Sequence[int] = ()
) -> Tensor:
    """Rows of `x` to the ranks of a group, in group order, and the rows that they give to this one.

    `give` and `take` count the rows for each rank; without them all get equal shares.  Without a
    process group (a dry run) only the shape is right.
    """
    rows = sum(take) if take else x.shape[0]
    out = x.new_empty((rows, *x.shape[1:]))
    count("all-to-all", group, x)
    if group.pg is not None:
        dist.all_to_all_single(
            out, x.contiguous(), list(take) or None, list(give) or None, group=group.pg
        )
    return out


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, give: Sequence[int], take: Sequence[int]
    ) -> Tensor:
        ctx.group, ctx.give, ctx.take = group, give, take
        return exchanged(x, group, give, take)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return exchanged(grads[0], ctx.group, ctx.take, ctx.give), None, None, None


def exchange(x: Tensor, group: Group, give: Sequence[int] = (), take: Sequence[int] = ()) -> Tensor:
    """The same, and gradients go back the way that their rows came."""
    return cast(Tensor, _Exchange.apply(x, group, give, take))  # type: ignore[no-untyped-call]
