"""https://github.com/deepspeedai/DeepSpeed/issues/7718: ZeRO 2 forgets micro-batches.

Gradients of the micro-batches before the last are not in what is accumulated, the loss is right,
and ZeRO 1 and 3 are right, too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.catches.language_model import VOCAB, WIDTH, LanguageModel, loss
from tests.judging.deepspeed_engine import Engine

PACKAGE, WITH, WITHOUT = "deepspeed", ("0.18.2",), ("0.17.5", "0.18.3", "0.19.3", "0.19.8")
NAMED = r"4 parts of the batch count 0, 1, 0, 1 times what they should"
RANKS, PIECES = 2, 2

__all__ = ["loss"]


def model() -> nn.Module:
    """Return a language model with two inner layers."""
    return LanguageModel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))


def batch(seed: int) -> dict[str, Tensor]:
    """Return eight rows of six tokens."""
    draw = torch.Generator().manual_seed(seed)
    return {"ids": torch.randint(VOCAB, (8, 6), generator=draw)}


def program(model: Any) -> TrainingProgram:
    """Return the program: two ranks, two micro-batches, with accumulation set in the engine."""
    engine = Engine(model, stage=2, accumulated=PIECES)

    def step(batch: Any) -> Tensor:
        engine.write()
        total = torch.zeros((), dtype=torch.float64)
        for ids in batch["ids"].chunk(dist.get_world_size())[dist.get_rank()].chunk(PIECES):
            value = loss(engine.engine(ids), {"ids": ids})
            engine.engine.backward(value)
            total += value.detach() / PIECES
            if engine.engine.is_gradient_accumulation_boundary():
                engine.read()
            engine.engine.step()  # learning rate 0: only clears the gradients
        return total

    return TrainingProgram(engine.whole, step)
