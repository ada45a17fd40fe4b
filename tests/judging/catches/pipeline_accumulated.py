"""https://github.com/pytorch/torchtitan/issues/1733: a pipeline's schedule scales what is there.

`scale_grads` of torch's schedules divides all gradients by the micro-batches after each step.  With
accumulation over two steps the gradients of the first step are divided twice.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from schedlang import TrainingProgram
from tests.judging.catches import language_model
from tests.judging.catches.language_model import program_pair

NAMED = r"\A(?!(?s:.*)the output of)(?s:.*)2 parts of the batch count 0.5, 1 times"
STEPS, MICRO = 2, 2


def batch(seed: int) -> dict[str, Tensor]:
    """Return four rows of six tokens."""
    return {"input": language_model.batch(seed)["ids"]}


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean over all tokens except the first of each row."""
    return language_model.loss(output, {"ids": batch["input"]})


def model() -> nn.Module:
    """Return the model of both stages."""
    return nn.Sequential(
        nn.Embedding(language_model.VOCAB, language_model.WIDTH),
        nn.Tanh(),
        nn.Linear(language_model.WIDTH, language_model.VOCAB, bias=False),
    )


def _program(model: Any, scaled_by_the_schedule: bool) -> TrainingProgram:
    first = dist.get_rank() == 0
    part = model[:2] if first else model[2:]
    stage = PipelineStage(part, dist.get_rank(), 2, "cpu")
    shares = STEPS if scaled_by_the_schedule else STEPS * MICRO

    def share(output: Any, ids: Any) -> Any:
        return language_model.loss(output, {"ids": ids}) / shares

    schedule = ScheduleGPipe(stage, MICRO, loss_fn=share, scale_grads=scaled_by_the_schedule)

    def step(batch: Any) -> Any:
        losses: list[Any] = []
        for ids in batch["input"].chunk(STEPS):
            if first:
                schedule.step(ids)
            else:
                step_losses: list[Any] = []
                schedule.step(target=ids, losses=step_losses)
                losses += step_losses
        return None if first else sum(losses) * shares / (STEPS * MICRO)

    return TrainingProgram(model[:1] if first else model[2:], step)


# bug: the schedule divides; fixed: the loss is divided by the micro-batches of all
# steps
wrong, right = program_pair(_program, True, False)
