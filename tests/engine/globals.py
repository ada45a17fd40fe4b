"""Process-wide state that each rank needs for itself: saved and restored when the rank changes."""

from __future__ import annotations

import os
import warnings
from types import ModuleType
from typing import Any

import torch

from schedlang.runtime import loop_terms
from schedlang.runtime.comm import collectives, world
from schedlang.runtime.fusion import fuse, rewrite
from schedlang.runtime.kernel_injection import blind_queries
from schedlang.runtime.offload import offloaded_activations
from schedlang.runtime.rowwise_kernels import launch

# containers of the runtime that hold the state of one rank
PER_RANK: tuple[tuple[ModuleType, str], ...] = (
    (blind_queries, "_cache"),
    (collectives, "_listeners"),
    (fuse, "_counting_layers"),
    (launch, "_launchers"),
    (loop_terms, "_shards"),
    (offloaded_activations, "_listener"),
    (rewrite, "_watchers"),
    (world, "_entered"),
)
_RANK_VARIABLES = ("RANK", "LOCAL_RANK")

State = tuple[torch.dtype, torch.Tensor, list[Any], list[str | None], list[Any]]


def save() -> State:
    """Return the state of the current rank; containers are not copied."""
    return (
        torch.get_default_dtype(),
        torch.get_rng_state(),
        [getattr(module, name) for module, name in PER_RANK],
        [os.environ.get(name) for name in _RANK_VARIABLES],
        warnings.filters,  # type: ignore[list-item]
    )


def restore(state: State) -> None:
    """Install a rank's state in the process."""
    dtype, rng_state, containers, variables, filters = state
    torch.set_default_dtype(dtype)
    torch.set_rng_state(rng_state)
    for (module, name), container in zip(PER_RANK, containers):
        setattr(module, name, container)
    for name, variable in zip(_RANK_VARIABLES, variables):
        os.environ.pop(name, None) if variable is None else os.environ.__setitem__(name, variable)
    warnings.filters = filters


def initial_state(rank: int) -> State:
    """Return the state of a new rank, as in a process of its own."""
    rng_state = torch.Generator().manual_seed(0).get_state()
    containers = [type(getattr(module, name))() for module, name in PER_RANK]
    return (
        torch.float32,
        rng_state,
        containers,
        [str(rank)] * len(_RANK_VARIABLES),
        list(warnings.filters),
    )
