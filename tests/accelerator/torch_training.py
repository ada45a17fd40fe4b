"""A small model, trained by each of torch's parallelisms on ranks with simulated devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

RANKS = 2
STEPS = 3


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(3)])


def batch(rank: int) -> Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(rank))


def loss(outputs: Tensor) -> Tensor:
    return outputs.pow(2).mean()


def single_process(ranks: int = RANKS) -> list[Tensor]:
    """Return the parameters after some steps of one process on the CPU."""
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (sum(loss(module(batch(r))) for r in range(ranks)) / ranks).backward()
        optimizer.step()
    return [p.detach() for p in module.parameters()]


def max_error(actual: list[Tensor], ranks: int = RANKS) -> float:
    """Return the largest difference from the training of one process."""
    return max((a.cpu() - b).abs().max().item() for a, b in zip(actual, single_process(ranks)))


def local_device() -> torch.device:
    return torch.device("sim", torch.accelerator.current_device_index())


def train_steps(module: nn.Module, clip: bool = False, micro: int = 1, **options: Any) -> None:
    """Train a module that does its own communication."""
    optimizer = torch.optim.SGD(module.parameters(), 0.1, **options)
    rows = batch(dist.get_rank()).to(local_device())
    for _ in range(STEPS):
        optimizer.zero_grad()
        for microbatch in rows.chunk(micro):
            (loss(module(microbatch)) / micro).backward()
        if clip:
            nn.utils.clip_grad_norm_(module.parameters(), 1e9)
        optimizer.step()


def ddp(**options: Any) -> float:
    """Train with DistributedDataParallel; return the largest error."""
    wrapped = nn.parallel.DistributedDataParallel(model().to(local_device()), **options)
    train_steps(wrapped)
    return max_error(list(wrapped.parameters()))


def fsdp(
    prepare: Callable[[Any], None] | None = None,
    *,
    shape: tuple[int, ...] = (RANKS,),
    clip: bool = False,
    micro: int = 1,
    **options: Any,
) -> list[Tensor]:
    """Train with FSDP2 over the blocks and the root; return all parameters, complete."""
    from torch.distributed.fsdp import fully_shard

    names = ("replicate", "shard") if len(shape) == 2 else None
    mesh = dist.init_device_mesh("sim", shape, mesh_dim_names=names)
    root = model() if options.get("offload_policy") else model().to(local_device())
    for block in root:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(root, mesh=mesh, **options)
    if prepare is not None:
        prepare(root)
    train_steps(root, clip=clip, micro=micro)
    return [full_parameter(p) for p in root.parameters()]


def full_parameter(p: Any) -> Tensor:
    """Gather a sharded parameter to the host."""
    if p.device.type == "sim":
        return p.full_tensor().cpu()  # type: ignore[no-any-return]
    local = p.to_local().detach().to(local_device())
    out = torch.empty(p.shape, device=local_device())
    dist.all_gather_into_tensor(out, local)
    return out.cpu()


def tensor_parallel() -> float:
    """Train with DTensor, columns, then rows; return the largest error."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = dist.init_device_mesh("sim", (RANKS,))
    module = model().to(local_device())
    for block in module:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.SGD(module.parameters(), 0.1, foreach=False)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (sum(loss(module(batch(r).to(local_device()))) for r in range(RANKS)) / RANKS).backward()
        optimizer.step()
    return max_error(
        [p.full_tensor() if hasattr(p, "full_tensor") else p for p in module.parameters()]
    )


def pipelined() -> float:
    """Train with torch's own 1F1B; return the largest error of this rank's part."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = dist.get_rank()
    parts = model().to(local_device())
    part = (parts[:2], parts[2:])[rank]
    stage = PipelineStage(part, rank, RANKS, local_device())
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda outputs, _: loss(outputs))
    optimizer = torch.optim.SGD(part.parameters(), 0.1)
    x = torch.cat([batch(r) for r in range(RANKS)]).to(local_device())
    for _ in range(STEPS):
        optimizer.zero_grad()
        schedule.step(x) if rank == 0 else schedule.step(target=x)
        optimizer.step()
    first = 0 if rank == 0 else 12
    actual = [p.detach().cpu() for p in part.parameters()]
    return max((a - b).abs().max().item() for a, b in zip(actual, single_process()[first:]))
