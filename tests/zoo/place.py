"""Where the runtime is while it runs, so that a bug can be injected at one place only."""

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


def sharded_module(patch: Patch) -> Callable[[], str]:
    """A function that names the innermost sharded module that is running; "" outside any."""
    names: dict[int, str] = {}
    here = threading.local()
    shard_modules, call = build.shard_modules, sharded_layer.ShardedLayer.__call__

    def noting(model: Any, traced: Any, with_group: Any) -> None:
        shard_modules(model, traced, with_group)
        for fqn in traced.edges:
            names[id(layer_of(model.get_submodule(fqn), "sharded"))] = fqn

    def entering(self: Any, *args: Any, **kwargs: Any) -> Any:
        stack = here.__dict__.setdefault("stack", [""])
        stack.append(names.get(id(self), stack[-1]))
        try:
            return call(self, *args, **kwargs)
        finally:
            stack.pop()

    patch.setattr(build, "shard_modules", noting)
    patch.setattr(sharded_layer.ShardedLayer, "__call__", entering)
    return lambda: here.__dict__.get("stack", [""])[-1]


def running_program(patch: Patch, *methods: str) -> Callable[[], program.Program | None]:
    """A function that gives the program that runs one of these methods; None: none does."""
    here: list[program.Program] = []
    for name in methods or ("train_step",):
        plain = getattr(program.Program, name)

        def noting(self: Any, *args: Any, _plain: Any = plain, **kwargs: Any) -> Any:
            here[:] = [self]
            try:
                return _plain(self, *args, **kwargs)
            finally:
                here.clear()

        patch.setattr(program.Program, name, noting)
    return lambda: here[0] if here else None


def stage_of(assembly: Any) -> int:
    """The place of this rank along the pipeline's axis; 0 without one."""
    if assembly.stage_axis is None:
        return 0
    return int(assembly.ranks.mesh.index(assembly.ranks.rank, assembly.stage_axis))


def rank() -> int:
    """This rank's number in the world."""
    return dist.get_rank() if dist.is_initialized() else 0
