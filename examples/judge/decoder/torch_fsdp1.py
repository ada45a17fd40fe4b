"""FullyShardedDataParallel, the first of torch's two: a flat tensor for each block, in parts."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import schedlang

NAMES = True  # parameters under the model's names, views of the flat ones; False: flat ones

world = 2


def program(model):
    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({type(model.blocks[0])}),
        device_id=torch.device("cpu"),
        use_orig_params=NAMES,
    )

    def step(batch):
        ids = batch["ids"].chunk(dist.get_world_size())[dist.get_rank()]
        loss = F.cross_entropy(wrapped(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        return loss

    return schedlang.TrainingProgram(wrapped, step, clip=wrapped.clip_grad_norm_)
