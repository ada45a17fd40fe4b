"""Norms over positions that are split over ranks: each rank adds its part to the statistics.

Batch norm and group norm as torch computes them; synchronised batch norm is of Peng et al. (2018).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.diagnostic import Diagnostic, Refusal
from schedlang.placement import S
from schedlang.runtime.collectives.collective import Group, all_gather, own_part
from schedlang.runtime.collectives.total import summed
from schedlang.runtime.sharding.convolution import CHANNELS, positions
from schedlang.runtime.sharding.crossing import shared
from schedlang.runtime.sharding.shard import Edge, Forward


def _mean(x: Tensor, dims: Sequence[int], groups: Sequence[Group]) -> tuple[Tensor, int]:
    """The mean over dims and ranks, with the dims kept, and over how many elements it is."""
    total, count = x.sum(tuple(dims), keepdim=True), 1
    for dim in dims:
        count *= x.shape[dim]
    for group in groups:
        total = summed(total, group)  # each rank uses it for its own positions
        count *= group.size
    return total / count, count


def _normalised(
    x: Tensor, dims: Sequence[int], groups: Sequence[Group], eps: float
) -> tuple[Tensor, Tensor, Tensor, int]:
    mean, count = _mean(x, dims, groups)
    centred = x - mean
    variance, _ = _mean(centred * centred, dims, groups)
    return centred * torch.rsqrt(variance + eps), mean, variance, count


def _along_channels(values: Tensor, x: Tensor) -> Tensor:
    return values.view(1, -1, *(1,) * (x.ndim - 2))


def _scaled(module: nn.Module, y: Tensor) -> Tensor:
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if weight is not None:
        y = y * _along_channels(weight, y)
    return y if bias is None else y + _along_channels(bias, y)


def batch_norm(module: nn.Module, kind: str, edges: tuple[Edge, ...]) -> Forward:
    """Batch norm of this rank's positions with the statistics of all; eval mode needs none."""
    assert isinstance(module, nn.modules.batchnorm._BatchNorm)
    groups = [edge.group for edge in edges if positions(edge) is not None]
    channels = [edge.group for edge in edges if edge.wants == S(CHANNELS)]

    def compute(x: Tensor) -> Tensor:
        if not (module.training or module.running_mean is None):
            tracked = (module.running_mean, module.running_var)
            mean, variance = (_along_channels(_own(t, channels), x) for t in tracked)
            return _scaled(module, (x - mean) * torch.rsqrt(variance + module.eps))
        dims = [0, *range(2, x.ndim)]
        y, mean, variance, count = _normalised(x, dims, groups, module.eps)
        _track(module, mean, variance, count, channels)
        return _scaled(module, y)

    return _between(compute, edges)


def _own(statistic: Tensor | None, channels: Sequence[Group]) -> Tensor:
    """What is tracked of this rank's channels; every rank keeps the statistics of all."""
    assert statistic is not None
    for group in channels:
        statistic = own_part(statistic, 0, group)
    return statistic


@torch.no_grad()
def _track(
    module: nn.modules.batchnorm._BatchNorm, mean: Tensor, variance: Tensor, count: int,
    channels: Sequence[Group],
) -> None:  # fmt: skip
    """Move the running statistics as torch's own batch norm does."""
    if not (module.training and module.track_running_stats) or module.running_mean is None:
        return
    assert module.running_var is not None and module.num_batches_tracked is not None
    module.num_batches_tracked.add_(1)
    share: Any = module.momentum
    if share is None:
        share = 1.0 / module.num_batches_tracked.to(mean.dtype)
    found = torch.stack([mean.flatten(), variance.flatten() * (count / max(count - 1, 1))])
    for group in reversed(channels):
        found = all_gather(found, 1, group)
    module.running_mean.mul_(1 - share).add_(found[0] * share)
    module.running_var.mul_(1 - share).add_(found[1] * share)


def group_norm(module: nn.Module, kind: str, edges: tuple[Edge, ...]) -> Forward:
    """Group norm of this rank's positions with the statistics of all, or of its own groups."""
    assert isinstance(module, nn.GroupNorm)
    groups = [edge.group for edge in edges if positions(edge) is not None]
    ranks = math.prod(edge.group.size for edge in edges if edge.wants == S(CHANNELS))
    if module.num_groups % ranks:
        raise Refusal(
            Diagnostic(
                "S402", f"cannot split {module.num_groups} groups evenly {ranks} ways",
                notes=(f"`{edges[0].group.label}` is a group norm",),
            )
        )  # fmt: skip

    def compute(x: Tensor) -> Tensor:
        apart = x.view(x.shape[0], module.num_groups // ranks, -1, *x.shape[2:])
        y, *_ = _normalised(apart, range(2, apart.ndim), groups, module.eps)
        return _scaled(module, y.view(x.shape))

    return _between(compute, edges)


def _between(compute: Any, edges: tuple[Edge, ...]) -> Forward:
    def forward(x: Tensor) -> Tensor:
        for edge in edges:
            x = shared(edge.entry(), x)
        y: Tensor = compute(x.contiguous())
        for edge in edges:
            y = edge.exit()(y)
        return y

    return forward
