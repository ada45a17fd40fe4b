"""Pretrain on packed rows under three dimensions; killed and started again it goes on.

    torchrun --nproc-per-node 8 examples/pretrain/train.py saved

The weights are drawn part by part (`deferred_init`): no rank ever holds the whole model.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from model import lines, model, packed
from torch.utils.data import DataLoader

import schedlang

steps = int(sys.argv[2]) if len(sys.argv) > 2 else 40
torch.manual_seed(0)  # the same weights, and the same order of rows, on every rank


def rate(step: int) -> float:
    """A warm-up, a plateau, and a decay at the end."""
    return min((step + 1) / 5, 1.0, max((steps - step) / (steps / 5), 0.05))


trainer = schedlang.Trainer(
    schedule=Path(__file__).with_name("3d.sched"),
    model=schedlang.deferred_init(model),
    data=DataLoader(packed(lines()), batch_size=8, shuffle=True, drop_last=True),
    steps=steps,
    optimizer=lambda named: torch.optim.AdamW(named, lr=3e-3, betas=(0.9, 0.95)),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, rate),
    clip=1.0,
    folder=sys.argv[1],
    save_every=10,
    log_every=5,
    on_spike="roll back",
    spike=2.0,
)
trainer.fit()
if dist.is_initialized():
    dist.barrier()  # nobody leaves while others still talk
    dist.destroy_process_group()
