"""Tensor parallelism by the plan that transformers has for a model."""

import torch.distributed as dist
from transformers.distributed import DistributedConfig

import schedlang

world = 2


def program(model):
    split = type(model).from_pretrained(
        None,
        config=model.config,
        state_dict=model.state_dict(),
        dtype=model.dtype,
        distributed_config=DistributedConfig(tp_size=dist.get_world_size()),
    )
    for dst, src in zip(split.buffers(), model.buffers(), strict=True):
        dst.copy_(src)  # rotary frequencies are computed anew, here in float64

    def step(batch):
        loss = split(**batch).loss
        loss.backward()
        return loss

    return schedlang.TrainingProgram(split, step)
