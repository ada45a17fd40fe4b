"""https://github.com/allenai/open-instruct/pull/1498: micro-batches that DeepSpeed is not told of.

An engine that accumulates nothing by itself takes each backward for the last before a step: ZeRO 2
then forgets the gradients of those before, in some versions; one raises.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from schedlang import TrainingProgram
from tests.judging.catches.words import loss
from tests.judging.deepspeed_engine import Engine
from tests.judging.versions.zero_accumulated import PACKAGE, PIECES, RANKS, batch, model

WITH, WITHOUT = ("0.18.3", "0.19.3"), ("0.17.5", "0.19.8")
NAMED = r"4 parts of the batch count 0, 1, 0, 1 times what they should"

__all__ = ["PACKAGE", "RANKS", "batch", "loss", "model"]


def program(model: Any, told: bool = False) -> TrainingProgram:
    """Two ranks with two micro-batches each; `told`: which of them is the last."""
    made = Engine(model, stage=2)

    def step(batch: Any) -> Tensor:
        made.write()
        total = torch.zeros((), dtype=torch.float64)
        pieces = batch["ids"].chunk(dist.get_world_size())[dist.get_rank()].chunk(PIECES)
        for place, ids in enumerate(pieces):
            if told:
                made.engine.set_gradient_accumulation_boundary(place == PIECES - 1)
            value = loss(made.engine(ids), {"ids": ids}) / PIECES
            made.engine.backward(value)
            total += value.detach()
        made.read()
        made.engine.step()  # at rate 0: forgets the gradients
        return total

    return TrainingProgram(made.whole, step)


def mended(model: Any) -> TrainingProgram:
    """The same, where the engine is told which backward is the last."""
    return program(model, told=True)
