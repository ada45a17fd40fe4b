"""Programs by torch's own wrappers: DDP, FSDP of both kinds, tensor parallel, both in two dims."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from schedlang import TrainingProgram
from tests.judging.net import loss, part, share


def stepping(module: Any, place: int, of: int, scale: float, after: Any = None) -> Any:
    """A step on this rank's rows, whose share of the loss is scaled by what averaging divides."""

    def step(batch: Any) -> Any:
        mine = part(batch, place, of)
        output = module(mine["ids"])
        value = share(output, mine, batch) * scale
        value.backward()
        if after is not None:
            after()
        return value * of / scale, output

    return step


def ddp(model: nn.Module) -> TrainingProgram:
    """Data parallel: gradients are averaged over ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    module = DistributedDataParallel(model)
    return TrainingProgram(module, stepping(module, rank, size, size))


def ddp_mean(model: nn.Module) -> TrainingProgram:
    """Wrong: each rank's own mean, though ranks have different counts of labels."""
    rank, size = dist.get_rank(), dist.get_world_size()
    module = DistributedDataParallel(model)

    def step(batch: Any) -> Any:
        mine = part(batch, rank, size)
        value = loss(module(mine["ids"]), mine)
        value.backward()
        return value

    return TrainingProgram(module, step)


def ddp_twice(model: nn.Module) -> TrainingProgram:
    """Wrong: averaged once more by hand."""
    rank, size = dist.get_rank(), dist.get_world_size()
    module = DistributedDataParallel(model)

    def again() -> None:
        for p in module.parameters():
            p.grad /= size

    return TrainingProgram(module, stepping(module, rank, size, size, again))


def ddp_unsynced(model: nn.Module) -> TrainingProgram:
    """Wrong: a last layer that DDP does not see."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ignored = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignored(model, ["head.weight"])
    module = DistributedDataParallel(model)
    return TrainingProgram(module, stepping(module, rank, size, size))


def ddp_other_start(model: nn.Module) -> TrainingProgram:
    """Wrong: the norm starts from other values."""
    with torch.no_grad():
        model.norm.weight.fill_(1.0)
    return ddp(model)


def ddp_evaluated(model: nn.Module) -> TrainingProgram:
    """Everything that may be offered is: outputs, clipping, evaluation, a saved state."""
    rank, size = dist.get_rank(), dist.get_world_size()
    module = DistributedDataParallel(model)
    return TrainingProgram(
        module,
        stepping(module, rank, size, size),
        clip=lambda most: nn.utils.clip_grad_norm_(module.parameters(), most),
        evaluate=lambda batch: module(part(batch, rank, size)["ids"]),
        state_dict=module.module.state_dict,
    )


def compiled(model: nn.Module) -> TrainingProgram:
    """DDP around a module that torch.compile wraps (eagerly: only names are of interest)."""
    rank, size = dist.get_rank(), dist.get_world_size()
    module = DistributedDataParallel(torch.compile(model, backend="eager"))
    return TrainingProgram(module, stepping(module, rank, size, size))


def fsdp2(model: nn.Module) -> TrainingProgram:
    """`fully_shard`, each block and the rest; dims that ranks do not divide."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return TrainingProgram(
        model,
        stepping(model, rank, size, size),
        clip=lambda most: nn.utils.clip_grad_norm_(model.parameters(), most),
    )


def fsdp2_sum(model: nn.Module) -> TrainingProgram:
    """Wrong: the loss is not scaled by what `fully_shard` divides by."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = fsdp2(model)
    return TrainingProgram(whole.module, stepping(whole.module, rank, size, 1))


def fsdp1(model: nn.Module) -> TrainingProgram:
    """FullyShardedDataParallel, whose parameters are flat."""
    rank, size = dist.get_rank(), dist.get_world_size()
    module = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    return TrainingProgram(module, stepping(module, rank, size, size))


def fsdp1_names(model: nn.Module) -> TrainingProgram:
    """The same with the original's names: views into the flat ones."""
    rank, size = dist.get_rank(), dist.get_world_size()
    module = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    return TrainingProgram(module, stepping(module, rank, size, size))


def fsdp1_doubled(model: nn.Module) -> TrainingProgram:
    """Wrong: the loss is scaled twice."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = fsdp1(model)
    scale = 2 * size
    return TrainingProgram(whole.module, stepping(whole.module, rank, size, scale))


PLAN = {
    **{f"blocks.{k}.attention.{n}": ColwiseParallel() for k in (0, 1) for n in "qkv"},
    **{f"blocks.{k}.attention.o": RowwiseParallel() for k in (0, 1)},
    **{f"blocks.{k}.up": ColwiseParallel() for k in (0, 1)},
    **{f"blocks.{k}.down": RowwiseParallel() for k in (0, 1)},
}


def tp(model: nn.Module) -> TrainingProgram:
    """`parallelize_module`: heads and hidden features are split, all else is replicated."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    module = parallelize_module(model, mesh, PLAN)
    return TrainingProgram(module, stepping(module, 0, 1, 1))


def tp_summed(model: nn.Module) -> TrainingProgram:
    """Wrong: gradients of the replicated norms are summed although each is whole."""
    whole = tp(model)

    def after() -> None:
        for name, p in model.named_parameters():
            if not isinstance(p, DTensor) and "norm" in name:
                dist.all_reduce(p.grad)

    return TrainingProgram(whole.module, stepping(model, 0, 1, 1, after))


def tp_fsdp(model: nn.Module) -> TrainingProgram:
    """Tensor parallel inside, `fully_shard` outside: DTensors on two dims of a mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module = parallelize_module(model, mesh["tp"], PLAN)
    for block in module.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(module, mesh=mesh["dp"])
    return TrainingProgram(module, stepping(module, mesh["dp"].get_local_rank(), 2, 2))


def tp_fsdp_once(model: nn.Module) -> TrainingProgram:
    """Wrong: the loss is divided as if all four ranks had rows of their own."""
    whole = tp_fsdp(model)
    place = dist.get_rank() // 2
    return TrainingProgram(whole.module, stepping(whole.module, place, 2, 1))
