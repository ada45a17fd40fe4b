"""Expert parallelism of transformers: rows over all ranks, experts over a half of them."""

import torch.distributed as dist
from transformers.distributed import DistributedConfig

import schedlang

world = 4


def program(model):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    split = type(model).from_pretrained(
        None,
        config=model.config,
        state_dict=model.state_dict(),
        dtype=model.dtype,
        experts_implementation="batched_mm",  # grouped_mm knows no float64
        distributed_config=DistributedConfig(fsdp_size=ranks, ep_size=ranks // 2),
    )
    for dst, src in zip(split.buffers(), model.buffers(), strict=True):
        dst.copy_(src)  # rotary frequencies are computed anew, here in float64

    def step(batch):
        tokens = (batch["labels"][:, 1:] != -100).sum()
        local = {name: rows.chunk(ranks)[rank] for name, rows in batch.items()}
        loss = split(**local, num_items_in_batch=tokens).loss * ranks  # FSDP divides by the ranks
        loss.backward()
        return loss

    return schedlang.TrainingProgram(split, step)
