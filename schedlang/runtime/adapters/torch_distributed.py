"""Patches of torch.distributed: functions replaced for a while, groups counted but not made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist


@contextmanager
def replace_functions(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace functions of torch.distributed, by name, within the block."""
    before = {name: getattr(dist, name) for name in functions}
    try:
        for name, function in functions.items():
            setattr(dist, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


@contextmanager
def name_groups_from(number: int) -> Iterator[None]:
    """Name groups made within the block by this number, not by the count of groups.

    Ranks of a part of a job make groups that other ranks do not know, and must still name them
    equally; torch's own option for that (`use_local_synchronization`) depends on the other groups
    of a rank.
    """
    world = dist.distributed_c10d._world
    before, world.group_count = world.group_count, number
    try:
        yield
    finally:
        world.group_count = before


def count_groups(number: int) -> None:
    """Count groups that this rank is not in, as if `new_group` had been called for each.

    torch names a group by the number of groups before it, and all ranks must use the same name. For
    a non-member `new_group` does nothing else, but takes time linear in the number of groups, of
    which a world has as many as ranks.
    """
    dist.distributed_c10d._world.group_count += number
