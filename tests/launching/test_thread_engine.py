"""Ranks as threads: results as on processes, and injected communication faults that bugs show."""

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
from tests.proofs import assert_proven, assert_same, make_plan, train_on_ranks
from tests.training.test_build import GPT2, LLAMA, LLAMA_ENDS
from tests.zoo.pool import Mutated

TOKENS = [models.tokens(rows=6, seed=seed) for seed in (5, 2)]  # labels are uneven


@pytest.fixture(scope="module")
def late() -> Iterator[Threads]:
    """Yield threads whose communication is as late as possible, with poisoned buffers."""
    with Threads(Faults()) as threads:
        yield threads


# -- every collective, against gloo ----------------------------------------------------------------


def rank_values(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return whole numbers, so that sums have no rounding, different on each rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(-9, 9, shape, generator=generator).to(dtype)


def run_all_reduces() -> list[Tensor]:
    results = []
    for op in ("SUM", "AVG", "PRODUCT", "MIN", "MAX"):
        results.append(rank_values(2, 3))
        dist.all_reduce(results[-1], getattr(dist.ReduceOp, op))
    for op in ("BAND", "BOR", "BXOR"):
        results.append(rank_values(4, dtype=torch.int64))
        dist.all_reduce(results[-1], getattr(dist.ReduceOp, op))
    results.append(rank_values(3, dtype=torch.bfloat16))
    work = dist.all_reduce(results[-1], async_op=True)
    work.wait()
    return results


def run_rooted() -> list[Tensor]:
    rank, world = dist.get_rank(), dist.get_world_size()
    results = [rank_values(2) for _ in range(2)]
    dist.broadcast(results[0], 1)
    dist.reduce(results[1], 1)
    if rank != 1:
        results[1].zero_()  # undefined on ranks other than the root
    gathered = [torch.zeros(2, dtype=torch.float64) for _ in range(world)] if rank == 1 else None
    dist.gather(rank_values(2), gathered, 1)
    scattered = torch.zeros(3, dtype=torch.float64)
    dist.scatter(scattered, [rank_values(3) + k for k in range(world)] if rank == 1 else None, 1)
    return [*results, *(gathered or []), scattered]


def run_gathers() -> list[Tensor]:
    world = dist.get_world_size()
    parts = [torch.zeros(2, 2, dtype=torch.float64) for _ in range(world)]
    dist.all_gather(parts, rank_values(2, 2))
    gathered = torch.zeros(2 * world, 2, dtype=torch.float64)
    dist.all_gather_into_tensor(gathered, rank_values(2, 2))
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": dist.get_rank(), "more": "x" * dist.get_rank()})
    return [*parts, gathered, torch.tensor([o["rank"] + len(o["more"]) for o in objects])]


def run_scatters() -> list[Tensor]:
    world = dist.get_world_size()
    part, listed = (torch.zeros(2, dtype=torch.float64) for _ in range(2))
    dist.reduce_scatter_tensor(part, rank_values(2 * world))
    dist.reduce_scatter(listed, [rank_values(2) * k for k in range(world)])
    return [part, listed]


def run_exchanges() -> list[Tensor]:
    rank, world = dist.get_rank(), dist.get_world_size()
    received = [torch.zeros(2, dtype=torch.float64) for _ in range(world)]
    dist.all_to_all(received, [rank_values(2) + k for k in range(world)])
    even = torch.zeros(world, 2, dtype=torch.float64)
    dist.all_to_all_single(even, rank_values(world, 2))
    sizes = [1 + (k + rank) % 2 for k in range(world)]  # equal in both directions
    uneven = torch.zeros(sum(sizes), 2, dtype=torch.float64)
    dist.all_to_all_single(uneven, rank_values(sum(sizes), 2), sizes, sizes)
    return [*received, even, uneven]


def run_messages() -> list[Tensor]:
    """Send in a ring, both ways at once, in order; and in a group of some ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    following, previous = (rank + 1) % world, (rank - 1) % world
    received = [torch.zeros(3, dtype=torch.float64) for _ in range(4)]
    works = [dist.isend(rank_values(3) + k, following) for k in range(2)]
    works += [dist.irecv(received[k], previous) for k in range(2)]
    for work in works:
        work.wait()
    batch = [
        dist.P2POp(dist.isend, rank_values(3), previous),
        dist.P2POp(dist.irecv, received[2], following),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    subgroup = dist.new_group([0, 2])
    if rank in (0, 2):
        received[3] += rank_values(3)
        dist.all_reduce(received[3], group=subgroup)
    dist.barrier()
    return received


@pytest.mark.parametrize(
    "work", [run_all_reduces, run_rooted, run_gathers, run_scatters, run_exchanges, run_messages]
)
def test_as_on_gloo(
    work: Callable[[], list[Tensor]], pool: Pool, threads: Threads, late: Threads
) -> None:
    """Every collective and message has the same result on threads, late ones too, as on
    processes."""
    expected = pool.run(work, 3)
    for engine in (threads, late, Threads(Faults(order=7))):
        for actual, wanted_values in zip(engine.run(work, 3), expected, strict=True):
            assert len(actual) == len(wanted_values)
            assert all(
                a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(actual, wanted_values)
            )


# -- the runtime, unchanged ------------------------------------------------------------------------


def plan_gpt2(rows: str, mesh: str) -> Plan:
    return make_plan(models.gpt2(2, 0.1), rows, mesh)


PLANS: dict[str, Callable[[], Plan]] = {
    "tp": lambda: plan_gpt2(GPT2, "tp=2"),
    "sp, recomputed": lambda: make_plan(
        models.llama(1), LLAMA + LLAMA_ENDS + "model.layers.* checkpoint()", "tp=2"
    ),
    **{
        f"zero {k}": lambda k=k: plan_gpt2(f"zero(stage={k}, over=dp)", "dp=2")  # type: ignore[misc]
        for k in range(4)
    },
    "pp": lambda: plan_gpt2(
        'transformer.h pipeline_split(over=pp)\npipeline(order="1F1B", micro=3)', "pp=2"
    ),
    "3-D": lambda: plan_gpt2(
        GPT2 + "transformer.h pipeline_split(over=pp)\nzero(stage=2, over=dp)\n"
        'pipeline(order="1F1B", micro=2)',
        "pp=2, dp=2, tp=2",
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_plans_are_proven_on_threads(name: str, late: Threads) -> None:
    """Tensor, data and pipeline parallelism verify with late and poisoned buffers."""
    report = assert_proven(late, PLANS[name](), TOKENS[:1])  # type: ignore[arg-type]
    assert max(row.error for row in report.rows) < 1e-11


def train_plan(plan: Plan, threads: Threads) -> Any:
    return train_on_ranks(threads, plan, TOKENS, clip=0.05, seed=3)


def test_the_same_to_the_last_bit(threads: Threads, late: Threads) -> None:
    """Sums are in rank order, whichever rank comes first: late, in any order, repeated."""
    plan = plan_gpt2(GPT2 + "zero(stage=2, over=dp)", "dp=2, tp=2")
    reference = train_plan(plan, threads)
    for engine in (threads, late, Threads(Faults(order=1)), Threads(Faults(order=2))):
        assert_same(reference, train_plan(plan, engine))


# -- faults: what only a bug notices ---------------------------------------------------------------


def barrier_for_wait(patch: pytest.MonkeyPatch) -> None:
    """Sum gradients asynchronously, with a barrier in place of the wait."""

    class Hasty:
        def all_reduce(self, flat: Tensor, group: Any, wait: bool) -> None:
            dist.all_reduce(flat, group=group, async_op=True)
            dist.barrier(group)

    patch.setattr(gradient, "world", Hasty())


def take_unread(patch: pytest.MonkeyPatch) -> None:
    """Let a stage take its input from a buffer without waiting for it."""
    original = p2p.PeerChannel.take

    def take(self: Any, key: Any) -> Any:
        for expected in self._expected.values():
            arriving = getattr(expected, "arriving", expected)
            if arriving is not None:
                arriving[1].clear()
        return original(self, key)

    patch.setattr(p2p.PeerChannel, "take", take)


def overwrite_early(patch: pytest.MonkeyPatch) -> None:
    """Overwrite sent data before any rank has received it."""
    original = p2p.PeerChannel.send

    def send(self: Any, target: int, key: Any, tensors: Any, *, header: bool) -> None:
        original(self, target, key, tensors, header=header)
        for _, part in self._sent[key][int(header) :]:
            part.zero_()

    patch.setattr(p2p.PeerChannel, "send", send)


def free_early(patch: pytest.MonkeyPatch) -> None:
    """Free the memory of sent data at once."""
    original = p2p.PeerChannel.send

    def send(self: Any, target: int, key: Any, tensors: Any, *, header: bool) -> None:
        original(self, target, key, tensors, header=header)
        for _, part in self._sent[key]:
            part.untyped_storage().resize_(0)

    patch.setattr(p2p.PeerChannel, "send", send)


def is_detected(plan: Plan, engine: Threads, bug: Any) -> bool:
    """Tell whether a step with a bug in the runtime is found to differ from the original's."""
    case = randomised_float64(prepare_case(Case(plan, tuple(TOKENS[:1]), dtype="none")))
    conditions = standard_conditions(case.batches, 1.0)[:1]
    expected, _ = run_original(case, conditions)
    ranks = Mutated(engine, bug)  # type: ignore[arg-type]
    actual = ranks.run(observe_on_rank, plan.mesh.world, case, conditions)[0]
    return not all(row.ok for row in compare(expected, actual))


@pytest.mark.parametrize(
    ("bug", "name"),
    [(barrier_for_wait, "zero 0"), (take_unread, "pp"), (overwrite_early, "pp")],
)
def test_what_is_not_waited_for_fails(bug: Any, name: str, late: Threads) -> None:
    """A missing wait and an early overwrite in the runtime fail the proof."""
    assert is_detected(PLANS[name](), late, bug)


def test_what_passes_when_all_is_prompt_fails_when_it_is_late(
    threads: Threads, late: Threads
) -> None:
    """Late communication shows a bug that prompt communication hides; so does poison alone."""
    plan = PLANS["zero 0"]()
    assert not is_detected(plan, threads, barrier_for_wait)
    assert is_detected(plan, Threads(Faults(poison=False)), barrier_for_wait)
    assert is_detected(plan, late, barrier_for_wait)


def test_memory_freed_early_is_named(late: Threads) -> None:
    """Reading a send whose memory was freed is an error that says so."""
    case = Case(PLANS["pp"](), tuple(TOKENS), dtype="none")
    with pytest.raises(RankDied, match="rank 0 sends to 1 was freed") as caught:
        prove(case, pool=Mutated(late, free_early))  # type: ignore[arg-type]
    assert isinstance(caught.value.cause, Mismatch)


def peek_buffers() -> list[float]:
    """Return what buffers contain before and after the wait."""
    rank, peeked = dist.get_rank(), []
    x, received = torch.full((2,), 1.0 + rank), torch.zeros(2)
    sent = torch.full((2,), 5.0)
    works = [dist.all_reduce(x, async_op=True)]
    works += [dist.isend(sent, 1 - rank), dist.irecv(received, 1 - rank)]
    dist.barrier()
    peeked += [x[0].item(), received[0].item()]
    sent.fill_(7.0)
    dist.barrier()
    works[0].wait()
    works[1].wait()
    sent.fill_(9.0)  # after its wait, a send's buffer may be changed
    dist.barrier()
    works[2].wait()
    return [*peeked, x[0].item(), received[0].item()]


def test_prompt_and_late() -> None:
    """Prompt buffers are complete once all ranks have come; late ones at the wait, with the values
    of that time."""
    assert Threads().run(peek_buffers, 2) == [[3, 5, 3, 5]] * 2
    stale = Threads(Faults(poison=False)).run(peek_buffers, 2)
    assert stale == [[1, 0, 3, 7], [2, 0, 3, 7]]
    for x, received, *others in Threads(Faults()).run(peek_buffers, 2):
        assert x != x and received != received and others == [3, 7]
