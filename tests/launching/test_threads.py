"""The pool of threads: what goes wrong is an error at once, and what each rank has is its own."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
import threading
from collections.abc import MutableMapping, MutableSequence, MutableSet
from typing import Any

import pytest
import torch
import torch.distributed as dist

from schedlang import runtime
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.activation_memory.selective import CallNumbers, SelectiveModes
from schedlang.runtime.comm import collectives
from schedlang.runtime.launch.pool import Hang, RankDied, report_progress
from tests.engine import Mismatch, Threads
from tests.engine.globals import OWN

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
        raise Refusal.of("S999", "not like this")

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


def test_an_endless_loop_meets_the_time_limit() -> None:
    """It is told where each rank stands, and its thread ends."""

    def spins() -> None:
        while dist.get_rank() == 0:
            pass
        dist.barrier()

    others = threading.enumerate()
    with Threads() as threads:
        threads.run(_sum, 2)
        ranks = [one for one in threading.enumerate() if one not in others]
        with pytest.raises(Hang, match="not finished after 0.5 s") as info:
            threads.run(spins, 2, timeout=0.5)
        assert "in spins" in info.value.stacks[0] and "its start" in info.value.stacks[1]
        for one in ranks:
            one.join(60)
        assert len(ranks) == 2 and not any(one.is_alive() for one in ranks)
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
        with collectives.listen_to_collectives(lambda *what: seen.append(what)):
            group = collectives.Group(("x",), (0, 1), rank, dist.group.WORLD)
            for _ in range(2 + rank):
                drawn = torch.rand(3, dtype=torch.float32)
            for _ in range(2):  # each time the other rank computes in between
                collectives.all_reduce(drawn, group)
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
    ("logical_functions", "found"),
    ("fuse", "_codes"),
    ("pool", "_shared"),
    ("copies", "_streams"),
    ("copies", "_copy_events"),
    ("global_state", "_closed"),
    ("rewrite", "_regions"),
    ("rowwise_operator", "_regions"),
    ("rowwise_operator", "_keys"),
    ("launch", "_jitted"),
    ("add_norm", "_functions"),
    ("add_norm", "_layers_by_class"),
    ("torch_compile", "_done"),
    ("torch_compile", "_kept"),
    ("rank_record", "_here"),
    ("world", "_worlds"),
    ("device", "_draw_nothing"),
    ("user_loops", "_checked"),
    ("user_loops", "_user_modules"),
}


def test_no_global_of_the_runtime_is_forgotten() -> None:
    """Every container at the top of a module of the runtime is known here as own or shared."""
    own = {(module.__name__.rpartition(".")[2], name) for module, name in OWN}
    found = set()
    for info in pkgutil.walk_packages(runtime.__path__, "schedlang.runtime."):
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            changes = value is None or isinstance(
                value, MutableMapping | MutableSequence | MutableSet
            )
            # constants are written in capitals, after an underscore or not
            if changes and name.strip("_").islower():
                found.add((info.name.rpartition(".")[2], name))
    assert own <= found
    assert {f for f in found if not f[1].startswith("__")} <= own | SHARED


def test_progress_is_told(threads: Threads) -> None:
    """Messages arrive with their rank, in order; outside a rank `progress` does nothing."""
    seen: list[tuple[int, object]] = []

    def work() -> None:
        report_progress("one")
        report_progress({"two": 2})

    threads.run(work, 2, on_progress=lambda rank, what: seen.append((rank, what)))
    assert sorted(seen, key=lambda s: s[0]) == [
        (rank, what) for rank in (0, 1) for what in ("one", {"two": 2})
    ]
    report_progress("nobody")


def test_modes_see_the_collectives(threads: Threads) -> None:
    """Operators go through torch's dispatcher, as those of gloo: what keeps results sees them."""

    def work() -> tuple[list[float], int]:
        keep = SelectiveModes(CallNumbers, (), collectives=True)
        found = []
        for mode in (keep.forward, keep.second):
            with mode:
                x = torch.tensor([1.0 + dist.get_rank()])
                dist.all_reduce(x)
                found.append(x.item())
        return found, len(keep.sent)

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
