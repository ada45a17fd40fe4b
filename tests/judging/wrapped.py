"""Programs with torch's own wrappers: DDP, FSDP1, FSDP2, tensor parallel; right and wrong ones."""

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
from tests.judging.net import batch_part, loss, loss_share


def build_step(module: Any, index: int, count: int, scale: float, after: Any = None) -> Any:
    """Return a step on this rank's rows; `scale` undoes the averaging of gradients."""

    def step(batch: Any) -> Any:
        local = batch_part(batch, index, count)
        output = module(local["ids"])
        value = loss_share(output, local, batch) * scale
        value.backward()
        if after is not None:
            after()
        return value * count / scale, output

    return step


def ddp(model: nn.Module) -> TrainingProgram:
    """Data parallel: gradients are averaged over ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    module = DistributedDataParallel(model)
    return TrainingProgram(module, build_step(module, rank, size, size))


def ddp_mean(model: nn.Module) -> TrainingProgram:
    """Wrong: each rank's own mean, although ranks have different counts of labels."""
    return _local_mean(model, "ids", loss)


def _local_mean(model: nn.Module, name: str, loss: Any) -> TrainingProgram:
    rank, size = dist.get_rank(), dist.get_world_size()
    module = DistributedDataParallel(model)

    def step(batch: Any) -> Any:
        local = batch_part(batch, rank, size)
        value = loss(module(local[name]), local)
        value.backward()
        return value

    return TrainingProgram(module, step)


def ddp_twice(model: nn.Module) -> TrainingProgram:
    """Wrong: gradients are averaged once more by hand."""
    rank, size = dist.get_rank(), dist.get_world_size()
    module = DistributedDataParallel(model)

    def again() -> None:
        for p in module.parameters():
            p.grad /= size

    return TrainingProgram(module, build_step(module, rank, size, size, again))


def ddp_unsynced(model: nn.Module) -> TrainingProgram:
    """Wrong: DDP ignores the last layer."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ignored = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignored(model, ["head.weight"])
    module = DistributedDataParallel(model)
    return TrainingProgram(module, build_step(module, rank, size, size))


def ddp_other_start(model: nn.Module) -> TrainingProgram:
    """Wrong: the norm starts from other values."""
    with torch.no_grad():
        model.norm.weight.fill_(1.0)
    return ddp(model)


def ddp_full_api(model: nn.Module) -> TrainingProgram:
    """DDP that offers everything: outputs, clipping, evaluation, a saved state."""
    rank, size = dist.get_rank(), dist.get_world_size()
    module = DistributedDataParallel(model)
    return TrainingProgram(
        module,
        build_step(module, rank, size, size),
        clip=lambda max_norm: nn.utils.clip_grad_norm_(module.parameters(), max_norm),
        evaluate=lambda batch: module(batch_part(batch, rank, size)["ids"]),
        state_dict=module.module.state_dict,
    )


def compiled(model: nn.Module) -> TrainingProgram:
    """DDP around a module that torch.compile wraps (eagerly: only names matter)."""
    rank, size = dist.get_rank(), dist.get_world_size()
    module = DistributedDataParallel(torch.compile(model, backend="eager"))
    return TrainingProgram(module, build_step(module, rank, size, size))


def fsdp2(model: nn.Module, **options: Any) -> TrainingProgram:
    """FSDP2: `fully_shard` on each block and the model; ranks do not divide some dims."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return TrainingProgram(
        model,
        build_step(model, rank, size, size),
        clip=lambda max_norm: nn.utils.clip_grad_norm_(model.parameters(), max_norm),
    )


def fsdp2_crosswise(model: nn.Module) -> TrainingProgram:
    """FSDP2: matrices are sharded along their second dim where the ranks divide it."""
    size = dist.get_world_size()

    def placement(p: nn.Parameter) -> Shard:
        return Shard(int(p.ndim > 1 and p.shape[1] % size == 0))

    return fsdp2(model, shard_placement_fn=placement)


def fsdp2_sum(model: nn.Module) -> TrainingProgram:
    """Wrong: the loss is not scaled by what `fully_shard` divides by."""
    rank, size = dist.get_rank(), dist.get_world_size()
    program = fsdp2(model)
    return TrainingProgram(program.module, build_step(program.module, rank, size, 1))


def fsdp1(model: nn.Module) -> TrainingProgram:
    """FullyShardedDataParallel, whose parameters are flat."""
    rank, size = dist.get_rank(), dist.get_world_size()
    module = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    return TrainingProgram(module, build_step(module, rank, size, size))


def fsdp1_names(model: nn.Module) -> TrainingProgram:
    """FSDP1 with `use_orig_params`: the original names are views into flat parameters."""
    rank, size = dist.get_rank(), dist.get_world_size()
    module = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    return TrainingProgram(module, build_step(module, rank, size, size))


def fsdp1_doubled(model: nn.Module) -> TrainingProgram:
    """Wrong: the loss is scaled twice."""
    rank, size = dist.get_rank(), dist.get_world_size()
    program = fsdp1(model)
    scale = 2 * size
    return TrainingProgram(program.module, build_step(program.module, rank, size, scale))


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
    return TrainingProgram(module, build_step(module, 0, 1, 1))


def tp_summed(model: nn.Module) -> TrainingProgram:
    """Wrong: gradients of replicated norms are all-reduced although each is complete."""
    program = tp(model)

    def after() -> None:
        for name, p in model.named_parameters():
            if not isinstance(p, DTensor) and "norm" in name:
                dist.all_reduce(p.grad)

    return TrainingProgram(program.module, build_step(model, 0, 1, 1, after))


def tp_fsdp(model: nn.Module) -> TrainingProgram:
    """Tensor parallel inside, `fully_shard` outside: DTensors on two dims of a mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module = parallelize_module(model, mesh["tp"], PLAN)
    for block in module.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(module, mesh=mesh["dp"])
    return TrainingProgram(module, build_step(module, mesh["dp"].get_local_rank(), 2, 2))


def tp_fsdp_once(model: nn.Module) -> TrainingProgram:
    """Wrong: the loss is scaled as if all four ranks had different rows."""
    program = tp_fsdp(model)
    replica = dist.get_rank() // 2
    return TrainingProgram(program.module, build_step(program.module, replica, 2, 1))


def vocab_parallel(model: nn.Module) -> TrainingProgram:
    """Sequence parallel norms, a split vocabulary, and a loss of split logits."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    plan: dict[str, Any] = {
        "emb": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    prefix = "blocks.*."
    plan |= {prefix + "n1": SequenceParallel(), prefix + "n2": SequenceParallel()}
    plan |= {prefix + f"attention.{n}": ColwiseParallel() for n in "qkv"}
    plan |= {
        prefix + "attention": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        ),
        prefix + "attention.o": RowwiseParallel(output_layouts=Shard(1)),
        prefix + "up": ColwiseParallel(input_layouts=Shard(1)),
        prefix + "down": RowwiseParallel(output_layouts=Shard(1)),
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
    """Hybrid FSDP2: shards within groups, replicas across groups."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return TrainingProgram(model, build_step(model, dist.get_rank(), 4, 4))


def recomputed(model: nn.Module) -> TrainingProgram:
    """DDP with blocks in torch's checkpoint wrappers, which change the names."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for k, block in enumerate(model.blocks):
        model.blocks[k] = checkpoint_wrapper(block)
    return ddp(model)


def zero_adamw(named_params: Any) -> torch.optim.Optimizer:
    """Return AdamW whose state is split over ranks; outside of a job (the original) plain AdamW."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    parameters = [p for _, p in named_params]
    if not dist.is_initialized():
        return torch.optim.AdamW(parameters, lr=3e-3, eps=1e-5)
    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=3e-3, eps=1e-5)


def zero1(model: nn.Module) -> TrainingProgram:
    """DDP with its own optimizer, ZeRO stage 1."""
    program = ddp(model)
    return TrainingProgram(program.module, program.step, optimizer=zero_adamw)


class BatchNormNet(nn.Module):
    """A convolution and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.out = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores."""
        return self.out(self.bn(self.conv(x)).relu().mean((2, 3)))


def images(seed: int) -> dict[str, Any]:
    """Return images and their classes."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(8, 3, 4, 4, generator=draw),
        "y": torch.randint(0, 5, (8,), generator=draw),
    }


def image_loss(output: Tensor, batch: Any) -> Tensor:
    """Return the mean loss over images."""
    return F.cross_entropy(output, batch["y"])


def unsynced_norm(model: nn.Module) -> TrainingProgram:
    """Wrong: each rank's batch norm uses the statistics of its own rows."""
    return _local_mean(model, "x", image_loss)
