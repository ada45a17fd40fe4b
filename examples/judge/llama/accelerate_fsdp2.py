"""Accelerate with FSDP2: rows and parameters over the ranks."""

from accelerate import Accelerator, FullyShardedDataParallelPlugin

import schedlang

world = 2


def program(model):
    shards = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap"
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=shards)
    ranks, rank = accelerator.num_processes, accelerator.process_index
    wrapped = accelerator.prepare(model)

    def step(batch):
        tokens = (batch["labels"][:, 1:] != -100).sum()
        local = {name: rows.chunk(ranks)[rank] for name, rows in batch.items()}
        loss = wrapped(**local, num_items_in_batch=tokens).loss * ranks  # FSDP divides by the ranks
        accelerator.backward(loss)
        return loss

    return schedlang.TrainingProgram(wrapped, step)
