"""Rows that neighbours need of each other, where positions of a tensor are split over ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from schedlang.runtime.collectives.collective import Group
from schedlang.runtime.collectives.moving import exchange


def with_halo(
    x: Tensor, dim: int, before: int, after: int, group: Group, fill: float = 0.0
) -> Tensor:
    """This rank's part along `dim` with the last `before` rows of the rank before it in front.

    Behind it stand the first `after` rows of the rank after it; a negative `after` cuts rows off.
    At both ends of the whole tensor `fill` stands for what is not there.  Gradients of rows that
    were lent are added to those of their owner, which torch does where the parts are put together.
    Dryden et al. (2019), Hy-Fi (2022): spatial parallelism with halo exchange.
    """
    rows = x.movedim(dim, 0)
    size, place, last = rows.shape[0], group.rank, group.size - 1
    lent = max(after, 0)
    assert before <= size and lent <= size, "a halo reaches beyond the neighbours"
    if before or lent:
        give, take = [0] * group.size, [0] * group.size
        parts = []
        if place > 0:
            give[place - 1], take[place - 1] = lent, before
            parts.append(rows[:lent])
        if place < last:
            give[place + 1], take[place + 1] = before, lent
            parts.append(rows[size - before :])
        got = exchange(torch.cat(parts), group, give, take)
        first = got[:before] if place > 0 else rows.new_full((before, *rows.shape[1:]), fill)
        behind = got[got.shape[0] - lent :] if place < last else None
        if behind is None:
            behind = rows.new_full((lent, *rows.shape[1:]), fill)
        rows = torch.cat([first, rows, behind])
    if after < 0:
        rows = rows[:after]
    return rows.movedim(0, dim)
