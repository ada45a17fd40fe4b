"""https://github.com/pytorch/pytorch/issues/154888: hybrid sharding over groups of one rank.

FSDP1 falls back to no sharding if the sharded mesh dim has one rank, and then reduces gradients
over that dim only: not at all. In torch 2.13.0, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from schedlang import TrainingProgram
from tests.judging.catches.collectives import local_part, world_size
from tests.judging.catches.language_model import WIDTH, LanguageModel, loss

NAMED = r"4 of 4 .*: ranks differ and their sum is right: a sum over ranks is missing"


def model() -> nn.Module:
    """Return the model with all rows on one rank."""
    return LanguageModel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))


def _program(model: Any, **options: Any) -> TrainingProgram:
    device = torch.device("cpu")
    sharded = FullyShardedDataParallel(model, device_id=device, use_orig_params=True, **options)

    def step(batch: Any) -> Tensor:
        local = {name: local_part(rows) for name, rows in batch.items()}
        value = loss(sharded(local["ids"]), local)
        value.backward()
        return value

    return TrainingProgram(sharded, step)


def wrong(model: Any) -> TrainingProgram:
    """HYBRID_SHARD with as many replicas as ranks."""
    mesh = init_device_mesh("cpu", (world_size(), 1), mesh_dim_names=("replicas", "shards"))
    return _program(model, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)


def right(model: Any) -> TrainingProgram:
    """NO_SHARD, which replicates on all ranks."""
    return _program(model, sharding_strategy=ShardingStrategy.NO_SHARD)
