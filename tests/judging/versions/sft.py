"""TRL's SFTTrainer on FSDP2 of Accelerate: its own loss and its own step."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from schedlang import TrainingProgram
from tests.judging.versions.trainer import counted, model
from tests.judging.versions.trainer import ragged as batch

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
    """Fine-tune on this rank's rows; `count`: it is told the labels of all micro-batches."""
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from trl import SFTConfig, SFTTrainer

    os.environ.update(FSDP2)
    asked = SFTConfig(
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
    rows = Dataset(table, fingerprint="rows")  # which is asked for, and not read
    trainer = SFTTrainer(
        model=model, args=asked, train_dataset=rows, data_collator=list, processing_class=words()
    )
    wrapped = trainer.accelerator.prepare(model)
    trainer.model_wrapped = wrapped

    def step(batch: Any) -> Tensor:
        own = {name: v.chunk(dist.get_world_size())[dist.get_rank()] for name, v in batch.items()}
        micro = [{name: v.chunk(MICRO)[at] for name, v in own.items()} for at in range(MICRO)]
        trainer.current_gradient_accumulation_steps = MICRO
        given = counted(trainer, micro) if count else [(one,) for one in micro]
        losses = [trainer.training_step(wrapped, *one) for one in given]
        return torch.stack(losses).sum()

    return TrainingProgram(wrapped, step)


def words() -> Any:
    """A tokenizer of as many words as the model has; its trainer asks for one."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    known = {"<pad>": 0, "<end>": 1} | {str(k): k for k in range(2, 24)}
    object_ = Tokenizer(WordLevel(known, unk_token="<end>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=object_, pad_token="<pad>", eos_token="<end>", unk_token="<end>"
    )


def uncounted(model: Any) -> TrainingProgram:
    """Each micro-batch counts its own labels."""
    return program(model, count=False)
