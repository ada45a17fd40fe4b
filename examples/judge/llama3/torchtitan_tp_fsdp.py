"""Tensor and sequence parallelism and FSDP2 of torchtitan, without its trainer."""

import torch.nn.functional as F
import torchtitan.distributed.parallel_dims
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder

import schedlang

torchtitan.distributed.parallel_dims.device_type = "cpu"  # it takes CUDA where it finds nothing

world = 4


def program(model):
    dims = ParallelDims(
        dp_replicate=1,
        dp_shard=2,
        cp=1,
        tp=2,
        pp=1,
        ep=1,
        world_size=4,
        spmd_backend="partial_dtensor",
    )
    dims.build_mesh()
    rows = dims.get_mesh(["fsdp"])
    model.parallelize(dims)
    dtype = next(model.parameters()).dtype
    apply_fsdp_to_decoder(model, rows, dtype, dtype, pp_enabled=False)

    def step(batch):
        tokens = batch["tokens"].chunk(2)[rows.get_local_rank()]
        scores = model(tokens).full_tensor()
        loss = F.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        (loss / 2).backward()  # torchtitan sums gradients over the ranks
        return loss

    return schedlang.TrainingProgram(model, step)
