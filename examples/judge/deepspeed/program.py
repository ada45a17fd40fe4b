"""ZeRO of DeepSpeed: rows over the ranks, optimizer state, gradients and parameters too, by stage."""

import deepspeed
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad

import schedlang

STAGE = 3


def program(model):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": STAGE},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)

    def step(batch):
        tokens = (batch["labels"][:, 1:] != -100).sum()
        mine = {name: rows.chunk(ranks)[rank] for name, rows in batch.items()}
        loss = engine(**mine, num_items_in_batch=tokens).loss * ranks  # ZeRO divides by the ranks
        engine.backward(loss)
        return loss

    return schedlang.TrainingProgram(engine.module, step)
