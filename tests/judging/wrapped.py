"""Programs by torch's own wrappers: DDP, FSDP of both kinds, tensor parallel, both in two dims."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
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
    return _by_itself(model, "ids", loss)


def _by_itself(model: nn.Module, name: str, loss: Any) -> TrainingProgram:
    rank, size = dist.get_rank(), dist.get_world_size()
    module = DistributedDataParallel(model)

    def step(batch: Any) -> Any:
        mine = part(batch, rank, size)
        value = loss(module(mine[name]), mine)
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


def fsdp2(model: nn.Module, **options: Any) -> TrainingProgram:
    """`fully_shard`, each block and the rest; dims that ranks do not divide."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
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
    **{f"blocks.*.attention.{n}": ColwiseParallel() for n in "qkv"},
    "blocks.*.attention.o": RowwiseParallel(),
    "blocks.*.up": ColwiseParallel(),
    "blocks.*.down": RowwiseParallel(),
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


def vocabulary(model: nn.Module) -> TrainingProgram:
    """Tokens split between layers, a split vocabulary, and a loss of split logits."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    plan: dict[str, Any] = {
        "emb": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    at = "blocks.*."
    plan |= {at + "n1": SequenceParallel(), at + "n2": SequenceParallel()}
    plan |= {at + f"attention.{n}": ColwiseParallel() for n in "qkv"}
    plan |= {
        at + "attention": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        ),
        at + "attention.o": RowwiseParallel(output_layouts=Shard(1)),
        at + "up": ColwiseParallel(input_layouts=Shard(1)),
        at + "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    module = parallelize_module(model, mesh, plan)

    def step(batch: Any) -> Any:
        output = module(batch["ids"])
        with loss_parallel():
            value = F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())
            value.backward()
        return value, output

    return TrainingProgram(module, step)


def hybrid(model: nn.Module) -> TrainingProgram:
    """Shards within groups, copies across."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return TrainingProgram(model, stepping(model, dist.get_rank(), 4, 4))


def recomputed(model: nn.Module) -> TrainingProgram:
    """Blocks in torch's checkpoint wrappers, which are in the names."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for k, block in enumerate(model.blocks):
        model.blocks[k] = checkpoint_wrapper(block)
    return ddp(model)


def sliced_adamw(named: Any) -> torch.optim.Optimizer:
    """AdamW whose state lies on one rank each; for the original, in no job, plain AdamW."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    parameters = [p for _, p in named]
    if not dist.is_initialized():
        return torch.optim.AdamW(parameters, lr=3e-3, eps=1e-5)
    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=3e-3, eps=1e-5)


def zero1(model: nn.Module) -> TrainingProgram:
    """DDP with an optimizer of its own."""
    whole = ddp(model)
    return TrainingProgram(whole.module, whole.step, optimizer=sliced_adamw)


class Normed(nn.Module):
    """A convolution and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.out = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        return self.out(self.bn(self.conv(x)).relu().mean((2, 3)))


def images(seed: int) -> dict[str, Any]:
    """Images and their classes."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(8, 3, 4, 4, generator=draw),
        "y": torch.randint(0, 5, (8,), generator=draw),
    }


def of_images(output: Tensor, batch: Any) -> Tensor:
    """The mean over images."""
    return F.cross_entropy(output, batch["y"])


def unsynced_norm(model: nn.Module) -> TrainingProgram:
    """Wrong: each rank's batch norm has the statistics of its own rows."""
    return _by_itself(model, "x", of_images)
