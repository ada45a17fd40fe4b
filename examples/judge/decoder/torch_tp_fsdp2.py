"""Layers in two, and parts of rows and parameters: `parallelize_module` under `fully_shard`."""

import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import parallel as tp

import schedlang

PLAN = dict.fromkeys(("query", "key", "value", "up"), tp.ColwiseParallel())
PLAN |= dict.fromkeys(("out", "down"), tp.RowwiseParallel())

world = 4


def program(model):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for block in model.blocks:
        fully_shard(tp.parallelize_module(block, mesh["tp"], PLAN), mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])

    def step(batch):
        ids = batch["ids"].chunk(2)[mesh.get_local_rank("dp")]
        loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        return loss

    return schedlang.TrainingProgram(model, step)
