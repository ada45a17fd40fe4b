"""What is one for the whole process, and has to be another for each rank."""

from __future__ import annotations

import os
import warnings
from types import ModuleType
from typing import Any

import torch

from schedlang.runtime.comm import collectives, world
from schedlang.runtime.fusion import fuse, rewrite
from schedlang.runtime.kernel_injection import blind_queries
from schedlang.runtime.offload import offloaded_activations
from schedlang.runtime.rowwise_kernels import launch

# containers of the runtime that hold what one rank is doing
OWN: tuple[tuple[ModuleType, str], ...] = (
    (blind_queries, "_cache"),
    (collectives, "_listeners"),
    (fuse, "_counting_layers"),
    (launch, "_launchers"),
    (offloaded_activations, "_listener"),
    (rewrite, "_watchers"),
    (world, "_entered"),
)
_PLACES = ("RANK", "LOCAL_RANK")

State = tuple[torch.dtype, torch.Tensor, list[Any], list[str | None], list[Any]]


def save() -> State:
    """Of the rank that computes now; what it holds is its own, not copied."""
    return (
        torch.get_default_dtype(),
        torch.get_rng_state(),
        [getattr(module, name) for module, name in OWN],
        [os.environ.get(name) for name in _PLACES],
        warnings.filters,  # type: ignore[list-item]
    )


def restore(state: State) -> None:
    """Make it that of the process."""
    dtype, drawn, own, places, filters = state
    torch.set_default_dtype(dtype)
    torch.set_rng_state(drawn)
    for (module, name), value in zip(OWN, own):
        setattr(module, name, value)
    for name, place in zip(_PLACES, places):
        os.environ.pop(name, None) if place is None else os.environ.__setitem__(name, place)
    warnings.filters = filters


def fresh(rank: int) -> State:
    """Of a rank that has done nothing yet, as in a process of its own."""
    drawn = torch.Generator().manual_seed(0).get_state()
    own = [type(getattr(module, name))() for module, name in OWN]
    return torch.float32, drawn, own, [str(rank)] * len(_PLACES), list(warnings.filters)
