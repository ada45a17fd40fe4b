"""torch.distributed: functions replaced for a time, groups counted that are never made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist


@contextmanager
def replaced(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Put other functions into torch.distributed, by name, for the time of a block."""
    before = {name: getattr(dist, name) for name in functions}
    try:
        for name, function in functions.items():
            setattr(dist, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


@contextmanager
def counted_from(number: int) -> Iterator[None]:
    """Name the groups that are made inside by a number of one's own, not by how many there were.

    Ranks of a part of a job make groups that others do not hear of, and still name them alike; what
    torch offers for that (`use_local_synchronization`) hangs on what else a rank has made.
    """
    world = dist.distributed_c10d._world
    before, world.group_count = world.group_count, number
    try:
        yield
    finally:
        world.group_count = before


def count_groups(number: int) -> None:
    """Count groups that this rank is not in, as if it had been asked to make each of them.

    torch names a group by how many were asked for before, and all ranks have to name it alike.
    `new_group` does nothing else where it is not a member, but takes as long as there are groups,
    of which a world has as many as ranks.
    """
    dist.distributed_c10d._world.group_count += number
