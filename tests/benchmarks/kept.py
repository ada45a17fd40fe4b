"""The bytes of what autograd keeps between a forward and its backward, whoever computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor


def kept_bytes(step: Callable[[], Any]) -> int:
    """The storages that autograd saved during a step, each once, parameters left out.

    Of a step with one forward before one backward, this is the most that is kept at once.
    """
    sizes: dict[int, int] = {}
    held: list[torch.Tensor] = []  # no storage is freed and its address used again meanwhile
    weights: set[int] = set()

    def keep(saved: torch.Tensor) -> torch.Tensor:
        tensor = saved._local_tensor if isinstance(saved, DTensor) else saved
        tensor = tensor.elem if isinstance(tensor, AsyncCollectiveTensor) else tensor
        storage = tensor.untyped_storage()
        if isinstance(saved, nn.Parameter) or isinstance(tensor, nn.Parameter):
            weights.add(storage.data_ptr())
        sizes[storage.data_ptr()] = storage.nbytes()
        held.append(tensor)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept):
        step()
    return sum(size for place, size in sizes.items() if place not in weights)
