"""An adapter of PEFT under FSDP2: it is sharded with the frozen block that it is in."""

import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import schedlang

world = 2


def program(model):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for block in model.get_base_model().model.layers:
        fully_shard(block)
    fully_shard(model)

    def step(batch):
        tokens = (batch["labels"][:, 1:] != -100).sum()
        local = {name: rows.chunk(ranks)[rank] for name, rows in batch.items()}
        loss = model(**local, num_items_in_batch=tokens).loss * ranks  # FSDP divides by the ranks
        loss.backward()
        return loss

    return schedlang.TrainingProgram(model, step)
