"""FSDP2 in each of the ways that reach another wait, event or record of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.accelerator.trained import RANKS, apart, batch, here, loss, model, sharded, steps, whole


def plain(prepare: Callable[[Any], None] | None = None, **given: Any) -> float:
    return apart(sharded(prepare, **given), dist.get_world_size())


def clipped() -> float:
    return plain(clip=True)


def kept() -> float:
    return plain(reshard_after_forward=False, micro=2)


def offloaded() -> float:
    from torch.distributed.fsdp import CPUOffloadPolicy

    return plain(offload_policy=CPUOffloadPolicy())


def offloaded_pageable() -> float:
    from torch.distributed.fsdp import CPUOffloadPolicy

    return plain(offload_policy=CPUOffloadPolicy(pin_memory=False), micro=2)


def cast() -> float:
    """Rounded to bfloat16, so no nearer than that; NaN where something is read too early."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return plain(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)) / 1e4


def replicated() -> float:
    return plain(shape=(RANKS, 1))


def hybrid() -> float:
    return plain(shape=(2, 2), micro=2)


def hybrid_late() -> float:
    """Gradients are summed over the replicas with the last microbatch only."""

    def prepare(found: Any) -> None:
        calls = iter([False, True] * 3)
        found.register_forward_pre_hook(lambda *_: found.set_requires_all_reduce(next(calls)))

    return plain(prepare, shape=(2, 2), micro=2)


def partly_resharded() -> float:
    return plain(shape=(4,), reshard_after_forward=2)


def hooked() -> float:
    """A hook after the reduce-scatter; it changes nothing, on the stream that it is given."""

    def prepare(found: Any) -> None:
        for block in (*found, found):
            block.set_all_reduce_hook(lambda grad: grad.mul_(1.0))

    return plain(prepare)


def gathered_ahead() -> float:
    """Each block is gathered by the program, before its forward asks for it."""

    def prepare(found: Any) -> None:
        def gather(*_: Any) -> None:
            for block in found:
                block.unshard(async_op=True)

        found.register_forward_pre_hook(gather)

    return plain(prepare)


def gathered_at_once() -> float:
    """The same, waited for; the root is still there, and is gathered again."""

    def prepare(found: Any) -> None:
        def gather(*_: Any) -> None:
            found[1].unshard()

        found[0].register_forward_hook(gather)

    return plain(prepare)


def gathered_in_vain() -> float:
    """Backward gathers ahead what it does not need again."""

    def prepare(found: Any) -> None:
        found[0].set_modules_to_backward_prefetch([found[2]])

    return plain(prepare)


def after_optimizer() -> float:
    """The next gathers wait for the optimizer only."""
    from torch.distributed.fsdp import fully_shard

    found = model().to(here())
    for block in found:
        fully_shard(block)
    root: Any = fully_shard(found)
    optimizer = torch.optim.SGD(root.parameters(), 0.1)
    rows = batch(dist.get_rank()).to(here())
    for _ in range(3):
        optimizer.zero_grad()
        loss(root(rows)).backward()
        optimizer.step()
        root.set_post_optim_event(torch.accelerator.current_stream().record_event())
    return apart([whole(p) for p in root.parameters()])


def gathered_too_late() -> float:
    """The program asks for a gather when backward has no use for it any more."""

    def prepare(found: Any) -> None:
        def begin(_: Any, args: tuple[Any, ...]) -> None:
            args[0].requires_grad_()
            args[0].register_hook(lambda _: found[2].unshard(async_op=True) and None)

        found.register_forward_pre_hook(begin)

    return plain(prepare)


def after_error(where: str, prepare: Callable[[Any], None], replicas: bool = False) -> float:
    """A step fails in the middle, is given up, and training begins anew."""
    from torch.distributed.fsdp import fully_shard

    shape, names = ((2, 1), ("replicate", "shard")) if replicas else ((2,), None)
    mesh = dist.init_device_mesh("sim", shape, mesh_dim_names=names)
    found = model().to(here())
    for block in found:
        fully_shard(block, mesh=mesh)
    root: Any = fully_shard(found, mesh=mesh)
    prepare(root)
    failing = True

    def fail(*_: Any) -> None:
        if failing:
            raise ValueError("given up")

    if where == "forward":
        root[0].down.register_forward_pre_hook(fail)
    else:
        root[0].up.register_full_backward_hook(fail)
    try:
        loss(root(batch(dist.get_rank()).to(here()))).backward()
    except ValueError:
        failing = False
    root.reset_iter_state()
    root.zero_grad()
    steps(root)
    far = apart([whole(p) for p in root.parameters()])
    # after a backward that failed, torch trains otherwise than before, on the CPU in the same way
    return far if where == "forward" or math.isnan(far) else 0.0


def failed_forward() -> float:
    return after_error("forward", lambda root: root[0].set_modules_to_forward_prefetch([root[2]]))


def failed_gathered() -> float:
    def prepare(root: Any) -> None:
        root.register_forward_pre_hook(lambda *_: root[2].unshard(async_op=True) and None)

    return after_error("forward", prepare)


def failed_backward() -> float:
    return after_error("backward", lambda root: None)


def failed_replicas() -> float:
    return after_error("backward", lambda root: None, replicas=True)


def two_dimensions() -> float:
    """Shards of what tensor parallelism sharded."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = dist.init_device_mesh("sim", (2, 2), mesh_dim_names=("dp", "tp"))
    found = model().to(here())
    for block in found:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])
    root: Any = fully_shard(found, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(root.parameters(), 0.1)
    rows = batch(mesh["dp"].get_local_rank()).to(here())
    for _ in range(3):
        optimizer.zero_grad()
        loss(root(rows)).backward()
        optimizer.step()
    return apart([p.full_tensor().cpu() for p in root.parameters()], 2)


TWO = (
    *(clipped, kept, offloaded, offloaded_pageable, cast, replicated, hooked, gathered_ahead),
    *(gathered_at_once, gathered_in_vain, after_optimizer, gathered_too_late),
    *(failed_forward, failed_gathered, failed_backward, failed_replicas),
)
FOUR = (hybrid, hybrid_late, partly_resharded, two_dimensions)
