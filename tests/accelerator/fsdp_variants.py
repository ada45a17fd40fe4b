"""FSDP2: one variant for each of its waits, events and records."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.accelerator.torch_training import (
    RANKS,
    batch,
    fsdp,
    full_parameter,
    local_device,
    loss,
    max_error,
    model,
    train_steps,
)


def fsdp_error(prepare: Callable[[Any], None] | None = None, **options: Any) -> float:
    return max_error(fsdp(prepare, **options), dist.get_world_size())


def clipped() -> float:
    return fsdp_error(clip=True)


def not_resharded() -> float:
    return fsdp_error(reshard_after_forward=False, micro=2)


def offloaded() -> float:
    from torch.distributed.fsdp import CPUOffloadPolicy

    return fsdp_error(offload_policy=CPUOffloadPolicy())


def offloaded_pageable() -> float:
    from torch.distributed.fsdp import CPUOffloadPolicy

    return fsdp_error(offload_policy=CPUOffloadPolicy(pin_memory=False), micro=2)


def bfloat16() -> float:
    """Round to bfloat16, so the error is scaled; NaN where something is read too early."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return fsdp_error(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)) / 1e4


def replicated() -> float:
    return fsdp_error(shape=(RANKS, 1))


def hybrid() -> float:
    return fsdp_error(shape=(2, 2), micro=2)


def late_all_reduce() -> float:
    """Gradients are summed over the replicas with the last microbatch only."""

    def prepare(root: Any) -> None:
        calls = iter([False, True] * 3)
        root.register_forward_pre_hook(lambda *_: root.set_requires_all_reduce(next(calls)))

    return fsdp_error(prepare, shape=(2, 2), micro=2)


def partly_resharded() -> float:
    return fsdp_error(shape=(4,), reshard_after_forward=2)


def all_reduce_hook() -> float:
    """A hook after the reduce-scatter; it changes nothing, and runs on the stream it is given."""

    def prepare(root: Any) -> None:
        for block in (*root, root):
            block.set_all_reduce_hook(lambda grad: grad.mul_(1.0))

    return fsdp_error(prepare)


def gathered_ahead() -> float:
    """The program gathers each block before its forward asks for it."""

    def prepare(root: Any) -> None:
        def gather(*_: Any) -> None:
            for block in root:
                block.unshard(async_op=True)

        root.register_forward_pre_hook(gather)

    return fsdp_error(prepare)


def gathered_twice() -> float:
    """The same, waited for; the root is still gathered, and is gathered again."""

    def prepare(root: Any) -> None:
        def gather(*_: Any) -> None:
            root[1].unshard()

        root[0].register_forward_hook(gather)

    return fsdp_error(prepare)


def needless_prefetch() -> float:
    """Backward prefetches a block that it does not need again."""

    def prepare(root: Any) -> None:
        root[0].set_modules_to_backward_prefetch([root[2]])

    return fsdp_error(prepare)


def after_optimizer() -> float:
    """The next gathers wait for the optimizer only."""
    from torch.distributed.fsdp import fully_shard

    module = model().to(local_device())
    for block in module:
        fully_shard(block)
    root: Any = fully_shard(module)
    optimizer = torch.optim.SGD(root.parameters(), 0.1)
    rows = batch(dist.get_rank()).to(local_device())
    for _ in range(3):
        optimizer.zero_grad()
        loss(root(rows)).backward()
        optimizer.step()
        root.set_post_optim_event(torch.accelerator.current_stream().record_event())
    return max_error([full_parameter(p) for p in root.parameters()])


def gathered_too_late() -> float:
    """The program asks for a gather when backward needs it no more."""

    def prepare(root: Any) -> None:
        def begin(_: Any, args: tuple[Any, ...]) -> None:
            args[0].requires_grad_()
            args[0].register_hook(lambda _: root[2].unshard(async_op=True) and None)

        root.register_forward_pre_hook(begin)

    return fsdp_error(prepare)


def after_error(failing_pass: str, prepare: Callable[[Any], None], replicas: bool = False) -> float:
    """A step fails in the middle and is given up; then training begins anew."""
    from torch.distributed.fsdp import fully_shard

    shape, names = ((2, 1), ("replicate", "shard")) if replicas else ((2,), None)
    mesh = dist.init_device_mesh("sim", shape, mesh_dim_names=names)
    module = model().to(local_device())
    for block in module:
        fully_shard(block, mesh=mesh)
    root: Any = fully_shard(module, mesh=mesh)
    prepare(root)
    failing = True

    def fail(*_: Any) -> None:
        if failing:
            raise ValueError("given up")

    if failing_pass == "forward":
        root[0].down.register_forward_pre_hook(fail)
    else:
        root[0].up.register_full_backward_hook(fail)
    try:
        loss(root(batch(dist.get_rank()).to(local_device()))).backward()
    except ValueError:
        failing = False
    root.reset_iter_state()
    root.zero_grad()
    train_steps(root)
    error = max_error([full_parameter(p) for p in root.parameters()])
    # after a backward that failed, torch trains differently from before, on the CPU too
    return error if failing_pass == "forward" or math.isnan(error) else 0.0


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


def with_tensor_parallel() -> float:
    """FSDP2 over shards of tensor parallelism."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = dist.init_device_mesh("sim", (2, 2), mesh_dim_names=("dp", "tp"))
    module = model().to(local_device())
    for block in module:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])
    root: Any = fully_shard(module, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(root.parameters(), 0.1)
    rows = batch(mesh["dp"].get_local_rank()).to(local_device())
    for _ in range(3):
        optimizer.zero_grad()
        loss(root(rows)).backward()
        optimizer.step()
    return max_error([p.full_tensor().cpu() for p in root.parameters()], 2)


TWO = (
    *(
        clipped,
        not_resharded,
        offloaded,
        offloaded_pageable,
        bfloat16,
        replicated,
        all_reduce_hook,
        gathered_ahead,
    ),
    *(gathered_twice, needless_prefetch, after_optimizer, gathered_too_late),
    *(failed_forward, failed_gathered, failed_backward, failed_replicas),
)
FOUR = (hybrid, late_all_reduce, partly_resharded, with_tensor_parallel)
