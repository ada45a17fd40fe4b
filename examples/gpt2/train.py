"""A loop of one's own: torchrun --nproc-per-node 2 examples/gpt2/train.py FOLDER"""

import sys
from pathlib import Path

import torch
from model import batch, model

import schedlang

torch.manual_seed(0)  # the same weights on every rank
sch = schedlang.load(Path(__file__).with_name("tp.sched"), model())
adamw = lambda named: torch.optim.AdamW(named, lr=3e-3)  # noqa: E731
program = sch.build(batch=batch(0), optimizer=adamw, clip=1.0)
folder = sys.argv[1]
if last := schedlang.last_checkpoint(folder):
    program.load(last)
for step in range(program.step, program.step + 10):
    loss = program.train_step(batch(step))
    if torch.distributed.get_rank() == 0:
        print(f"step {step}  loss {loss:.4f}")
program.save(folder)
torch.distributed.barrier()  # nobody leaves while others still talk
torch.distributed.destroy_process_group()
