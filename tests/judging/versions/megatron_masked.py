"""https://github.com/NVIDIA/Megatron-LM/issues/7452 (9): masked words under context parallelism.

A step of Megatron's schedules divides a sum of losses by the words that count on this rank. Ranks
with other words of the same rows have another count; then gradients are averaged.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.catches.parts import average, own, total
from tests.judging.catches.words import WIDTH, Words
from tests.judging.versions.balanced import of_words as loss
from tests.judging.versions.balanced import padded
from tests.judging.versions.megatron import PACKAGE, WITH, WITHOUT

NAMED = r"plain mean of what 2 parts of the words give by themselves, but they weigh 0\.\d+, 0\.\d+"
RANKS = 2

__all__ = ["PACKAGE", "WITH", "WITHOUT", "loss"]


def model() -> nn.Module:
    """All words on one rank."""
    return Words(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))


def batch(seed: int) -> dict[str, Tensor]:
    """Rows whose ends do not count."""
    return padded(seed, 4, 3)


def program(model: Any, mended: bool = False) -> TrainingProgram:
    """Each rank has a half of the words of all rows."""
    from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=2)
    config.calculate_per_token_loss = mended

    def step(batch: Any) -> Tensor:
        mine = {name: own(words, 1) for name, words in batch.items()}
        count = (mine["labels"] != -100).sum()

        def counted(scores: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            return loss(scores, mine, "sum"), count, {}

        scores, given = model(mine["ids"]), {"cp_group_size": dist.get_world_size()}
        value, _ = forward_step_calc_loss(
            model, scores, counted, config, None, False, 1, [], **given, is_last_stage=True
        )
        if mended:  # as it divides gradients at the end of a step
            value = value * dist.get_world_size() / total(count)
        value.backward()
        average(model)
        return value

    return TrainingProgram(model, step)


def mended(model: Any) -> TrainingProgram:
    """The same, divided by the words of all ranks."""
    return program(model, mended=True)
