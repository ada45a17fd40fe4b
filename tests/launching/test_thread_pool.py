"""The thread pool: mistakes are errors at once, and each rank has its own global state."""

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
from tests.engine.globals import PER_RANK

# -- errors ----------------------------------------------------------------------------------------


def sum_ones() -> float:
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x)
    return x.item()


def test_a_rank_that_raises_ends_the_run(threads: Threads) -> None:
    """It is named with its own traceback, the others are woken, and the next run works."""

    def work() -> None:
        if dist.get_rank() == 1:
            raise KeyError("spoiled")
        dist.all_reduce(torch.ones(1))

    with pytest.raises(RankDied) as info:
        threads.run(work, 3)
    assert info.value.rank == 1 and "KeyError: 'spoiled'" in info.value.error
    assert isinstance(info.value.cause, KeyError)
    assert threads.run(sum_ones, 3) == [3, 3, 3]


def test_a_refusal_is_raised_as_such(threads: Threads) -> None:
    """A refusal on ranks is raised, not reported as a death."""

    def work() -> None:
        raise Refusal.of("S999", "not like this")

    with pytest.raises(Refusal, match="not like this"):
        threads.run(work, 2)


def mismatch_op() -> None:
    x = torch.ones(2)
    dist.all_reduce(x) if dist.get_rank() else dist.broadcast(x, 0)


def mismatch_shape() -> None:
    dist.all_reduce(torch.ones(2 + dist.get_rank()))


def mismatch_dtype() -> None:
    dist.all_reduce(torch.ones(2, dtype=torch.float64 if dist.get_rank() else torch.float32))


def mismatch_order() -> None:
    x, y = torch.ones(2), torch.ones(3)
    for t in (x, y) if dist.get_rank() else (y, x):
        dist.all_reduce(t)


def mismatch_root() -> None:
    dist.broadcast(torch.ones(2), dist.get_rank())


@pytest.mark.parametrize(
    "work", [mismatch_op, mismatch_shape, mismatch_dtype, mismatch_order, mismatch_root]
)
def test_ranks_that_do_not_mean_the_same(work: Any, threads: Threads) -> None:
    """A different operation, shape, dtype, order or root is an error that names the ranks and both
    calls."""
    with pytest.raises(RankDied, match="rank 0 does .*rank 1 does ") as info:
        threads.run(work, 2)
    assert isinstance(info.value.cause, Mismatch)


def test_a_message_of_another_size(threads: Threads) -> None:
    """A receive that does not fit its send is an error on both ranks."""

    def work() -> None:
        (dist.send if dist.get_rank() else dist.recv)(
            torch.ones(2 + dist.get_rank()), 1 - dist.get_rank()
        )

    with pytest.raises(RankDied, match=r"rank 1 sends .*\[3\], rank 0 receives .*\[2\]"):
        threads.run(work, 2)


def test_a_deadlock_is_known_at_once(threads: Threads) -> None:
    """Ranks that wait for nothing are reported with what each waits for."""

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
    """A collective that some ranks begin and never wait for, and that others never join."""

    def work() -> None:
        if dist.get_rank():
            dist.all_reduce(torch.ones(2), async_op=True)

    with pytest.raises(RankDied, match="all_reduce number 0 of ranks 0, 1: only 1 came"):
        threads.run(work, 2)


def test_an_endless_loop_meets_the_time_limit() -> None:
    """The current line of each rank is reported, and its thread ends."""

    def spins() -> None:
        while dist.get_rank() == 0:
            pass
        dist.barrier()

    earlier = threading.enumerate()
    with Threads() as threads:
        threads.run(sum_ones, 2)
        ranks = [thread for thread in threading.enumerate() if thread not in earlier]
        with pytest.raises(Hang, match="not finished after 0.5 s") as info:
            threads.run(spins, 2, timeout=0.5)
        assert "in spins" in info.value.stacks[0] and "its start" in info.value.stacks[1]
        for thread in ranks:
            thread.join(60)
        assert len(ranks) == 2 and not any(thread.is_alive() for thread in ranks)
        assert threads.run(sum_ones, 2) == [1, 1]


# -- what is each rank's own -----------------------------------------------------------------------


def test_arguments_are_copies(threads: Threads) -> None:
    """Each rank changes its own copy of a model, and of what a closure captures; ties stay."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight
    captured = torch.zeros(2)

    def work(network: torch.nn.Module) -> tuple[Any, int, bool]:
        with torch.no_grad():
            network[0].weight.fill_(dist.get_rank())  # type: ignore[index,operator]
            captured.add_(1.0)
        dist.barrier()
        tied = network[0].weight is network[1].weight  # type: ignore[index]
        return network[0].weight, captured.data_ptr(), tied  # type: ignore[index]

    results = threads.run(work, 3, model)
    assert [weight[0, 0].item() for weight, _, _ in results] == [0, 1, 2]
    assert len({pointer for _, pointer, _ in results} | {captured.data_ptr()}) == 4
    assert all(tied for _, _, tied in results) and captured.sum() == 0
    assert not (model[0].weight == 0).all()


def test_globals_of_the_process_are_each_ranks_own(threads: Threads) -> None:
    """Generator, default dtype, environment and listeners: separate as in processes, and
    restored."""

    def work() -> tuple[Any, ...]:
        rank, calls = dist.get_rank(), []
        torch.set_default_dtype(torch.float64 if rank else torch.float16)
        with collectives.listen_to_collectives(lambda *details: calls.append(details)):
            group = collectives.Group(("x",), (0, 1), rank, dist.group.WORLD)
            for _ in range(2 + rank):
                random = torch.rand(3, dtype=torch.float32)
            for _ in range(2):  # the other rank computes between both
                collectives.all_reduce(random, group)
        return random.tolist(), torch.ones(1).dtype, os.environ["RANK"], len(calls)

    torch.manual_seed(5)
    initial = torch.get_rng_state(), torch.get_default_dtype(), dict(os.environ), sys.excepthook
    first, second = threads.run(work, 2)
    generator = torch.Generator().manual_seed(0)
    draws = [torch.rand(3, generator=generator).tolist() for _ in range(3)]
    assert first == (draws[1], torch.float16, "0", 2)
    assert second == (draws[2], torch.float64, "1", 2)
    assert torch.equal(initial[0], torch.get_rng_state())
    assert initial[1:] == (torch.get_default_dtype(), dict(os.environ), sys.excepthook)
    assert not dist.is_initialized()


# caches that give the same whoever filled them, and what belongs to the process
SHARED = {
    ("logical_functions", "found"),
    ("fuse", "_codes"),
    ("shard_gradients", "_warned"),
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
    ("held_parts", "_held"),
    ("user_loops", "_checked"),
    ("user_loops", "_owners"),
    ("user_loops", "_user_modules"),
}


def test_no_global_of_the_runtime_is_forgotten() -> None:
    """Every module-level container of the runtime is listed as own or shared."""
    own_names = {(module.__name__.rpartition(".")[2], name) for module, name in PER_RANK}
    containers = set()
    for info in pkgutil.walk_packages(runtime.__path__, "schedlang.runtime."):
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            changes = value is None or isinstance(
                value, MutableMapping | MutableSequence | MutableSet
            )
            # constants are written in capitals, after an underscore or not
            if changes and name.strip("_").islower():
                containers.add((info.name.rpartition(".")[2], name))
    assert own_names <= containers
    assert {f for f in containers if not f[1].startswith("__")} <= own_names | SHARED


def test_progress_is_told(threads: Threads) -> None:
    """Messages arrive with their rank, in order; outside of a rank `report_progress` does
    nothing."""
    messages: list[tuple[int, object]] = []

    def work() -> None:
        report_progress("one")
        report_progress({"two": 2})

    threads.run(work, 2, on_progress=lambda rank, message: messages.append((rank, message)))
    assert sorted(messages, key=lambda s: s[0]) == [
        (rank, message) for rank in (0, 1) for message in ("one", {"two": 2})
    ]
    report_progress("nobody")


def test_modes_see_the_collectives(threads: Threads) -> None:
    """Operators use torch's dispatcher, as gloo's do: dispatch modes see them."""

    def work() -> tuple[list[float], int]:
        keep = SelectiveModes(CallNumbers, (), collectives=True)
        values = []
        for mode in (keep.forward, keep.second):
            with mode:
                x = torch.tensor([1.0 + dist.get_rank()])
                dist.all_reduce(x)
                values.append(x.item())
        return values, len(keep.sent)

    assert threads.run(work, 2) == [([3, 3], 1)] * 2


def test_gloo_still_works_in_this_process(threads: Threads) -> None:
    """Outside of rank threads the operators are torch's, during a run and after it."""
    threads.run(sum_ones, 2)
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert threads.run(sum_ones, 2) == [1, 1]
        x = torch.ones(2)
        dist.all_reduce(x)
        assert x.tolist() == [1, 1] and dist.get_backend() == "gloo"
    finally:
        dist.destroy_process_group()
