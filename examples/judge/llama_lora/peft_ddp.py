"""An adapter of PEFT under DistributedDataParallel: its gradients alone are averaged."""

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import schedlang

world = 2


def program(model):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    wrapped = DistributedDataParallel(model)

    def step(batch):
        tokens = (batch["labels"][:, 1:] != -100).sum()
        local = {name: rows.chunk(ranks)[rank] for name, rows in batch.items()}
        loss = wrapped(**local, num_items_in_batch=tokens).loss * ranks  # DDP divides by the ranks
        loss.backward()
        return loss

    return schedlang.TrainingProgram(wrapped, step)
