"""A small model trained in every way that torch has, on ranks of the simulated device."""

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


def alone(ranks: int = RANKS) -> list[Tensor]:
    """The parameters after some steps of one process on the CPU."""
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), 0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (sum(loss(trained(batch(r))) for r in range(ranks)) / ranks).backward()
        optimizer.step()
    return [p.detach() for p in trained.parameters()]


def apart(found: list[Tensor], ranks: int = RANKS) -> float:
    """The largest difference from the training of one process."""
    return max((a.cpu() - b).abs().max().item() for a, b in zip(found, alone(ranks)))


def here() -> torch.device:
    return torch.device("sim", torch.accelerator.current_device_index())


def steps(trained: nn.Module, clip: bool = False, micro: int = 1, **given: Any) -> None:
    """Plain training of a module that looks after its own communication."""
    optimizer = torch.optim.SGD(trained.parameters(), 0.1, **given)
    rows = batch(dist.get_rank()).to(here())
    for _ in range(STEPS):
        optimizer.zero_grad()
        for part in rows.chunk(micro):
            (loss(trained(part)) / micro).backward()
        if clip:
            nn.utils.clip_grad_norm_(trained.parameters(), 1e9)
        optimizer.step()


def ddp(**given: Any) -> float:
    """DistributedDataParallel."""
    found = nn.parallel.DistributedDataParallel(model().to(here()), **given)
    steps(found)
    return apart(list(found.parameters()))


def sharded(
    prepare: Callable[[Any], None] | None = None,
    *,
    shape: tuple[int, ...] = (RANKS,),
    clip: bool = False,
    micro: int = 1,
    **given: Any,
) -> list[Tensor]:
    """FSDP2 over the blocks and the root; all parameters, whole."""
    from torch.distributed.fsdp import fully_shard

    names = ("replicate", "shard") if len(shape) == 2 else None
    mesh = dist.init_device_mesh("sim", shape, mesh_dim_names=names)
    found = model() if given.get("offload_policy") else model().to(here())
    for block in found:
        fully_shard(block, mesh=mesh, **given)
    fully_shard(found, mesh=mesh, **given)
    if prepare is not None:
        prepare(found)
    steps(found, clip=clip, micro=micro)
    return [whole(p) for p in found.parameters()]


def whole(p: Any) -> Tensor:
    """A parameter that is sharded, in one piece on the host."""
    if p.device.type == "sim":
        return p.full_tensor().cpu()  # type: ignore[no-any-return]
    local = p.to_local().detach().to(here())
    out = torch.empty(p.shape, device=here())
    dist.all_gather_into_tensor(out, local)
    return out.cpu()


def tensor_parallel() -> float:
    """DTensor: columns, then rows."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = dist.init_device_mesh("sim", (RANKS,))
    found = model().to(here())
    for block in found:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.SGD(found.parameters(), 0.1, foreach=False)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (sum(loss(found(batch(r).to(here()))) for r in range(RANKS)) / RANKS).backward()
        optimizer.step()
    return apart([p.full_tensor() if hasattr(p, "full_tensor") else p for p in found.parameters()])


def pipelined() -> float:
    """torch's own 1F1B: the parts of this rank against those of one process."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = dist.get_rank()
    parts = model().to(here())
    part = (parts[:2], parts[2:])[rank]
    stage = PipelineStage(part, rank, RANKS, here())
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda outputs, _: loss(outputs))
    optimizer = torch.optim.SGD(part.parameters(), 0.1)
    x = torch.cat([batch(r) for r in range(RANKS)]).to(here())
    for _ in range(STEPS):
        optimizer.zero_grad()
        schedule.step(x) if rank == 0 else schedule.step(target=x)
        optimizer.step()
    first = 0 if rank == 0 else 12
    ours = [p.detach().cpu() for p in part.parameters()]
    return max((a - b).abs().max().item() for a, b in zip(ours, alone()[first:]))
