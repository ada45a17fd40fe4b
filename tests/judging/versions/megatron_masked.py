"""https://github.com/NVIDIA/Megatron-LM/issues/7452 (9): masked tokens under context parallelism.

A step of Megatron's schedules divides the summed loss by this rank's count of unmasked tokens.
Ranks with other tokens of the same rows have other counts; then gradients are averaged.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from schedlang import TrainingProgram
from tests.judging.catches.collectives import average_grads, local_part, rank_sum
from tests.judging.catches.language_model import WIDTH, LanguageModel
from tests.judging.versions.balanced import padded_batch
from tests.judging.versions.balanced import token_loss as loss
from tests.judging.versions.megatron import PACKAGE, WITH, WITHOUT

NAMED = r"plain mean of what 2 parts of the words give by themselves, but they weigh 0\.\d+, 0\.\d+"
RANKS = 2

__all__ = ["PACKAGE", "WITH", "WITHOUT", "loss"]


def model() -> nn.Module:
    """Return the model with all tokens on one rank."""
    return LanguageModel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))


def batch(seed: int) -> dict[str, Tensor]:
    """Return rows whose ends are padding."""
    return padded_batch(seed, 4, 3)


def program(model: Any, mended: bool = False) -> TrainingProgram:
    """Return the program with half of the tokens of all rows on each rank."""
    from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=2)
    config.calculate_per_token_loss = mended

    def step(batch: Any) -> Tensor:
        local = {name: local_part(tensor, 1) for name, tensor in batch.items()}
        count = (local["labels"] != -100).sum()

        def counted(scores: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            return loss(scores, local, "sum"), count, {}

        scores, sizes = model(local["ids"]), {"cp_group_size": dist.get_world_size()}
        value, _ = forward_step_calc_loss(
            model, scores, counted, config, None, False, 1, [], **sizes, is_last_stage=True
        )
        if mended:  # as Megatron divides gradients at the end of a step
            value = value * dist.get_world_size() / rank_sum(count)
        value.backward()
        average_grads(model)
        return value

    return TrainingProgram(model, step)


def mended(model: Any) -> TrainingProgram:
    """The fixed program: divided by the tokens of all ranks."""
    return program(model, mended=True)
