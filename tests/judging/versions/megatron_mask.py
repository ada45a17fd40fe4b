"""https://github.com/NVIDIA/Megatron-LM/issues/7452 (5): the padding of a part of the words.

A model that is given the groups that it is split over scatters its words there, and the mask of
padding, of which the balance of experts asks, over the global group of tensor parallelism.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from schedlang import TrainingProgram
from tests.judging.versions.balanced import Balanced as model
from tests.judging.versions.balanced import loss, megatron_router, of_words, padded, tracked
from tests.judging.versions.megatron import PACKAGE, WITH, WITHOUT, Square

NAMED = r"the gradient of the output of `embed`: .*right before it: `router`"
RANKS = 4

__all__ = ["PACKAGE", "WITH", "WITHOUT", "loss", "model"]


def batch(seed: int) -> dict[str, Tensor]:
    """One row, for the balance of rows is not the mean of theirs."""
    return padded(seed, 1, 5)


def program(model: Any, mended: bool = False) -> TrainingProgram:
    """One row twice, over pairs of ranks; words over every other rank."""
    from megatron.core import tensor_parallel
    from megatron.core.models.gpt.gpt_model import GPTModel

    square = Square.made()
    kinds = {"tp": square.split, "cp": square.alone, "tp_cp": square.split, "tp_dp_cp": None}
    model.router = megatron_router(
        model.router, "aux_loss", **kinds, sequence_parallel=True, tensor_model_parallel_size=2
    )
    place = dist.get_rank(square.split)

    def embedded(input_ids: Tensor, position_ids: Any) -> Tensor:
        words = model.embed(input_ids).transpose(0, 1)
        return tensor_parallel.scatter_to_sequence_parallel_region(words, square.split)

    given: Any = SimpleNamespace(
        config=model.router.config, pre_process=True, embedding=embedded, training=True
    )
    given.position_embedding_type, given.mtp_process = "none", False

    def step(batch: Any) -> Tensor:
        padding = batch["labels"] == -100
        x, *_, mask = GPTModel._preprocess(given, batch["ids"], None, padding_mask=padding)
        if mended:
            mask = padding.chunk(2, 1)[place]
        shares, _ = model.router(x, mask.transpose(0, 1))
        scores = model.mixed(x, shares.reshape(*x.shape[:2], -1)).transpose(0, 1)
        mine = {"labels": batch["labels"].chunk(2, 1)[place]}
        value = of_words(scores, mine, "sum") / (~padding).sum()
        value.backward()
        for name, p in model.named_parameters():
            if name != "embed.weight":  # the scatter's own backward gathers
                dist.all_reduce(p.grad, group=square.split)
        return 2 * (value + tracked("load_balancing_loss"))

    return TrainingProgram(model, step)


def mended(model: Any) -> TrainingProgram:
    """The same with this rank's part of the mask."""
    return program(model, mended=True)
