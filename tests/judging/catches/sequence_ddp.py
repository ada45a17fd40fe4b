"""https://github.com/ByteDance-Seed/VeOmni/pull/1086: DDP over rows, and words in parts.

Gradients are averaged over the ranks that have other rows. Those that have other words of the same
rows keep their own.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from schedlang import TrainingProgram
from tests.judging.catches.parts import own, ranks
from tests.judging.catches.words import VOCAB, Words, pair

NAMED = r"ranks differ and their mean is right: they are not averaged"


def model() -> nn.Module:
    """All words on one rank."""
    return Words(nn.Tanh())


def _program(model: Any, words: bool) -> TrainingProgram:
    alone = dist.new_subgroups(1)[0]
    module = DistributedDataParallel(model, process_group=dist.group.WORLD if words else alone)

    def step(batch: Any) -> Tensor:
        ids = batch["ids"]
        wanted = own(F.pad(ids[:, 1:], (0, 1), value=-100), 1)
        scores = module(own(ids, 1)).reshape(-1, VOCAB)
        value = F.cross_entropy(scores, wanted.flatten(), reduction="sum") / ids[:, 1:].numel()
        value = value * ranks()
        value.backward()
        return value

    return TrainingProgram(module, step)


# as it was written: ranks of other rows: here there are none; mended: all ranks
wrong, right = pair(_program, False, True)
