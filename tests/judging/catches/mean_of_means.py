"""https://github.com/huggingface/transformers/issues/34242: ranks with few labels weigh as all do.

DistributedDataParallel averages the gradients of each rank's mean over its own labels; the mean
over all labels of the batch is another one wherever rows are padded.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from schedlang import TrainingProgram
from tests.judging.catches.parts import own, ranks
from tests.judging.catches.words import VOCAB, Words

NAMED = r"the plain mean of .*2 parts"


def model() -> nn.Module:
    """All rows on one rank."""
    return Words(nn.Tanh())


def batch(seed: int) -> dict[str, Tensor]:
    """Four rows, of which the second half has fewer labels."""
    ids = torch.randint(VOCAB, (4, 6), generator=torch.Generator().manual_seed(seed))
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    labels[2:, 2:] = -100
    return {"ids": ids, "labels": labels}


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The mean over labels that count."""
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


def wrong(model: Any) -> TrainingProgram:
    """The mean of each rank."""
    replica = DistributedDataParallel(model)

    def step(batch: Any) -> Tensor:
        mine = {name: own(rows) for name, rows in batch.items()}
        value = loss(replica(mine["ids"]), mine)
        value.backward()
        return value

    return TrainingProgram(replica, step)


def right(model: Any) -> TrainingProgram:
    """The sum of each rank, over the count of all."""
    replica = DistributedDataParallel(model)

    def step(batch: Any) -> Tensor:
        count = (batch["labels"] != -100).sum()
        mine = {name: own(rows) for name, rows in batch.items()}
        scores, labels = replica(mine["ids"]).flatten(0, 1), mine["labels"].flatten()
        value = F.cross_entropy(scores, labels, reduction="sum") / count * ranks()
        value.backward()
        return value

    return TrainingProgram(replica, step)
