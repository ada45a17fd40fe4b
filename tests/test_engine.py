"""Ranks as threads: the same results as on processes, and faults that only a bug notices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from schedlang.plan import Plan
from schedlang.runtime.launch import Pool
from tests import models
from tests.engine import Faults, Threads
from tests.proofs import planned, proven
from tests.test_build import GPT2, LLAMA, LLAMA_ENDS

TOKENS = [models.tokens(rows=6, seed=seed) for seed in (5, 2)]  # labels are uneven


@pytest.fixture(scope="module")
def late() -> Iterator[Threads]:
    """Threads whose communication is as late as it may be, over poisoned buffers."""
    with Threads(Faults()) as threads:
        yield threads


# -- every collective, against gloo ----------------------------------------------------------------


def _mine(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Whole numbers, so that sums have no rounding, other ones on each rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(-9, 9, shape, generator=generator).to(dtype)


def _all_reduces() -> list[Tensor]:
    found = []
    for op in ("SUM", "AVG", "PRODUCT", "MIN", "MAX"):
        found.append(_mine(2, 3))
        dist.all_reduce(found[-1], getattr(dist.ReduceOp, op))
    for op in ("BAND", "BOR", "BXOR"):
        found.append(_mine(4, dtype=torch.int64))
        dist.all_reduce(found[-1], getattr(dist.ReduceOp, op))
    found.append(_mine(3, dtype=torch.bfloat16))
    work = dist.all_reduce(found[-1], async_op=True)
    work.wait()
    return found


def _rooted() -> list[Tensor]:
    rank, world = dist.get_rank(), dist.get_world_size()
    found = [_mine(2) for _ in range(2)]
    dist.broadcast(found[0], 1)
    dist.reduce(found[1], 1)
    if rank != 1:
        found[1].zero_()  # undefined where it is not reduced to
    gathered = [torch.zeros(2, dtype=torch.float64) for _ in range(world)] if rank == 1 else None
    dist.gather(_mine(2), gathered, 1)
    got = torch.zeros(3, dtype=torch.float64)
    dist.scatter(got, [_mine(3) + k for k in range(world)] if rank == 1 else None, 1)
    return [*found, *(gathered or []), got]


def _gathers() -> list[Tensor]:
    world = dist.get_world_size()
    parts = [torch.zeros(2, 2, dtype=torch.float64) for _ in range(world)]
    dist.all_gather(parts, _mine(2, 2))
    whole = torch.zeros(2 * world, 2, dtype=torch.float64)
    dist.all_gather_into_tensor(whole, _mine(2, 2))
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": dist.get_rank(), "more": "x" * dist.get_rank()})
    return [*parts, whole, torch.tensor([o["rank"] + len(o["more"]) for o in objects])]


def _scatters() -> list[Tensor]:
    world = dist.get_world_size()
    part, other = (torch.zeros(2, dtype=torch.float64) for _ in range(2))
    dist.reduce_scatter_tensor(part, _mine(2 * world))
    dist.reduce_scatter(other, [_mine(2) * k for k in range(world)])
    return [part, other]


def _exchanges() -> list[Tensor]:
    rank, world = dist.get_rank(), dist.get_world_size()
    got = [torch.zeros(2, dtype=torch.float64) for _ in range(world)]
    dist.all_to_all(got, [_mine(2) + k for k in range(world)])
    even = torch.zeros(world, 2, dtype=torch.float64)
    dist.all_to_all_single(even, _mine(world, 2))
    sizes = [1 + (k + rank) % 2 for k in range(world)]  # alike both ways
    uneven = torch.zeros(sum(sizes), 2, dtype=torch.float64)
    dist.all_to_all_single(uneven, _mine(sum(sizes), 2), sizes, sizes)
    return [*got, even, uneven]


def _messages() -> list[Tensor]:
    """A ring, both ways at once, in order; and a group of some ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % world, (rank - 1) % world
    got = [torch.zeros(3, dtype=torch.float64) for _ in range(4)]
    works = [dist.isend(_mine(3) + k, after) for k in range(2)]
    works += [dist.irecv(got[k], before) for k in range(2)]
    for work in works:
        work.wait()
    batch = [
        dist.P2POp(dist.isend, _mine(3), before),
        dist.P2POp(dist.irecv, got[2], after),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    some = dist.new_group([0, 2])
    if rank in (0, 2):
        got[3] += _mine(3)
        dist.all_reduce(got[3], group=some)
    dist.barrier()
    return got


@pytest.mark.parametrize(
    "work", [_all_reduces, _rooted, _gathers, _scatters, _exchanges, _messages]
)
def test_as_on_gloo(
    work: Callable[[], list[Tensor]], pool: Pool, threads: Threads, late: Threads
) -> None:
    """Every collective and message gives on threads, late ones too, what it gives on processes."""
    expected = pool.run(work, 3)
    for engine in (threads, late, Threads(Faults(order=7))):
        for mine, theirs in zip(engine.run(work, 3), expected, strict=True):
            assert len(mine) == len(theirs)
            assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(mine, theirs))


# -- the runtime, unchanged ------------------------------------------------------------------------


def _gpt2(rows: str, mesh: str) -> Plan:
    return planned(models.gpt2(2, 0.1), rows, mesh)


PLANS: dict[str, Callable[[], Plan]] = {
    "tp": lambda: _gpt2(GPT2, "tp=2"),
    "sp, recomputed": lambda: planned(
        models.llama(1), LLAMA + LLAMA_ENDS + "model.layers.* checkpoint()", "tp=2"
    ),
    **{
        f"zero {k}": lambda k=k: _gpt2(f"zero(stage={k}, over=dp)", "dp=2")  # type: ignore[misc]
        for k in range(4)
    },
    "pp": lambda: _gpt2(
        'transformer.h pipeline_split(over=pp)\npipeline(order="1F1B", micro=3)', "pp=2"
    ),
    "3-D": lambda: _gpt2(
        GPT2 + 'transformer.h pipeline_split(over=pp)\nzero(stage=2, over=dp)\n'
        'pipeline(order="1F1B", micro=2)',
        "pp=2, dp=2, tp=2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_plans_are_proven_on_threads(name: str, threads: Threads, late: Threads) -> None:
    """Tensor, data and pipeline parallelism hold, and with late and poisoned buffers as well."""
    plan = PLANS[name]()
    for engine in (threads, late):
        report = proven(engine, plan, TOKENS)  # type: ignore[arg-type]
        assert max(row.error for row in report.rows) < 1e-11
