"""https://github.com/huggingface/transformers/issues/34242: ranks with few labels weigh as all do.

DistributedDataParallel averages gradients of each rank's mean over its own labels; with padded
rows that differs from the mean over all labels of the batch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from schedlang import TrainingProgram
from tests.judging.catches.collectives import local_part, world_size
from tests.judging.catches.language_model import VOCAB, LanguageModel

NAMED = r"the plain mean of .*2 parts"


def model() -> nn.Module:
    """Return the model with all rows on one rank."""
    return LanguageModel(nn.Tanh())


def batch(seed: int) -> dict[str, Tensor]:
    """Return four rows, of which the second half has fewer labels."""
    ids = torch.randint(VOCAB, (4, 6), generator=torch.Generator().manual_seed(seed))
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    labels[2:, 2:] = -100
    return {"ids": ids, "labels": labels}


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean over labels that count."""
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


def wrong(model: Any) -> TrainingProgram:
    """Use each rank's own mean."""
    replica = DistributedDataParallel(model)

    def step(batch: Any) -> Tensor:
        local = {name: local_part(rows) for name, rows in batch.items()}
        value = loss(replica(local["ids"]), local)
        value.backward()
        return value

    return TrainingProgram(replica, step)


def right(model: Any) -> TrainingProgram:
    """Use each rank's sum, divided by the label count of all ranks."""
    replica = DistributedDataParallel(model)

    def step(batch: Any) -> Tensor:
        count = (batch["labels"] != -100).sum()
        local = {name: local_part(rows) for name, rows in batch.items()}
        scores, labels = replica(local["ids"]).flatten(0, 1), local["labels"].flatten()
        value = F.cross_entropy(scores, labels, reduction="sum") / count * world_size()
        value.backward()
        return value

    return TrainingProgram(replica, step)
