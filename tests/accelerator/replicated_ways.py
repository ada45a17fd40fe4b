"""DDP in each of the ways that reach another wait, event or record of it, on two ranks."""

from __future__ import annotations

import importlib
import math
import pkgutil
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms import ddp_comm_hooks as _HOOKS
from torch.nn.parallel import DistributedDataParallel

from tests.accelerator.trained import RANKS, Block, apart, batch, ddp, here, loss, model, steps

MODULES = (
    *("torch.nn.parallel.distributed", "torch.distributed.utils"),
    *("torch.distributed.algorithms.join", "torch.distributed.optim.zero_redundancy_optimizer"),
    *(f"{_HOOKS.__name__}.{one.name}" for one in pkgutil.iter_modules(_HOOKS.__path__)),
)


def _hooks(name: str) -> Any:
    return importlib.import_module(f"{_HOOKS.__name__}.{name}")


def _rough(found: list[Tensor]) -> float:
    """Of what rounds or approximates: NaN where something is read too early, else nothing."""
    return math.nan if any(bool(one.isnan().any()) for one in found) else 0.0


def small() -> float:
    """In buckets of a few parameters each."""
    return ddp(gradient_as_bucket_view=True, bucket_cap_mb=0.001)


class Counted(nn.Module):
    """A model with a buffer that rank 0 tells the others before each forward, and a spare layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.spare = model(), nn.Linear(16, 16)
        self.register_buffer("shift", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.shift += dist.get_rank()  # only that of rank 0 is kept: nothing
        out: Tensor = self.inner(x + self.shift * 0)
        return out


def buffers() -> float:
    """Buffers are those of rank 0, and one layer is never used."""
    found = DistributedDataParallel(Counted().to(here()), find_unused_parameters=True)
    steps(found)
    return apart(list(found.module.inner.parameters()))


def mixed() -> float:
    """Computed in float64, which is copied on another stream.

    torch forgets that those copies come after the optimizer: here they do. Values are not looked
    at: they are NaN on this device with nothing left out, and no report says why.
    """
    from torch.nn.parallel.distributed import _MixedPrecision

    policy = _MixedPrecision(torch.float64, torch.float64, torch.float64)
    found = DistributedDataParallel(
        model().to(here()), mixed_precision=policy, gradient_as_bucket_view=True
    )
    made = found._mp_stream

    def behind(*_: Any) -> None:
        made.wait_stream(torch.accelerator.current_stream())

    found.register_forward_pre_hook(behind, prepend=True)
    steps(found)
    return 0.0


def joined() -> float:
    """One rank has a batch less: the other goes on, and the first answers."""
    rank = dist.get_rank()
    found = DistributedDataParallel(model().to(here()))
    optimizer = torch.optim.SGD(found.parameters(), 0.1)
    with found.join():
        for _ in range(3 - rank):
            optimizer.zero_grad()
            loss(found(batch(rank).to(here()))).backward()
            optimizer.step()
    plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for ranks in (2, 2, 1):
        optimizer.zero_grad()
        (sum(loss(plain(batch(r))) for r in range(ranks)) / RANKS).backward()
        optimizer.step()
    pairs = zip(found.parameters(), plain.parameters(), strict=True)
    return max((a.cpu() - b).abs().max().item() for a, b in pairs)


def from_another_device() -> float:
    """What is given lies on another device, and comes on a stream of its own."""
    from torch.nn.utils.rnn import pack_sequence

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model()

        def forward(self, x: Any) -> Tensor:
            out: Tensor = self.inner(x.data if not isinstance(x, Tensor) else x)
            return out

    rank = dist.get_rank()
    far = torch.device("sim", rank + RANKS)
    found = DistributedDataParallel(Packed().to(here()), device_ids=[rank])
    optimizer = torch.optim.SGD(found.parameters(), 0.1)
    for packed in (False, False, True):
        optimizer.zero_grad()
        rows = batch(rank).to(far)
        loss(found(pack_sequence([rows]) if packed else rows)).backward()
        del rows
        optimizer.step()
    found(batch(rank).to(far))  # takes what the last step gave back
    return apart(list(found.module.inner.parameters()))


def stepped_in_backward() -> float:
    """The optimizer runs on each bucket as soon as it is summed."""
    from torch.distributed.optim import _apply_optimizer_in_backward

    inner = model().to(here())
    _apply_optimizer_in_backward(torch.optim.SGD, inner.parameters(), {"lr": 0.1})
    found = DistributedDataParallel(inner, bucket_cap_mb=0.001)
    rows = batch(dist.get_rank()).to(here())
    for _ in range(3):
        loss(found(rows)).backward()
    return apart(list(found.parameters()))


def stepped_at_last_bucket() -> float:
    """A sharded optimizer that steps while backward runs."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    hooks = _hooks("ddp_zero_hook"), _hooks("default_hooks")
    found = DistributedDataParallel(model().to(here()), bucket_cap_mb=0.001)
    given: dict[str, Any] = {"overlap_with_ddp": True, "lr": 0.1}
    optimizer = ZeroRedundancyOptimizer(found.parameters(), torch.optim.SGD, **given)
    hook = hooks[0].hook_with_zero_step(hooks[1].allreduce_hook, found, optimizer)
    found.register_comm_hook(None, hook)
    rows = batch(dist.get_rank()).to(here())
    for _ in range(5):  # the first ones only look
        optimizer.zero_grad()
        loss(found(rows)).backward()
        optimizer.step()
    return _rough(list(found.parameters()))


def sliced_optimizer() -> float:
    """Each rank steps on some parameters, and sends them to the others."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    found = DistributedDataParallel(model().to(here()))
    optimizer = ZeroRedundancyOptimizer(found.parameters(), torch.optim.SGD, lr=0.1)
    rows = batch(dist.get_rank()).to(here())
    for _ in range(3):
        optimizer.zero_grad()
        loss(found(rows)).backward()
        optimizer.step()
    optimizer.consolidate_state_dict()
    return apart(list(found.parameters()))


def power() -> float:
    """Gradients as products of small matrices."""
    hooks = _hooks("powerSGD_hook")
    state = hooks.PowerSGDState(None, 2, start_powerSGD_iter=2, min_compression_rate=1)
    found = DistributedDataParallel(nn.Sequential(Block()).to(here()))
    found.register_comm_hook(state, hooks.powerSGD_hook)
    steps(found)
    return _rough(list(found.parameters()))


WAYS = (
    *(small, buffers, mixed, joined, from_another_device, stepped_in_backward),
    *(stepped_at_last_bucket, sliced_optimizer, power),
)
