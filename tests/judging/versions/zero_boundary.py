"""https://github.com/allenai/open-instruct/pull/1498: micro-batches that DeepSpeed is not told of.

An engine without accumulation takes each backward for the last one before a step: ZeRO 2 then
loses the earlier gradients in some versions; one version raises.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from schedlang import TrainingProgram
from tests.judging.catches.language_model import loss
from tests.judging.deepspeed_engine import Engine
from tests.judging.versions.zero_accumulated import PACKAGE, PIECES, RANKS, batch, model

WITH, WITHOUT = ("0.18.3", "0.19.3"), ("0.17.5", "0.19.8")
NAMED = r"4 parts of the batch count 0, 1, 0, 1 times what they should"

__all__ = ["PACKAGE", "RANKS", "batch", "loss", "model"]


def program(model: Any, told: bool = False) -> TrainingProgram:
    """Return the program: two ranks, two micro-batches; `told`: the engine knows the last one."""
    engine = Engine(model, stage=2)

    def step(batch: Any) -> Tensor:
        engine.write()
        total = torch.zeros((), dtype=torch.float64)
        micros = batch["ids"].chunk(dist.get_world_size())[dist.get_rank()].chunk(PIECES)
        for k, ids in enumerate(micros):
            if told:
                engine.engine.set_gradient_accumulation_boundary(k == PIECES - 1)
            value = loss(engine.engine(ids), {"ids": ids}) / PIECES
            engine.engine.backward(value)
            total += value.detach()
        engine.read()
        engine.engine.step()  # learning rate 0: only clears the gradients
        return total

    return TrainingProgram(engine.whole, step)


def mended(model: Any) -> TrainingProgram:
    """The fixed program: the engine is told which backward is the last."""
    return program(model, told=True)
