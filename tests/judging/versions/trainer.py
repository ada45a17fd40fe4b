"""Steps of transformers' Trainer by its own methods, in any version."""

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


def ragged_batch(seed: int) -> dict[str, Tensor]:
    """Return eight rows with different numbers of labels, more in the first half."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 24, (8, 10), generator=draw)
    padding = torch.arange(10) >= torch.tensor([10, 9, 8, 9, 5, 4, 6, 5])[:, None]
    return {
        "input_ids": ids.masked_fill(padding, 0),
        "attention_mask": (~padding).long(),
        "labels": ids.masked_fill(padding | (torch.arange(10) == 0), -100),  # no token predicts it
    }


def even_batch(seed: int) -> dict[str, Tensor]:
    """Return eight rows without padding: all parts have equal weight."""
    ids = torch.randint(1, 24, (8, 10), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def trainer_program(model: Any, accumulated: int, **arguments: Any) -> TrainingProgram:
    """Return a program of the trainer on this rank's rows, with `accumulated` micro-batches."""
    from transformers import Trainer, TrainingArguments

    options = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        report_to=[],
        gradient_accumulation_steps=accumulated,
        **arguments,
    )
    trainer = Trainer(model=model, args=options)
    wrapped = trainer.accelerator.prepare(model) if dist.get_world_size() > 1 else model

    def step(batch: Any) -> Tensor:
        local = {
            name: rows.chunk(dist.get_world_size())[dist.get_rank()] for name, rows in batch.items()
        }
        chunks = {name: rows.chunk(accumulated) for name, rows in local.items()}
        micro = [{name: rows[k] for name, rows in chunks.items()} for k in range(accumulated)]
        trainer.current_gradient_accumulation_steps = accumulated
        losses = [trainer.training_step(wrapped, *args) for args in step_arguments(trainer, micro)]
        return torch.stack(losses).sum()

    return TrainingProgram(wrapped, step)


def step_arguments(trainer: Any, micro: list[dict[str, Tensor]]) -> list[tuple[Any, ...]]:
    """Return the arguments of each training step: a micro-batch, and the label count of all."""
    if not hasattr(trainer, "get_batch_samples"):  # before 4.46
        return [(micro_batch,) for micro_batch in micro]
    parameters = inspect.signature(trainer.get_batch_samples).parameters
    device = (torch.device("cpu"),) if "device" in parameters else ()
    samples, count = trainer.get_batch_samples(iter(micro), len(micro), *device)
    return [(micro_batch, count) for micro_batch in samples]
