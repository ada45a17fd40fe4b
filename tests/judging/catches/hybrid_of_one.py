"""https://github.com/pytorch/pytorch/issues/154888: hybrid sharding over groups of one rank.

FSDP1 falls back to no sharding where the sharded dim of its mesh has one rank, and then reduces
gradients over that dim: over nobody. In torch 2.13.0, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from schedlang import TrainingProgram
from tests.judging.catches.parts import own, ranks
from tests.judging.catches.words import WIDTH, Words, loss

NAMED = r"4 of 4 .*: ranks differ and their sum is right: a sum over ranks is missing"


def model() -> nn.Module:
    """All rows on one rank."""
    return Words(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))


def _program(model: Any, **given: Any) -> TrainingProgram:
    device = torch.device("cpu")
    made = FullyShardedDataParallel(model, device_id=device, use_orig_params=True, **given)

    def step(batch: Any) -> Tensor:
        mine = {name: own(rows) for name, rows in batch.items()}
        value = loss(made(mine["ids"]), mine)
        value.backward()
        return value

    return TrainingProgram(made, step)


def wrong(model: Any) -> TrainingProgram:
    """As many replicas as there are ranks."""
    mesh = init_device_mesh("cpu", (ranks(), 1), mesh_dim_names=("replicas", "shards"))
    return _program(model, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)


def right(model: Any) -> TrainingProgram:
    """The same, said in plain words."""
    return _program(model, sharding_strategy=ShardingStrategy.NO_SHARD)
