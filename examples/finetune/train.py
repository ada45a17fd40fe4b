"""Fine-tune a causal model of transformers on a text file: all weights, or adapters (lora.sched).

    torchrun --nproc-per-node 2 examples/finetune/train.py --model Qwen/Qwen3-0.6B --text my.txt

`--model` is a folder or a name of the hub; without it a tiny one is made, and nothing downloaded.
Started again it goes on where it was; at its end `from_pretrained` reads what lies in `--out`.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from model import TEXT, model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer

import schedlang

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", help="a folder, or a name of the hub")
parser.add_argument("--schedule", default=Path(__file__).with_name("dp.sched"))
parser.add_argument("--text", default=TEXT, type=Path)
parser.add_argument("--steps", default=40, type=int)
parser.add_argument("--length", default=64, type=int, help="tokens of a row")
parser.add_argument("--rows", default=8, type=int, help="rows of a step, of all ranks together")
parser.add_argument("--rate", default=1e-3, type=float)
parser.add_argument("--saved", default="saved", help="the folder of checkpoints")
parser.add_argument("--out", default="weights")
asked = parser.parse_args()

torch.manual_seed(0)  # the same weights, and the same order of rows, on every rank
if asked.model:
    tokenizer = AutoTokenizer.from_pretrained(asked.model)
    original = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.float32)
else:
    tokenizer, original = ByT5Tokenizer(), model()

ids = tokenizer(asked.text.read_text(), return_tensors="pt").input_ids[0]
rows = ids[: len(ids) // asked.length * asked.length].view(-1, asked.length)
held_out = max(1, len(rows) // 10 // asked.rows) * asked.rows


def batched(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Keyword arguments of the model: it shifts the labels itself."""
    ids = torch.stack(rows)
    return {"input_ids": ids, "labels": ids}


def loader(rows: torch.Tensor, shuffle: bool) -> DataLoader:
    """Whole batches, alike on all ranks: the schedule deals them out."""
    # the last batch of an epoch could have fewer rows than there are ranks
    return DataLoader(list(rows), asked.rows, shuffle, collate_fn=batched, drop_last=True)


trainer = schedlang.Trainer(
    schedule=asked.schedule,
    model=original,
    data=loader(rows[:-held_out], shuffle=True),
    evaluation=loader(rows[-held_out:], shuffle=False),
    steps=asked.steps,
    optimizer=lambda named: torch.optim.AdamW(named, lr=asked.rate),
    scheduler=lambda it: torch.optim.lr_scheduler.CosineAnnealingLR(it, asked.steps),
    clip=1.0,
    folder=asked.saved,
    save_every=max(1, asked.steps // 4),
    evaluate_every=max(1, asked.steps // 2),
)
program = trainer.fit()
program.export(asked.out, original)
if not dist.is_initialized() or dist.get_rank() == 0:
    tokenizer.save_pretrained(asked.out)
if dist.is_initialized():
    dist.barrier()  # nobody leaves while others still talk
    dist.destroy_process_group()
