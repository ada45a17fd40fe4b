"""https://github.com/ByteDance-Seed/VeOmni/pull/1086: DDP over rows, and tokens in parts.

Gradients are averaged over ranks with different rows. Ranks with other tokens of the same rows keep
their own gradients.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from schedlang import TrainingProgram
from tests.judging.catches.collectives import local_part, world_size
from tests.judging.catches.language_model import VOCAB, LanguageModel, program_pair

NAMED = r"ranks differ and their mean is right: they are not averaged"


def model() -> nn.Module:
    """Return the model with all tokens on one rank."""
    return LanguageModel(nn.Tanh())


def _program(model: Any, all_ranks: bool) -> TrainingProgram:
    own_group = dist.new_subgroups(1)[0]
    module = DistributedDataParallel(
        model, process_group=dist.group.WORLD if all_ranks else own_group
    )

    def step(batch: Any) -> Tensor:
        ids = batch["ids"]
        targets = local_part(F.pad(ids[:, 1:], (0, 1), value=-100), 1)
        scores = module(local_part(ids, 1)).reshape(-1, VOCAB)
        value = F.cross_entropy(scores, targets.flatten(), reduction="sum") / ids[:, 1:].numel()
        value = value * world_size()
        value.backward()
        return value

    return TrainingProgram(module, step)


# bug: ranks of other rows: here there are none; fixed: all ranks
wrong, right = program_pair(_program, False, True)
