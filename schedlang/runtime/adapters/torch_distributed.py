"""Patches of torch.distributed: functions replaced for a while, groups counted but not made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
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


# functions that write into their first argument, and those that gather ranks' tensors into it
_WRITING = (
    *("all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "broadcast"),
    *("recv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter"),
)
_GATHERING = ("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_single")


def hear_collectives(
    written: Callable[[tuple[Any, ...], str, list[int]], None],
    gathered: Callable[[tuple[Any, ...], str, list[int]], None],
) -> None:
    """Report the tensors that collectives write from now on, however they were imported.

    With the name of the collective, and the ranks that take part. Each function runs another, which
    a wrapper of torch holds.
    """
    for name in (*_WRITING, *_GATHERING):
        wrapper: Any = getattr(dist, name, None)
        code = getattr(wrapper, "__code__", None)
        if code is None or "func" not in code.co_freevars:
            continue
        cell = wrapper.__closure__[code.co_freevars.index("func")]
        report = gathered if name in _GATHERING else written
        cell.cell_contents = _reporting(cell.cell_contents, report)


def _reporting(run: Any, report: Callable[[tuple[Any, ...], str, list[int]], None]) -> Any:
    @wraps(run)
    def reporting(*args: Any, **kwargs: Any) -> Any:
        result = run(*args, **kwargs)
        given = *args, *kwargs.values()
        group = next((value for value in given if isinstance(value, dist.ProcessGroup)), None)
        report(given[:1], run.__name__, dist.get_process_group_ranks(group))
        return result

    return reporting
