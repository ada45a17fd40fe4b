"""What the trainer of transformers makes of a step: its own methods, of any version."""

from __future__ import annotations

import inspect
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from schedlang import TrainingProgram


def model() -> Any:
    """A tiny Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=24,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def ragged(seed: int) -> dict[str, Tensor]:
    """Eight rows; the first half has more labels than the second, and each row another number."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 24, (8, 10), generator=draw)
    padding = torch.arange(10) >= torch.tensor([10, 9, 8, 9, 5, 4, 6, 5])[:, None]
    return {
        "input_ids": ids.masked_fill(padding, 0),
        "attention_mask": (~padding).long(),
        "labels": ids.masked_fill(padding | (torch.arange(10) == 0), -100),  # none predicts it
    }


def even(seed: int) -> dict[str, Tensor]:
    """Eight rows without padding: all parts weigh alike."""
    ids = torch.randint(1, 24, (8, 10), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def trained(model: Any, accumulated: int, **arguments: Any) -> TrainingProgram:
    """A step of the trainer on this rank's rows, in so many micro-batches."""
    from transformers import Trainer, TrainingArguments

    made = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        report_to=[],
        gradient_accumulation_steps=accumulated,
        **arguments,
    )
    trainer = Trainer(model=model, args=made)
    wrapped = trainer.accelerator.prepare(model) if dist.get_world_size() > 1 else model

    def step(batch: Any) -> Tensor:
        own = {
            name: rows.chunk(dist.get_world_size())[dist.get_rank()] for name, rows in batch.items()
        }
        pieces = {name: rows.chunk(accumulated) for name, rows in own.items()}
        micro = [{name: rows[at] for name, rows in pieces.items()} for at in range(accumulated)]
        trainer.current_gradient_accumulation_steps = accumulated
        losses = [trainer.training_step(wrapped, *one) for one in counted(trainer, micro)]
        return torch.stack(losses).sum()

    return TrainingProgram(wrapped, step)


def counted(trainer: Any, micro: list[dict[str, Tensor]]) -> list[tuple[Any, ...]]:
    """What the trainer's own loop gives each of its steps: micro-batches, and the labels of all."""
    if not hasattr(trainer, "get_batch_samples"):  # before 4.46
        return [(one,) for one in micro]
    asked = inspect.signature(trainer.get_batch_samples).parameters
    device = (torch.device("cpu"),) if "device" in asked else ()
    samples, count = trainer.get_batch_samples(iter(micro), len(micro), *device)
    return [(one, count) for one in samples]
