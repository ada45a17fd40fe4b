"""https://github.com/NVIDIA/Megatron-LM/issues/7452 (5): the padding of a part of the tokens.

A model with its own groups scatters its tokens over them, but the padding mask, which the balance
of experts needs, over the global tensor parallel group.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from schedlang import TrainingProgram
from tests.judging.versions.balanced import Balanced as model
from tests.judging.versions.balanced import (
    loss,
    megatron_router,
    padded_batch,
    token_loss,
    tracked_balance,
)
from tests.judging.versions.megatron import PACKAGE, WITH, WITHOUT, RankGrid

NAMED = r"the gradient of the output of `embed`: .*right before it: `router`"
RANKS = 4

__all__ = ["PACKAGE", "WITH", "WITHOUT", "loss", "model"]


def batch(seed: int) -> dict[str, Tensor]:
    """Return one row: the balance of several rows is not the mean of their balances."""
    return padded_batch(seed, 1, 5)


def program(model: Any, mended: bool = False) -> TrainingProgram:
    """Return the program: the row on each pair of ranks, its tokens over every other rank."""
    from megatron.core import tensor_parallel
    from megatron.core.models.gpt.gpt_model import GPTModel

    square = RankGrid.made()
    kinds = {"tp": square.split, "cp": square.alone, "tp_cp": square.split, "tp_dp_cp": None}
    model.router = megatron_router(
        model.router, "aux_loss", **kinds, sequence_parallel=True, tensor_model_parallel_size=2
    )
    index = dist.get_rank(square.split)

    def embedded(input_ids: Tensor, position_ids: Any) -> Tensor:
        embeddings = model.embed(input_ids).transpose(0, 1)
        return tensor_parallel.scatter_to_sequence_parallel_region(embeddings, square.split)

    gpt: Any = SimpleNamespace(
        config=model.router.config, pre_process=True, embedding=embedded, training=True
    )
    gpt.position_embedding_type, gpt.mtp_process = "none", False

    def step(batch: Any) -> Tensor:
        padding = batch["labels"] == -100
        x, *_, mask = GPTModel._preprocess(gpt, batch["ids"], None, padding_mask=padding)
        if mended:
            mask = padding.chunk(2, 1)[index]
        shares, _ = model.router(x, mask.transpose(0, 1))
        scores = model.mixed(x, shares.reshape(*x.shape[:2], -1)).transpose(0, 1)
        local = {"labels": batch["labels"].chunk(2, 1)[index]}
        value = token_loss(scores, local, "sum") / (~padding).sum()
        value.backward()
        for name, p in model.named_parameters():
            if name != "embed.weight":  # the scatter's backward gathers
                dist.all_reduce(p.grad, group=square.split)
        return 2 * (value + tracked_balance("load_balancing_loss"))

    return TrainingProgram(model, step)


def mended(model: Any) -> TrainingProgram:
    """The fixed program, with this rank's part of the mask."""
    return program(model, mended=True)
