"""Ranks as threads: the same results as on processes, and faults that only a bug notices."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence, MutableSet
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from schedlang import runtime
from schedlang.diagnostic import Diagnostic, Refusal
from schedlang.passes.prove import Case, prove
from schedlang.plan import Plan
from schedlang.runtime import collective, gradient, mail
from schedlang.runtime.kept import KeepCollectives
from schedlang.runtime.launch import Hang, Pool, RankDied, progress
from tests import models
from tests.engine import Faults, Mismatch, Threads
from tests.engine.globals import OWN
from tests.mutants import Mutated
from tests.proofs import assert_same, planned, proven, trained
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


def _trained(plan: Plan, threads: Threads) -> Any:
    return trained(threads, plan, TOKENS, clip=0.05, seed=3)  # type: ignore[arg-type]


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
        def all_reduce(self, flat: Tensor, group: Any) -> None:
            dist.all_reduce(flat, group=group, async_op=True)
            dist.barrier(group)

    patch.setattr(gradient, "dist", Hasty())


def _taken_unread(patch: pytest.MonkeyPatch) -> None:
    """A stage takes its input from a buffer without waiting for it."""
    plain = mail.Mail.take

    def take(self: Any, key: Any) -> Any:
        for _, expected in self._expected.values():
            expected.works.clear()
        return plain(self, key)

    patch.setattr(mail.Mail, "take", take)


def _written_early(patch: pytest.MonkeyPatch) -> None:
    """What is sent is overwritten before anybody has received it."""
    plain = mail.Mail.send

    def send(self: Any, to: int, key: Any, tensors: Any, *, header: bool) -> None:
        plain(self, to, key, tensors, header=header)
        for _, part in self._sent[key][int(header) :]:
            part.zero_()

    patch.setattr(mail.Mail, "send", send)


def _freed_early(patch: pytest.MonkeyPatch) -> None:
    """The memory of what is sent is given back at once."""
    plain = mail.Mail.send

    def send(self: Any, to: int, key: Any, tensors: Any, *, header: bool) -> None:
        plain(self, to, key, tensors, header=header)
        for _, part in self._sent[key]:
            part.untyped_storage().resize_(0)

    patch.setattr(mail.Mail, "send", send)


def _fails(plan: Plan, engine: Threads, bug: Any) -> bool:
    case = Case(plan, tuple(TOKENS), dtype="none")
    try:
        return not prove(case, pool=Mutated(engine, bug)).ok  # type: ignore[arg-type]
    except RankDied:
        return True


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


# -- errors ----------------------------------------------------------------------------------------


def _sum() -> float:
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x)
    return x.item()


def test_a_rank_that_raises_ends_the_run(threads: Threads) -> None:
    """It is named with its own traceback, the others are woken, and the next run is served."""

    def work() -> None:
        if dist.get_rank() == 1:
            raise KeyError("spoiled")
        dist.all_reduce(torch.ones(1))

    with pytest.raises(RankDied) as info:
        threads.run(work, 3)
    assert info.value.rank == 1 and "KeyError: 'spoiled'" in info.value.error
    assert isinstance(info.value.cause, KeyError)
    assert threads.run(_sum, 3) == [3, 3, 3]


def test_a_refusal_is_raised_as_such(threads: Threads) -> None:
    """What ranks refuse is refused, not reported as a death."""

    def work() -> None:
        raise Refusal(Diagnostic("S999", "not like this"))

    with pytest.raises(Refusal, match="not like this"):
        threads.run(work, 2)


def _other_op() -> None:
    x = torch.ones(2)
    dist.all_reduce(x) if dist.get_rank() else dist.broadcast(x, 0)


def _other_shape() -> None:
    dist.all_reduce(torch.ones(2 + dist.get_rank()))


def _other_dtype() -> None:
    dist.all_reduce(torch.ones(2, dtype=torch.float64 if dist.get_rank() else torch.float32))


def _other_order() -> None:
    x, y = torch.ones(2), torch.ones(3)
    for t in (x, y) if dist.get_rank() else (y, x):
        dist.all_reduce(t)


def _other_root() -> None:
    dist.broadcast(torch.ones(2), dist.get_rank())


@pytest.mark.parametrize("work", [_other_op, _other_shape, _other_dtype, _other_order, _other_root])
def test_ranks_that_do_not_mean_the_same(work: Any, threads: Threads) -> None:
    """Another operation, shape, dtype, order or root is an error that names ranks and both."""
    with pytest.raises(RankDied, match="rank 0 does .*rank 1 does ") as info:
        threads.run(work, 2)
    assert isinstance(info.value.cause, Mismatch)


def test_a_message_of_another_size(threads: Threads) -> None:
    """A receive that does not fit its send is an error of both."""

    def work() -> None:
        (dist.send if dist.get_rank() else dist.recv)(
            torch.ones(2 + dist.get_rank()), 1 - dist.get_rank()
        )

    with pytest.raises(RankDied, match=r"rank 1 sends .*\[3\], rank 0 receives .*\[2\]"):
        threads.run(work, 2)


def test_a_deadlock_is_known_at_once(threads: Threads) -> None:
    """Ranks that wait for what will not come are told with what each waits for."""

    def absent() -> None:
        if dist.get_rank():
            dist.all_reduce(torch.ones(2))

    def crossed() -> None:
        dist.recv(torch.ones(2), 1 - dist.get_rank())

    with pytest.raises(Hang, match="rank 2 waits for all_reduce number 0 .* where 0 did not come"):
        threads.run(absent, 3)
    with pytest.raises(Hang, match="rank 0 waits for message 0 of rank 1"):
        threads.run(crossed, 2)


def test_what_nobody_joins_is_told_at_the_end(threads: Threads) -> None:
    """A collective that some ranks begin, never wait for, and others never join."""

    def work() -> None:
        if dist.get_rank():
            dist.all_reduce(torch.ones(2), async_op=True)

    with pytest.raises(RankDied, match="all_reduce number 0 of ranks 0, 1: only 1 came"):
        threads.run(work, 2)


def test_an_endless_loop_meets_the_time_limit(threads: Threads) -> None:
    """It is told where each rank stands, and its thread ends."""

    def spins() -> None:
        while dist.get_rank() == 0:
            pass
        dist.barrier()

    threads.run(_sum, 2)
    before = threading.active_count()
    with pytest.raises(Hang, match="not finished after 0.5 s") as info:
        threads.run(spins, 2, timeout=0.5)
    assert "in spins" in info.value.stacks[0] and "its start" in info.value.stacks[1]
    end = time.monotonic() + 10
    while threading.active_count() >= before and time.monotonic() < end:
        time.sleep(0.05)
    assert threading.active_count() < before
    assert threads.run(_sum, 2) == [1, 1]


# -- what is each rank's own -----------------------------------------------------------------------


def test_arguments_are_copies(threads: Threads) -> None:
    """Each rank changes its own copy of a model, of what a closure holds; ties within stay."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight
    held = torch.zeros(2)

    def work(given: torch.nn.Module) -> tuple[Any, int, bool]:
        with torch.no_grad():
            given[0].weight.fill_(dist.get_rank())  # type: ignore[index,operator]
            held.add_(1.0)
        dist.barrier()
        tied = given[0].weight is given[1].weight  # type: ignore[index]
        return given[0].weight, held.data_ptr(), tied  # type: ignore[index]

    found = threads.run(work, 3, model)
    assert [weight[0, 0].item() for weight, _, _ in found] == [0, 1, 2]
    assert len({pointer for _, pointer, _ in found} | {held.data_ptr()}) == 4
    assert all(tied for _, _, tied in found) and held.sum() == 0
    assert not (model[0].weight == 0).all()


def test_globals_of_the_process_are_each_ranks_own(threads: Threads) -> None:
    """Generator, default dtype, environment and listeners: as in processes, and restored."""

    def work() -> tuple[Any, ...]:
        rank, seen = dist.get_rank(), []
        torch.set_default_dtype(torch.float64 if rank else torch.float16)
        with collective.listening(lambda *what: seen.append(what)):
            group = collective.Group(("x",), (0, 1), rank, dist.group.WORLD)
            for _ in range(2 + rank):
                drawn = torch.rand(3, dtype=torch.float32)
            for _ in range(2):  # each time the other rank computes in between
                collective.all_reduce(drawn, group)
        return drawn.tolist(), torch.ones(1).dtype, os.environ["RANK"], len(seen)

    torch.manual_seed(5)
    before = torch.get_rng_state(), torch.get_default_dtype(), dict(os.environ), sys.excepthook
    one, two = threads.run(work, 2)
    generator = torch.Generator().manual_seed(0)
    draws = [torch.rand(3, generator=generator).tolist() for _ in range(3)]
    assert one == (draws[1], torch.float16, "0", 2)
    assert two == (draws[2], torch.float64, "1", 2)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (torch.get_default_dtype(), dict(os.environ), sys.excepthook)
    assert not dist.is_initialized()


# caches that give the same whoever filled them, and what belongs to the process
SHARED = {
    ("fuse", "_codes"), ("launch", "_shared"), ("modes", "_open_bodies"), ("offload", "_streams"),
}  # fmt: skip


def test_no_global_of_the_runtime_is_forgotten() -> None:
    """Every container at the top of a module of the runtime is known here as own or shared."""
    own = {(module.__name__.rpartition(".")[2], name) for module, name in OWN}
    found = set()
    for info in pkgutil.iter_modules(runtime.__path__):
        module = importlib.import_module(f"schedlang.runtime.{info.name}")
        for name, value in vars(module).items():
            changes = value is None or isinstance(
                value, MutableMapping | MutableSequence | MutableSet
            )
            # constants are written in capitals, after an underscore or not
            if changes and name.strip("_").islower():
                found.add((info.name, name))
    assert own <= found
    assert {f for f in found if not f[1].startswith("__")} <= own | SHARED


def test_progress_is_told(threads: Threads) -> None:
    """Messages arrive with their rank, in order; outside a rank `progress` does nothing."""
    seen: list[tuple[int, object]] = []

    def work() -> None:
        progress("one")
        progress({"two": 2})

    threads.run(work, 2, on_progress=lambda rank, what: seen.append((rank, what)))
    assert sorted(seen, key=lambda s: s[0]) == [
        (rank, what) for rank in (0, 1) for what in ("one", {"two": 2})
    ]
    progress("nobody")


def test_modes_see_the_collectives(threads: Threads) -> None:
    """Operators go through torch's dispatcher, as those of gloo: what keeps results sees them."""

    def work() -> tuple[list[float], int]:
        keep = KeepCollectives()
        found = []
        for mode in (keep.forward, keep.again):
            with mode:
                x = torch.tensor([1.0 + dist.get_rank()])
                dist.all_reduce(x)
                found.append(x.item())
        return found, len(keep.kept)

    assert threads.run(work, 2) == [([3, 3], 1)] * 2


def test_gloo_still_works_in_this_process(threads: Threads) -> None:
    """Outside rank threads the operators are those of torch, during a run and after it."""
    threads.run(_sum, 2)
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert threads.run(_sum, 2) == [1, 1]
        x = torch.ones(2)
        dist.all_reduce(x)
        assert x.tolist() == [1, 1] and dist.get_backend() == "gloo"
    finally:
        dist.destroy_process_group()
