"""Programs on a subset of a job's ranks: they train there, and transfer weights to other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlang.passes.lower.build import build
from schedlang.runtime.comm import world
from schedlang.runtime.comm.collectives import enter_given_ranks
from schedlang.runtime.float64 import Float64
from schedlang.runtime.modes import enter_modes
from schedlang.runtime.transfer.transfer import transfer
from tests.engine import Threads
from tests.layouts import (
    LAYOUTS,
    adamw,
    assert_equal,
    ids,
    plan_of,
    prepared_for,
    program_state,
)
from tests.models import gpt2
from tests.ranks import run_ranks
from tests.transfers.test_route import fill_held
from tests.transfers.test_transfer import world_of


def program_on(ranks: Sequence[int], name: str, fresh: bool = False) -> Any:
    """Build a program on some ranks; return None on the others."""
    model = gpt2(layers=2)
    if fresh:
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.uniform_()
    if world.rank() not in ranks:
        return None
    plan = plan_of(name, model)
    with enter_given_ranks(ranks):
        prepared = prepared_for(name, plan)
        return build(plan, ids(0), optimizer=adamw, clip=1.0, prepared=prepared)


def transfer_float64(
    source_ranks: list[int], target_ranks: list[int], source_layout: str, target_layout: str
) -> Any:
    """Run the transfer in float64."""
    with enter_modes(Float64()):
        return transfer_trained(source_ranks, target_ranks, source_layout, target_layout)


def transfer_trained(
    source_ranks: list[int], target_ranks: list[int], source_layout: str, target_layout: str
) -> Any:
    """Train on one subset and transfer: return losses, bytes, states of both ends, later losses."""
    a, b = program_on(source_ranks, source_layout), program_on(target_ranks, target_layout, True)
    losses = [float(a.train_step(ids(k))) for k in range(2)] if a is not None else None
    stats = transfer(a, b, optimizer=True)
    states = [end.state_dict() if end is not None else None for end in (a, b)]
    later = [float(end.train_step(ids(5))) if end is not None else None for end in (a, b)]
    return losses, stats.bytes, stats.bound, stats.sent, stats.received, states, later


CASES = [
    ([0, 1], [2, 3], "tp2", "dp2z3"),
    ([0, 1], [2], "dp2z1", "one"),
    ([1], [0, 2], "one", "tp2"),
    ([0, 1], [1, 2], "pp2", "tp2"),
    ([0, 2], [0, 1], "tp2", "pp2"),
    ([0, 1, 2, 3], [4, 5], "dp2tp2", "tp2"),
]


def check_results(results: list[Any], one: str) -> None:
    """Check that states and later losses are equal, in the fewest bytes."""
    losses = next(rank[0] for rank in results if rank[0] is not None)
    states = [state for rank in results for state in rank[5] if state is not None]
    for state in states[1:]:
        assert_equal(state, states[0])
    assert sum(rank[3] for rank in results) == sum(rank[4] for rank in results) == results[0][1]
    assert all(rank[1] == rank[2] for rank in results)
    later = [loss for rank in results for loss in rank[6] if loss is not None]
    torch.testing.assert_close(later, later[:1] * len(later), rtol=1e-9, atol=0)
    assert losses[1] < losses[0]


@pytest.mark.parametrize(("ours", "theirs", "one", "other"), CASES)
def test_on_threads(
    ours: list[int], theirs: list[int], one: str, other: str, threads: Threads
) -> None:
    """Disjoint, overlapping, in another order: trained on some ranks, continued on others."""
    check_results(
        threads.run(transfer_float64, max(*ours, *theirs) + 1, ours, theirs, one, other), one
    )


def lacking_bytes(a: Any, b: Any, moments: int) -> int:
    """Count the bytes that this rank needs and does not have, element by element."""
    if b is None:
        return 0
    total = 0
    for name, parameter in b.assembly.parameters.items():
        missing = torch.zeros(b.assembly.holdings[name].layout.shape, dtype=torch.bool)
        for end, value in ((b, True), (a, False)):
            if end is not None and name in end.assembly.parameters:
                ranks = end.assembly.ranks
                fill_held(missing, end.assembly.holdings[name], ranks.mesh, ranks.rank, value)
        total += int(missing.sum()) * parameter.element_size() * (1 + moments)
    if a is None:
        total += sum(buffer.nbytes for buffer in b.assembly.saved_buffers.values())
    return total


def count_bytes(
    source_ranks: list[int], target_ranks: list[int], source_layout: str, target_layout: str
) -> Any:
    """Transfer with AdamW's state: return its bytes, and those that this rank lacked."""
    a, b = program_on(source_ranks, source_layout), program_on(target_ranks, target_layout, True)
    if a is not None:
        a.train_step(ids(0))
    lacks = lacking_bytes(a, b, moments=2)
    stats = transfer(a, b, optimizer=True)
    return (
        stats.bytes,
        stats.sent,
        stats.received,
        lacks,
        [e and program_state(e)["moments"] for e in (a, b)],
    )


NAMES = st.sampled_from(sorted(LAYOUTS))


@settings(max_examples=12, deadline=None)
@given(one=NAMES, other=NAMES, first=st.integers(0, 5))
def test_no_more_than_ranks_lack(one: str, other: str, first: int, threads: Threads) -> None:
    """Between any two layouts on more, fewer, some or none of the same ranks, with the optimizer's
    state: each rank receives exactly what it lacks, counted separately."""
    source_ranks = list(range(world_of(one)))
    target_ranks = list(range(first, first + world_of(other)))
    results = threads.run(
        count_bytes, max(*source_ranks, *target_ranks) + 1, source_ranks, target_ranks, one, other
    )
    for total, _, received, lacks, _ in results:
        assert received == lacks
        assert total == sum(rank[3] for rank in results) == sum(rank[1] for rank in results)
    first_, *others = [state for *_, ends in results for state in ends if state is not None]
    for state in others:
        assert_equal(state, first_)


def test_on_processes() -> None:
    """The same between gloo ranks, one of which is at both ends."""
    results = run_ranks(3, transfer_on_process, [0, 1], [1, 2], "tp2", "dp2z3")
    check_results(results, "tp2")


def transfer_on_process(_: int, *args: Any) -> Any:
    """Run the transfer in a process with one thread."""
    torch.set_num_threads(1)
    return transfer_float64(*args)
