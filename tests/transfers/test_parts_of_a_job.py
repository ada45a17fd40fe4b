"""Programs on some ranks of a job: they train there, and hand their weights to others."""

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
from tests.layouts import LAYOUTS, adamw, equal, ids, plan_of, seen
from tests.models import gpt2
from tests.ranks import run_ranks
from tests.transfers.test_route import fill
from tests.transfers.test_transfer import world_of


def program_on(ranks: Sequence[int], name: str, fresh: bool = False) -> Any:
    """A program on some ranks; None on the others."""
    model = gpt2(layers=2)
    if fresh:
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.uniform_()
    if world.rank() not in ranks:
        return None
    with enter_given_ranks(ranks):
        return build(plan_of(name, model), ids(0), optimizer=adamw, clip=1.0)


def handed(ours: list[int], theirs: list[int], one: str, other: str) -> Any:
    """Losses of a trained program, and the state of both ends after a transfer."""
    with enter_modes(Float64()):
        return handed_on(ours, theirs, one, other)


def handed_on(ours: list[int], theirs: list[int], one: str, other: str) -> Any:
    """The same in float64 throughout."""
    a, b = program_on(ours, one), program_on(theirs, other, True)
    losses = [float(a.train_step(ids(k))) for k in range(2)] if a is not None else None
    told = transfer(a, b, optimizer=True)
    states = [end.state_dict() if end is not None else None for end in (a, b)]
    later = [float(end.train_step(ids(5))) if end is not None else None for end in (a, b)]
    return losses, told.bytes, told.bound, told.sent, told.received, states, later


CASES = [
    ([0, 1], [2, 3], "tp2", "dp2z3"),
    ([0, 1], [2], "dp2z1", "one"),
    ([1], [0, 2], "one", "tp2"),
    ([0, 1], [1, 2], "pp2", "tp2"),
    ([0, 2], [0, 1], "tp2", "pp2"),
    ([0, 1, 2, 3], [4, 5], "dp2tp2", "tp2"),
]


def check(found: list[Any], one: str) -> None:
    """What has come is what was there, and costs what it must."""
    alone = next(rank[0] for rank in found if rank[0] is not None)
    states = [state for rank in found for state in rank[5] if state is not None]
    for state in states[1:]:
        equal(state, states[0])
    assert sum(rank[3] for rank in found) == sum(rank[4] for rank in found) == found[0][1]
    assert all(rank[1] == rank[2] for rank in found)
    later = [loss for rank in found for loss in rank[6] if loss is not None]
    torch.testing.assert_close(later, later[:1] * len(later), rtol=1e-9, atol=0)
    assert alone[1] < alone[0]


@pytest.mark.parametrize(("ours", "theirs", "one", "other"), CASES)
def test_on_threads(
    ours: list[int], theirs: list[int], one: str, other: str, threads: Threads
) -> None:
    """Disjoint, overlapping, in another order: trained on some ranks, gone on with on others."""
    check(threads.run(handed, max(*ours, *theirs) + 1, ours, theirs, one, other), one)


def lacking(a: Any, b: Any, moments: int) -> int:
    """The bytes of what this rank is to hold and does not, element by element."""
    if b is None:
        return 0
    total = 0
    for name, parameter in b.assembly.parameters.items():
        there = torch.zeros(b.assembly.holdings[name].layout.shape, dtype=torch.bool)
        for end, value in ((b, True), (a, False)):
            if end is not None and name in end.assembly.parameters:
                ranks = end.assembly.ranks
                fill(there, end.assembly.holdings[name], ranks.mesh, ranks.rank, value)
        total += int(there.sum()) * parameter.element_size() * (1 + moments)
    if a is None:
        total += sum(buffer.nbytes for buffer in b.assembly.saved_buffers.values())
    return total


def counted(ours: list[int], theirs: list[int], one: str, other: str) -> Any:
    """Bytes of a transfer with AdamW's state, and those that this rank lacks before it."""
    a, b = program_on(ours, one), program_on(theirs, other, True)
    if a is not None:
        a.train_step(ids(0))
    lacks = lacking(a, b, moments=2)
    told = transfer(a, b, optimizer=True)
    return told.bytes, told.sent, told.received, lacks, [e and seen(e)["moments"] for e in (a, b)]


NAMES = st.sampled_from(sorted(LAYOUTS))


@settings(max_examples=12, deadline=None)
@given(one=NAMES, other=NAMES, first=st.integers(0, 5))
def test_no_more_than_ranks_lack(one: str, other: str, first: int, threads: Threads) -> None:
    """Of any two layouts on more, fewer, some or none of the same ranks, with the optimizer's
    state: each rank receives what it lacks, counted apart, and nobody anything else."""
    ours = list(range(world_of(one)))
    theirs = list(range(first, first + world_of(other)))
    found = threads.run(counted, max(*ours, *theirs) + 1, ours, theirs, one, other)
    for total, _, received, lacks, _ in found:
        assert received == lacks
        assert total == sum(rank[3] for rank in found) == sum(rank[1] for rank in found)
    first_, *rest = [state for *_, ends in found for state in ends if state is not None]
    for state in rest:
        equal(state, first_)


def test_on_processes() -> None:
    """The same between ranks of gloo, of which one is at both ends."""
    found = run_ranks(3, on_process, [0, 1], [1, 2], "tp2", "dp2z3")
    check(found, "tp2")


def on_process(_: int, *args: Any) -> Any:
    """What a process does."""
    torch.set_num_threads(1)
    return handed(*args)
