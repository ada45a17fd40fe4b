"""TRL's SFTTrainer on Accelerate's FSDP2, with its own loss and step."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from schedlang import TrainingProgram
from tests.judging.versions.trainer import model, step_arguments
from tests.judging.versions.trainer import ragged_batch as batch

__all__ = ["batch", "model"]
MICRO = 2  # micro-batches
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer",
    "ACCELERATE_USE_CPU": "true",
}


def program(model: Any, count: bool = True) -> TrainingProgram:
    """Return a fine-tuning program; `count`: the trainer gets the labels of all micro-batches."""
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from trl import SFTConfig, SFTTrainer

    os.environ.update(FSDP2)
    arguments = SFTConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        report_to=[],
        gradient_accumulation_steps=MICRO,
        gradient_checkpointing=False,
        bf16=False,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    table = InMemoryTable.from_pydict({"input_ids": [[1, 2]], "labels": [[1, 2]]})
    rows = Dataset(table, fingerprint="rows")  # required, but not read
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        data_collator=list,
        processing_class=tokenizer(),
    )
    wrapped = trainer.accelerator.prepare(model)
    trainer.model_wrapped = wrapped

    def step(batch: Any) -> Tensor:
        local = {name: v.chunk(dist.get_world_size())[dist.get_rank()] for name, v in batch.items()}
        micro = [{name: v.chunk(MICRO)[k] for name, v in local.items()} for k in range(MICRO)]
        trainer.current_gradient_accumulation_steps = MICRO
        step_args = step_arguments(trainer, micro) if count else [(args,) for args in micro]
        losses = [trainer.training_step(wrapped, *args) for args in step_args]
        return torch.stack(losses).sum()

    return TrainingProgram(wrapped, step)


def tokenizer() -> Any:
    """Return a tokenizer with the model's vocabulary, which the trainer requires."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    vocab = {"<pad>": 0, "<end>": 1} | {str(k): k for k in range(2, 24)}
    object_ = Tokenizer(WordLevel(vocab, unk_token="<end>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=object_, pad_token="<pad>", eos_token="<end>", unk_token="<end>"
    )


def uncounted(model: Any) -> TrainingProgram:
    """Wrong: each micro-batch counts its own labels."""
    return program(model, count=False)
