"""https://github.com/pytorch/torchtitan/issues/1733: a pipeline's schedule scales what is there.

`scale_grads` of torch's schedules divides all gradients by the micro-batches after each step.  With
accumulation over two steps those of the first are divided twice.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from schedlang import TrainingProgram
from tests.judging.catches import words
from tests.judging.catches.words import pair

NAMED = r"\A(?!(?s:.*)the output of)(?s:.*)2 parts of the batch count 0.5, 1 times"
STEPS, MICRO = 2, 2


def batch(seed: int) -> dict[str, Tensor]:
    """Four rows of six words."""
    return {"input": words.batch(seed)["ids"]}


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The mean over all words that have one before them."""
    return words.loss(output, {"ids": batch["input"]})


def model() -> nn.Module:
    """Both stages."""
    return nn.Sequential(
        nn.Embedding(words.VOCAB, words.WIDTH),
        nn.Tanh(),
        nn.Linear(words.WIDTH, words.VOCAB, bias=False),
    )


def _program(model: Any, scaled_by_the_schedule: bool) -> TrainingProgram:
    first = dist.get_rank() == 0
    part = model[:2] if first else model[2:]
    stage = PipelineStage(part, dist.get_rank(), 2, "cpu")
    shares = STEPS if scaled_by_the_schedule else STEPS * MICRO

    def share(output: Any, ids: Any) -> Any:
        return words.loss(output, {"ids": ids}) / shares

    schedule = ScheduleGPipe(stage, MICRO, loss_fn=share, scale_grads=scaled_by_the_schedule)

    def step(batch: Any) -> Any:
        losses: list[Any] = []
        for ids in batch["input"].chunk(STEPS):
            if first:
                schedule.step(ids)
            else:
                found: list[Any] = []
                schedule.step(target=ids, losses=found)
                losses += found
        return None if first else sum(losses) * shares / (STEPS * MICRO)

    return TrainingProgram(model[:1] if first else model[2:], step)


# as it was written: the schedule divides; mended: the loss is divided by the micro-batches of all
# steps
wrong, right = pair(_program, True, False)
