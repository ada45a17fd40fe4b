"""The capacity of experts: of the tokens that choose an expert, so many are taken, in their order.

GShard (Lepikhin et al. 2020), Switch Transformers (Fedus et al. 2021).  The order is that of the
rows of the batch, on however many ranks they are, so that the rule does not know of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from schedlang.runtime.collectives.collective import Group, all_gather


def kept(index: Tensor, count: int, capacity: float, groups: Sequence[Group] = ()) -> Tensor:
    """Which choices of [tokens, k] are among the first of their expert's capacity.

    An expert takes `capacity` times what it would get if all were chosen equally often, rounded
    up.  `groups` are the axes, slowest first, along which other ranks hold other tokens.
    """
    flat = index.flatten()
    if index.is_meta:
        chosen = index.new_empty(len(flat), count)
    else:
        chosen = torch.nn.functional.one_hot(flat, count)
    everyone = chosen.sum(0)[None]
    place, size = 0, 1
    for group in reversed(groups):
        everyone = all_gather(everyone, 0, group)
        place, size = place + group.rank * size, size * group.size
    if index.is_meta:  # no values: only what is sent can be seen
        return index.new_empty(index.shape, dtype=torch.bool)
    # the host need not know; `within` where it does
    limit = (everyone.sum().double() * capacity / count).ceil().long()
    before = everyone[:place].sum(0) + chosen.cumsum(0) - chosen
    return (before.gather(1, flat[:, None])[:, 0] < limit).view_as(index)


def within(choices: int, count: int, capacity: float) -> int:
    """How many of all choices an expert may take."""
    return math.ceil(choices * capacity / count)


def places_of_rows(expert: Tensor, count: int, limit: int) -> tuple[Tensor, Tensor]:
    """For each of `limit` places of each expert the row that has it, and whether one does.

    `expert` of each row: `count` for a row that has none. Free places name some row.
    """
    order = torch.argsort(expert, stable=True)
    each = expert.new_zeros(count + 1).scatter_add_(0, expert, torch.ones_like(expert))[:count]
    first = each.cumsum(0) - each
    turn = torch.arange(limit, device=expert.device)
    used = (turn < each[:, None]).flatten()
    place = (first[:, None] + turn).flatten().clamp(max=max(0, len(expert) - 1))
    return order[place], used


def with_capacity(
    inner: Callable[..., Tensor], count: int, capacity: float
) -> Callable[..., Tensor]:
    """The forward of all experts in one process under the rule: what is dropped weighs nothing."""

    def forward(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        if index.is_meta:
            return inner(hidden, index, weights)
        keep = kept(index, count, capacity)
        return inner(hidden, index, weights * keep)

    return forward


def limit_experts(model: nn.Module, rules: dict[str, tuple[int, float]]) -> None:
    """Put the rule, (experts, capacity) by module, into a model of one process."""
    for fqn, (count, capacity) in rules.items():
        module = model.get_submodule(fqn)
        module.forward = with_capacity(module.forward, count, capacity)
