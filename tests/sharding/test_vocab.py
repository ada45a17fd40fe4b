"""The vocabulary-parallel cross-entropy equals torch's on full logits, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from schedlang.runtime.comm.collectives import Group
from schedlang.runtime.launch.pool import Pool
from schedlang.runtime.lazy_logits.vocab_parallel import ShardedLogits

CLASSES = 7


def _data(world: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    width = -(-CLASSES // world)
    logits = torch.randn(6, width * world, generator=generator, dtype=torch.float64) * 30
    target = torch.randint(CLASSES, (6,), generator=generator)
    target[2] = -1
    return logits, target


def _sharded_loss(options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """On a rank: loss and the gradient of this rank's logits."""
    world, rank = dist.get_world_size(), dist.get_rank()
    group = Group(("tp",), tuple(range(world)), rank, dist.group.WORLD)
    logits, target = _data(world)
    local = logits.chunk(world, 1)[rank].clone().requires_grad_()
    start = rank * local.shape[1]
    padding = torch.arange(start, start + local.shape[1]) >= CLASSES
    sharded_logits = ShardedLogits(local.masked_fill(padding, -torch.inf), group, CLASSES)
    loss = F.cross_entropy(sharded_logits, target, ignore_index=-1, **options)  # type: ignore[arg-type]
    loss.square().sum().backward()
    assert local.grad is not None
    return loss.detach(), local.grad


@pytest.mark.parametrize("world", [2, 3, 5])  # of 5 the last holds padding alone
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_it_is_torchs_own(reduction: str, smoothing: float, world: int, pool: Pool) -> None:
    """Loss and gradient, with smoothing, ignored labels and padding of the classes."""
    options = {"reduction": reduction, "label_smoothing": smoothing}
    parts = pool.run(_sharded_loss, world, options)
    logits, target = _data(world)
    full_logits = logits.clone().requires_grad_()
    loss = F.cross_entropy(full_logits[:, :CLASSES], target, ignore_index=-1, **options)  # type: ignore[arg-type]
    loss.square().sum().backward()
    assert full_logits.grad is not None
    for local_loss, _ in parts:
        torch.testing.assert_close(local_loss, loss.detach(), rtol=1e-12, atol=1e-12)
    grad = torch.cat([grad for _, grad in parts], 1)
    torch.testing.assert_close(grad, full_logits.grad, rtol=1e-11, atol=1e-11)
