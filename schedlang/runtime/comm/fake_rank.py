"""Dry run of one rank of a world without the other ranks: its communication is logged, not sent.

Process groups are torch's own, with its `fake` backend; the functions of torch.distributed that the
runtime calls are replaced while the dry run lasts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from schedlang.runtime.adapters.torch_distributed import replace_functions
from schedlang.runtime.comm import world as comm
from schedlang.runtime.comm.collectives import Group, listen_to_collectives


@dataclass(frozen=True)
class Lane:
    """A process group: its ranks, and its number among several groups of the same ranks."""

    ranks: tuple[int, ...]
    number: int = 0

    def __str__(self) -> str:
        return f"{list(self.ranks)}" + (f" (no. {self.number + 1})" if self.number else "")


@dataclass(frozen=True)
class LoggedOperation:
    """One operation of one rank: a collective, a message, or the making of a group (`lane_of`
    None).

    how   the reduction, or the root
    ends  sender and receiver of a message
    fqn   the module that issues it, if known
    """

    op: str
    lane: Lane | None
    shape: tuple[int, ...] = ()
    dtype: str = ""
    how: str = ""
    ends: tuple[int, int] | None = None
    fqn: str = field(default="", compare=False)

    def __str__(self) -> str:
        detail = f" {self.how}" if self.how else ""
        tensor_text = f" of {self.dtype}{list(self.shape)}" if self.dtype else ""
        return f"{self.op}{detail}{tensor_text}"


# called at every collective and message: its name, its group, its tensors, its two ends
OperationListener = Callable[[str, Lane, Sequence[Tensor], tuple[int, int] | None], None]


class DoneWork:
    """The handle of an operation that is done."""

    def wait(self, timeout: object = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True


class OperationLog:
    """The log of one rank, in order."""

    def __init__(self, rank: int, world: int, listener: OperationListener | None = None) -> None:
        self.rank, self.hear = rank, listener
        self.log: list[LoggedOperation] = []
        self.summed: list[tuple[Lane, Tensor]] = []  # inputs of all-reduces
        self._lanes: dict[Any, Lane] = {}
        self._count = {tuple(range(world)): 1}  # ranks -> number of groups over these ranks
        self.told = ""  # the module that issues the next collective

    def listen(self, kind: str, group: Group, size: int) -> None:
        """Note the label of the next collective, which the runtime reports before calling torch."""
        self.told = group.label

    def log_operation(self, sent: LoggedOperation, tensor: Tensor | None = None) -> DoneWork:
        """Log one operation."""
        sent, self.told = replace(sent, fqn=self.told), ""
        self.log.append(sent)
        # kept alive to find out which gradients they are, but not while memory is measured
        summed = self.hear is None and sent.op == "all_reduce"
        if tensor is not None and summed and sent.lane is not None:
            self.summed.append((sent.lane, tensor))
        return DoneWork()

    def lane_of(self, group: Any) -> Lane:
        """Return the lane of a process group; None is the world."""
        group = dist.group.WORLD if group is None else group
        if group not in self._lanes:
            self._lanes[group] = Lane(tuple(dist.get_process_group_ranks(group)))
        return self._lanes[group]

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The groups of this rank that were made or used."""
        return tuple(self._lanes.values())

    def log_group(self, ranks: Sequence[int], group: Any) -> None:
        """Log that a group was made; every rank of the world takes part in that."""
        key = tuple(ranks)
        number = self._count.setdefault(key, 0)
        self._count[key] += 1
        self.log.append(LoggedOperation("new group", None, key))
        if self.rank in key:
            self._lanes[group] = Lane(key, number)


def _replacements(log: OperationLog) -> dict[str, Callable[..., Any]]:
    """Return replacements for functions of torch.distributed."""
    plain_new = dist.new_group

    def new_group(ranks: Sequence[int] | None = None, *args: Any, **kwargs: Any) -> Any:
        group = plain_new(ranks, *args, **kwargs)
        log.log_group(ranks if ranks is not None else range(dist.get_world_size()), group)
        return group

    def collective(name: str, tensor_index: int) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> DoneWork:
            op = kwargs.get("op", next((a for a in args if isinstance(a, dist.ReduceOp)), None))
            group = kwargs.get("group", next((a for a in args if _is_group(a)), None))
            root = f"from {kwargs['src']}" if "src" in kwargs else ""
            root = f"to {kwargs['dst']}" if "dst" in kwargs else root
            reduces = "reduce" in name
            detail = root or (str(op if op is not None else dist.ReduceOp.SUM) if reduces else "")
            tensor = args[tensor_index] if len(args) > tensor_index else None
            logged = tensor if isinstance(tensor, Tensor) else None
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            if log.hear is not None:
                log.hear(name, log.lane_of(group), tensors, None)
            return log.log_operation(_operation(name, log.lane_of(group), logged, detail), logged)

        return run

    def message(name: str, is_send: bool) -> Callable[..., Any]:
        def run(tensor: Tensor, peer: int, group: Any = None, tag: int = 0) -> DoneWork:
            ends = (log.rank, peer) if is_send else (peer, log.rank)
            if log.hear is not None:
                log.hear(name, log.lane_of(group), [tensor], ends)
            return log.log_operation(_operation(name, log.lane_of(group), tensor, "", ends), tensor)

        return run

    return {
        **_new_names(collective),
        "new_group": new_group,
        "all_reduce": collective("all_reduce", 0),
        "all_gather_into_tensor": collective("all_gather", 0),
        "reduce_scatter_tensor": collective("reduce_scatter", 1),
        "all_to_all_single": collective("all_to_all", 9),  # row counts may differ from rank to rank
        "broadcast": collective("broadcast", 0),
        "reduce": collective("reduce", 0),
        "barrier": collective("barrier", 9),
        "isend": message("send", True),
        "irecv": message("recv", False),
        "send": message("send", True),
        "recv": message("recv", False),
    }


def _new_names(collective: Callable[[str, int], Callable[..., DoneWork]]) -> dict[str, Any]:
    """Return replacements for torch 2.13's new functions, which return a handle only if asked."""

    def at_once(start: Callable[..., DoneWork]) -> Callable[..., DoneWork | None]:
        def asked(*args: Any, **kwargs: Any) -> DoneWork | None:
            work = start(*args, **kwargs)
            return work if kwargs.get("async_op") else None

        return asked

    functions = {
        "all_gather_single": at_once(collective("all_gather", 0)),
        "reduce_scatter_single": at_once(collective("reduce_scatter", 1)),
    }
    return {name: function for name, function in functions.items() if hasattr(dist, name)}


def _is_group(value: object) -> bool:
    return isinstance(value, dist.ProcessGroup)


def _operation(
    name: str, lane: Lane, tensor: Tensor | None, detail: str, ends: tuple[int, int] | None = None
) -> LoggedOperation:
    if tensor is None:
        return LoggedOperation(name, lane, how=detail, ends=ends)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return LoggedOperation(name, lane, tuple(tensor.shape), dtype, detail, ends)


def can_fake_rank() -> bool:
    """Return whether this process can run a dry run: not while it is a rank of a job."""
    return not dist.is_initialized()


@contextmanager
def fake_rank(
    rank: int, world: int, hear: OperationListener | None = None
) -> Iterator[OperationLog]:
    """Act, within the block, as one rank of a world of this size; nothing is sent."""
    assert can_fake_rank(), "this process is a rank already"
    tap, hook = OperationLog(rank, world, hear), sys.excepthook
    if world == 1:
        yield tap
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    functions, pass_over = _replacements(tap), comm.skip_groups

    def passed(groups: comm.GroupRanks) -> None:
        for ranks in groups:
            tap.log_group(ranks, None)
        pass_over(groups)

    try:
        comm.skip_groups = passed
        with replace_functions(functions), listen_to_collectives(tap.listen):
            yield tap
    finally:
        comm.skip_groups = pass_over
        dist.destroy_process_group()
        sys.excepthook = hook
