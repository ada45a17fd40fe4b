"""Accelerate with DistributedDataParallel: rows over the ranks."""

from accelerate import Accelerator

import schedlang

world = 2


def program(model):
    accelerator = Accelerator(cpu=True)
    ranks, rank = accelerator.num_processes, accelerator.process_index
    wrapped = accelerator.prepare(model)

    def step(batch):
        tokens = (batch["labels"][:, 1:] != -100).sum()
        local = {name: rows.chunk(ranks)[rank] for name, rows in batch.items()}
        loss = wrapped(**local, num_items_in_batch=tokens).loss * ranks  # DDP divides by the ranks
        accelerator.backward(loss)
        return loss

    return schedlang.TrainingProgram(wrapped, step)
