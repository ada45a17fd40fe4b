"""ZeRO of DeepSpeed: rows over the ranks, and what its stage cuts: at 3 the parameters, too."""

import copy

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_grad

import schedlang

STAGE = 3
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it is built for a minute
get_accelerator().is_fp16_supported = lambda: False  # ZeRO 3 refuses float64 where a CPU has it

world = 2


def program(model):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    full = copy.deepcopy(model)  # parameters of the engine are in pieces: here they are read whole
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": STAGE},
            "zero_allow_untested_optimizer": True,
        },
    )
    pairs = list(zip(engine.module.parameters(), full.parameters(), strict=True))

    def step(batch):
        with deepspeed.zero.GatheredParameters([p for p, _ in pairs], modifier_rank=0):
            for p, read in pairs:
                p.data.copy_(read.data)
        tokens = (batch["labels"][:, 1:] != -100).sum()
        local = {name: rows.chunk(ranks)[rank] for name, rows in batch.items()}
        loss = engine(**local, num_items_in_batch=tokens).loss * ranks  # ZeRO divides by the ranks
        engine.backward(loss)
        for p, read in pairs:
            read.grad = safe_get_full_grad(p).to(read.dtype)
        engine.step()  # at rate 0: forgets the gradients
        return loss

    return schedlang.TrainingProgram(full, step)
