"""Ranks as threads: the same results as on processes, and faults that only a bug notices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from schedlang.ir.plan import Plan
from schedlang.passes.prove import prove
from schedlang.passes.verify.compare import compare
from schedlang.passes.verify.observe import standard_conditions
from schedlang.passes.verify.proof_case import (
    Case,
    observe_on_rank,
    prepare_case,
    randomised_float64,
    run_original,
)
from schedlang.runtime.grad_reduction import gradient
from schedlang.runtime.launch.pool import Pool, RankDied
from schedlang.runtime.pipeline import p2p
from tests import models
from tests.engine import Faults, Mismatch, Threads
from tests.proofs import assert_same, planned, proven, trained
from tests.training.test_build import GPT2, LLAMA, LLAMA_ENDS
from tests.zoo.pool import Mutated

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
    batch = [dist.P2POp(dist.isend, _mine(3), before), dist.P2POp(dist.irecv, got[2], after)]
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
        GPT2 + "transformer.h pipeline_split(over=pp)\nzero(stage=2, over=dp)\n"
        'pipeline(order="1F1B", micro=2)',
        "pp=2, dp=2, tp=2",
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_plans_are_proven_on_threads(name: str, late: Threads) -> None:
    """Tensor, data and pipeline parallelism hold, with late and poisoned buffers."""
    report = proven(late, PLANS[name](), TOKENS[:1])  # type: ignore[arg-type]
    assert max(row.error for row in report.rows) < 1e-11


def _trained(plan: Plan, threads: Threads) -> Any:
    return trained(threads, plan, TOKENS, clip=0.05, seed=3)


def test_the_same_to_the_last_bit(threads: Threads, late: Threads) -> None:
    """Sums are in the order of ranks, whoever comes first: late, in any order, again."""
    plan = _gpt2(GPT2 + "zero(stage=2, over=dp)", "dp=2, tp=2")
    first = _trained(plan, threads)
    for engine in (threads, late, Threads(Faults(order=1)), Threads(Faults(order=2))):
        assert_same(first, _trained(plan, engine))


# -- faults: what only a bug notices ---------------------------------------------------------------


def _a_barrier_for_a_wait(patch: pytest.MonkeyPatch) -> None:
    """Gradients are summed asynchronously, and a barrier is taken for the wait."""

    class Hasty:
        def all_reduce(self, flat: Tensor, group: Any, wait: bool) -> None:
            dist.all_reduce(flat, group=group, async_op=True)
            dist.barrier(group)

    patch.setattr(gradient, "world", Hasty())


def _taken_unread(patch: pytest.MonkeyPatch) -> None:
    """A stage takes its input from a buffer without waiting for it."""
    plain = p2p.PeerChannel.take

    def take(self: Any, key: Any) -> Any:
        for expected in self._expected.values():
            arriving = getattr(expected, "arriving", expected)
            if arriving is not None:
                arriving[1].clear()
        return plain(self, key)

    patch.setattr(p2p.PeerChannel, "take", take)


def _written_early(patch: pytest.MonkeyPatch) -> None:
    """What is sent is overwritten before anybody has received it."""
    plain = p2p.PeerChannel.send

    def send(self: Any, to: int, key: Any, tensors: Any, *, header: bool) -> None:
        plain(self, to, key, tensors, header=header)
        for _, part in self._sent[key][int(header) :]:
            part.zero_()

    patch.setattr(p2p.PeerChannel, "send", send)


def _freed_early(patch: pytest.MonkeyPatch) -> None:
    """The memory of what is sent is given back at once."""
    plain = p2p.PeerChannel.send

    def send(self: Any, to: int, key: Any, tensors: Any, *, header: bool) -> None:
        plain(self, to, key, tensors, header=header)
        for _, part in self._sent[key]:
            part.untyped_storage().resize_(0)

    patch.setattr(p2p.PeerChannel, "send", send)


def _fails(plan: Plan, engine: Threads, bug: Any) -> bool:
    """Whether one step with a bug in the runtime is found to differ from the original's."""
    case = randomised_float64(prepare_case(Case(plan, tuple(TOKENS[:1]), dtype="none")))
    told = standard_conditions(case.batches, 1.0)[:1]
    expected, _ = run_original(case, told)
    ranks = Mutated(engine, bug)  # type: ignore[arg-type]
    actual = ranks.run(observe_on_rank, plan.mesh.world, case, told)[0]
    return not all(row.ok for row in compare(expected, actual))


@pytest.mark.parametrize(
    ("bug", "name"),
    [(_a_barrier_for_a_wait, "zero 0"), (_taken_unread, "pp"), (_written_early, "pp")],
)
def test_what_is_not_waited_for_fails(bug: Any, name: str, late: Threads) -> None:
    """A missing wait and an early overwrite in the runtime fail the proof."""
    assert _fails(PLANS[name](), late, bug)


def test_what_passes_when_all_is_prompt_fails_when_it_is_late(
    threads: Threads, late: Threads
) -> None:
    """A bug that prompt communication hides, late communication shows; so does poison alone."""
    plan = PLANS["zero 0"]()
    assert not _fails(plan, threads, _a_barrier_for_a_wait)
    assert _fails(plan, Threads(Faults(poison=False)), _a_barrier_for_a_wait)
    assert _fails(plan, late, _a_barrier_for_a_wait)


def test_memory_freed_early_is_named(late: Threads) -> None:
    """A send whose memory is gone when it is read is an error that says so."""
    case = Case(PLANS["pp"](), tuple(TOKENS), dtype="none")
    with pytest.raises(RankDied, match="rank 0 sends to 1 was freed") as caught:
        prove(case, pool=Mutated(late, _freed_early))  # type: ignore[arg-type]
    assert isinstance(caught.value.cause, Mismatch)


def _peeks() -> list[float]:
    """What buffers hold before and after the wait."""
    rank, found = dist.get_rank(), []
    x, got = torch.full((2,), 1.0 + rank), torch.zeros(2)
    sent = torch.full((2,), 5.0)
    works = [dist.all_reduce(x, async_op=True)]
    works += [dist.isend(sent, 1 - rank), dist.irecv(got, 1 - rank)]
    dist.barrier()
    found += [x[0].item(), got[0].item()]
    sent.fill_(7.0)
    dist.barrier()
    works[0].wait()
    works[1].wait()
    sent.fill_(9.0)  # once a send was waited for, its buffer is free
    dist.barrier()
    works[2].wait()
    return [*found, x[0].item(), got[0].item()]


def test_prompt_and_late() -> None:
    """Prompt ones are full once all have come; late ones at the wait, with what is there then."""
    assert Threads().run(_peeks, 2) == [[3, 5, 3, 5]] * 2
    stale = Threads(Faults(poison=False)).run(_peeks, 2)
    assert stale == [[1, 0, 3, 7], [2, 0, 3, 7]]
    for x, got, *rest in Threads(Faults()).run(_peeks, 2):
        assert x != x and got != got and rest == [3, 7]
