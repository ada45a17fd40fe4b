"""Transfers between programs under two layouts: bit by bit, in the fewest bytes."""

from __future__ import annotations

import math
from typing import Any

import pytest

from schedlang.runtime.transfer.transfer import transfer
from tests.engine import Threads
from tests.layouts import LAYOUTS, assert_equal, ids, program_state, program_under


def world_of(name: str) -> int:
    """Return the number of ranks of a layout."""
    return math.prod(size for _, size in LAYOUTS[name][0])


def transfer_state(source: str, target: str, optimizer: bool) -> Any:
    """Transfer a trained program's state into a program of another layout; return statistics and
    both states."""
    a = program_under(source)
    for step in range(2 * optimizer):
        a.train_step(ids(step))
    b = program_under(target, fresh=True)
    stats = transfer(a, b, optimizer=optimizer, bucket_bytes=1 << 10)
    source_state, target_state = program_state(a), program_state(b)
    common = (
        source_state["groups"].keys() & target_state["groups"].keys()
    )  # each rank has its own groups
    for side in (source_state, target_state):
        side["groups"] = {name: side["groups"][name] for name in common}
    if not optimizer:
        source_state, target_state = source_state["state"], target_state["state"]
    return (
        stats.bytes,
        stats.bound,
        stats.sent,
        stats.received,
        stats.messages,
        source_state,
        target_state,
    )


PAIRS = [
    ("tp2", "dp2z3"),
    ("dp2z3", "tp2"),
    ("dp2z1", "dp2"),
    ("pp2", "tp2"),
    ("tp2", "pp2"),
    ("dp2", "pp2"),
    ("dp2tp2", "pp2dp2"),
    ("pp2dp2", "dp2tp2"),
    ("dp2tp2", "dp2tp2"),
]


@pytest.mark.parametrize("optimizer", [False, True])
@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_between_programs(one: str, other: str, optimizer: bool, threads: Threads) -> None:
    """Every tensor arrives to the last bit, and the bytes sent are the bound."""
    results = threads.run(transfer_state, world_of(one), one, other, optimizer)
    sent, received = (sum(rank[k] for rank in results) for k in (2, 3))
    for total, bound, *_, source_state, target_state in results:
        assert total == bound == sent == received
        assert_equal(target_state, source_state)
