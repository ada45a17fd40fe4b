"""Tensor parallelism of Megatron-Core."""

import torch
import torch.distributed as dist
from original import build

import schedlang


def program(model):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    split = build(ranks).to(next(model.parameters()).dtype)
    for name, mine in split.state_dict().items():
        whole = model.state_dict()[name]
        if mine is not None and mine.shape != whole.shape:
            parts = whole.chunk(2) if "fc1" in name else (whole,)  # gate and up, each of them split
            at = next(i for i, size in enumerate(mine.shape) if size != whole.shape[i])
            whole = torch.cat([part.chunk(ranks, at)[rank] for part in parts], at)
        if mine is not None:
            mine.copy_(whole)

    def step(batch):
        loss = split(**batch).mean()
        loss.backward()
        return loss

    return schedlang.TrainingProgram(split, step)
