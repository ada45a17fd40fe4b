"""Transfers between programs under two layouts: bit by bit, and no byte more than is needed."""

from __future__ import annotations

import math
from typing import Any

import pytest

from schedlang.runtime.transfer.transfer import transfer
from tests.engine import Threads
from tests.layouts import LAYOUTS, equal, ids, program_under, seen


def world_of(name: str) -> int:
    """The ranks of a layout."""
    return math.prod(size for _, size in LAYOUTS[name][0])


def moved(one: str, other: str, optimizer: bool) -> Any:
    """A trained program's state in one of other values under another layout."""
    a = program_under(one)
    for step in range(2 * optimizer):
        a.train_step(ids(step))
    b = program_under(other, fresh=True)
    told = transfer(a, b, optimizer=optimizer, bucket_bytes=1 << 10)
    before, after = seen(a), seen(b)
    both = before["groups"].keys() & after["groups"].keys()  # each rank sees those of its own
    for side in (before, after):
        side["groups"] = {name: side["groups"][name] for name in both}
    if not optimizer:
        before, after = before["state"], after["state"]
    return told.bytes, told.bound, told.sent, told.received, told.messages, before, after


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
    """Every tensor has arrived to the last bit, and what was sent is the bound."""
    found = threads.run(moved, world_of(one), one, other, optimizer)
    sent, received = (sum(rank[k] for rank in found) for k in (2, 3))
    for total, bound, *_, before, after in found:
        assert total == bound == sent == received
        equal(after, before)
