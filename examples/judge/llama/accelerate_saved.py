"""Accelerate's `save_state` and `load_state`: weights, optimizer state and random numbers."""

import tempfile

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

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

    def save(optimizer):
        accelerator.prepare(optimizer)
        (folder,) = broadcast_object_list([tempfile.mkdtemp()])  # all ranks write into one
        return accelerator.save_state(folder)

    def load(folder, optimizer):
        accelerator.prepare(optimizer)
        accelerator.load_state(folder)

    return schedlang.TrainingProgram(wrapped, step, state_dict=save, load=load)
