"""Trackers of the running module, program, stage and rank, to inject a bug at one place only."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from schedlang.passes.lower import build
from schedlang.runtime import program
from schedlang.runtime.forward import layer_of
from schedlang.runtime.sharding import sharded_layer
from tests.zoo.bug import Patch


def module_tracker(patch: Patch) -> Callable[[], str]:
    """Return a function that names the innermost running sharded module; "" outside any."""
    names: dict[int, str] = {}
    local = threading.local()
    shard_modules, original_call = build.shard_modules, sharded_layer.ShardedLayer.__call__

    def noting(model: Any, traced: Any, with_group: Any) -> None:
        shard_modules(model, traced, with_group)
        for fqn in traced.edges:
            names[id(layer_of(model.get_submodule(fqn), "sharded"))] = fqn

    def entering(self: Any, *args: Any, **kwargs: Any) -> Any:
        stack = local.__dict__.setdefault("stack", [""])
        stack.append(names.get(id(self), stack[-1]))
        try:
            return original_call(self, *args, **kwargs)
        finally:
            stack.pop()

    patch.setattr(build, "shard_modules", noting)
    patch.setattr(sharded_layer.ShardedLayer, "__call__", entering)
    return lambda: local.__dict__.get("stack", [""])[-1]


def program_tracker(patch: Patch, *methods: str) -> Callable[[], program.Program | None]:
    """Return a function that returns the program that runs one of these methods, or None."""
    running: list[program.Program] = []
    for name in methods or ("train_step",):
        original = getattr(program.Program, name)

        def noting(self: Any, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
            running[:] = [self]
            try:
                return _original(self, *args, **kwargs)
            finally:
                running.clear()

        patch.setattr(program.Program, name, noting)
    return lambda: running[0] if running else None


def stage_of(assembly: Any) -> int:
    """Return this rank's stage index; 0 without a pipeline."""
    if assembly.stage_axis is None:
        return 0
    return int(assembly.ranks.mesh.index(assembly.ranks.rank, assembly.stage_axis))


def rank() -> int:
    """Return the global rank."""
    return dist.get_rank() if dist.is_initialized() else 0
