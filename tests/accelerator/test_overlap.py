"""What has to be able to run at once in a step: collectives and copies beside computation.

The timeline of a simulated device tells which operations nothing orders (`could_overlap`). That
these tests can fail shows on torch's own DDP and FSDP2, with streams that wait too early.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from schedlang.testing.accelerator import Operation, could_overlap, current, spawn, unavailable
from tests.accelerator.trained import batch, here, loss, model

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "it is there")

PRODUCTS = ("aten::addmm", "aten::mm", "aten::bmm", "aten::_scaled_dot_product")
Beside = list[tuple[int, int]]  # of each operation in turn: products of forward, of backward


def back(one: Operation) -> bool:
    return "of backward" in one.place


def beside(*names: str) -> Beside:
    """On a rank: of each operation of these names how many matrix products could run with it."""
    seen = current().operations()
    products = [one for one in seen if one.name.startswith(PRODUCTS)]
    found = []
    for one in seen:
        if one.name in names:
            mine = [p for p in products if could_overlap(one, p)]
            found.append((sum(not back(p) for p in mine), sum(map(back, mine))))
    return found


def watched(step: Callable[[], Any], warm: int = 2) -> None:
    """On a rank: the timeline begins with the step that follows some others."""
    for _ in range(warm):
        step()
    current().reset()
    step()


# -- torch's own ------------------------------------------------------------------------------------


def in_ddp(early: bool) -> Beside:
    """On a rank: the sums of DDP; `early`: its hook waits for each."""
    found = nn.parallel.DistributedDataParallel(model().to(here()), bucket_cap_mb=0.004)

    def hook(state: None, bucket: Any) -> Any:
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        work.wait()
        return work.get_future().then(lambda future: future.value()[0])

    hook.__annotations__.clear()  # torch would compare these strings with types
    if early:
        found.register_comm_hook(None, hook)  # type: ignore[operator]
    rows = batch(dist.get_rank()).to(here())
    watched(lambda: loss(found(rows)).backward())
    return beside("simccl.all_reduce")


def in_fsdp(wrong: str) -> tuple[Beside, Beside]:
    """On a rank: the gathers and the sums of FSDP2, right or with streams that wait too early."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as inner

    found = model().to(here())
    for block in found:
        fully_shard(block)
    fully_shard(found)
    rows = batch(dist.get_rank()).to(here())
    summed: Any = inner.FSDPParamGroup.post_backward

    def waiting(self: Any, *unused: Any) -> None:
        summed(self)
        torch.accelerator.current_stream().wait_stream(self.comm_ctx.reduce_scatter_stream)

    def plain(self: Any, *unused: Any) -> Any:
        return (torch.accelerator.current_stream(),) * 2

    patches = {
        "gathers": mock.patch.object(inner.FSDPCommContext, "get_all_gather_streams", plain),
        "sums": mock.patch.object(inner.FSDPParamGroup, "post_backward", waiting),
    }
    with patches[wrong] if wrong else mock.patch.dict({}):
        watched(lambda: loss(found(rows)).backward())
    gathers = beside("simccl.all_gather_into_tensor")
    return gathers, beside("simccl.reduce_scatter_tensor")


def test_sums_of_ddp() -> None:
    """Those of later blocks, two each, run beside what is left of backward; where a hook waits
    for each, none."""
    for found in spawn(in_ddp, False, timeline=True):
        assert len(found) == 6 and all(b and not f for f, b in found[:4])
    for found in spawn(in_ddp, True, timeline=True):
        assert len(found) == 6 and not any(f or b for f, b in found)


def test_gathers_and_sums_of_fsdp() -> None:
    """Blocks are gathered beside the one before, and summed beside the one after them."""
    for gathers, sums in spawn(in_fsdp, "", timeline=True):
        assert len(gathers) == 6  # each block in forward, and again in backward, the last one first
        assert all(f for f, _ in gathers[1:3]) and all(b for _, b in gathers[4:])
        assert all(b for _, b in sums[:-1])
    for gathers, sums in spawn(in_fsdp, "gathers", timeline=True):
        assert not any(f or b for f, b in gathers) and any(b for _, b in sums)
    for gathers, sums in spawn(in_fsdp, "sums", timeline=True):
        assert not any(b for _, b in sums) and any(f for f, _ in gathers)
