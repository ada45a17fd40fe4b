"""Replacements for functions of torch.distributed that report to the record of this rank."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import wraps
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from schedlang.runtime.adapters.torch_distributed import replace_functions
from schedlang.runtime.comm.collectives import Group, listen_to_collectives
from schedlang.runtime.launch.rank_record import Op, RankRecord

# name of the function -> the name in reports
COLLECTIVES = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "all_gather_single": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "reduce_scatter_single": "reduce-scatter",
    "all_to_all_single": "all-to-all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "barrier": "barrier",
    "all_gather_object": "all-gather of objects",
    "broadcast_object_list": "broadcast of objects",
}
MESSAGES = {"isend": "send", "send": "send", "irecv": "receive", "recv": "receive"}
_FSDP = "_fsdp_param_group.py"
_DEEP = 80  # frames that are searched for the module that communicates
_OWN = frozenset({"wait", "_work", "_one", "_record"})


class RecordedWork(dist.Work):
    """The handle of an operation that reports when it is waited for."""

    def __init__(self, work: Any, one: Op, record: RankRecord) -> None:
        super().__init__()
        self._work, self._one, self._record = work, one, record

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """See `Work.wait`."""
        if self._one.ended:
            return self._work.wait(*args, **kwargs)
        since = self._record.begin_wait(self._one)
        done = self._work.wait(*args, **kwargs)
        self._record.end_operation(self._one, since)
        return done

    def __getattribute__(self, name: str) -> Any:
        # the base class defines all names, but only the wrapped work has their state
        plain = name in _OWN or name.startswith("__")
        found = self if plain else object.__getattribute__(self, "_work")
        return object.__getattribute__(self, name) if plain else getattr(found, name)


class RecordedFunctions:
    """The replacements of one rank."""

    def __init__(self, record: RankRecord) -> None:
        self.record, self._told = record, ""
        self._names: dict[Any, str] = {}
        self._plain = {name: getattr(dist, name) for name in MESSAGES}

    def listen(self, kind: str, group: Group, size: int) -> None:
        """Note the label of the next collective."""
        self._told = group.label if group.pg is not None else ""

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Return the replacements by name."""
        made = {n: self._collective(n, op) for n, op in COLLECTIVES.items() if hasattr(dist, n)}
        made |= {name: self._message(name, op) for name, op in MESSAGES.items()}
        return {**made, "P2POp": self._paired(), "batch_isend_irecv": self._batch()}

    def _begin(self, op: str, group: Any, size: int, ends: tuple[int, int] | None = None) -> Op:
        whose, self._told = self._told or self._whose(sys._getframe(2)), ""
        one = self.record.begin_operation(self._lane(group), op, whose, size, ends)
        one.backward = torch._C._current_graph_task_id() != -1
        one.beside = one.beside and not one.backward
        return one

    def _lane(self, group: Any) -> str:
        group = dist.group.WORLD if group is None else group
        if group not in self._names:
            name = self._names[group] = str(group.group_name)
            self.record.lanes[name] = tuple(dist.get_process_group_ranks(group))
        return self._names[group]

    def _run(self, one: Op, call: Callable[[], Any]) -> Any:
        since = self.record.begin_wait(one)
        work = call()
        if isinstance(work, dist.Work):  # the caller waits later, or not at all
            self.record.waiting -= not one.beside
            one.waits = False
            return RecordedWork(work, one, self.record)
        self.record.end_operation(one, since)
        return work

    def _collective(self, name: str, op: str) -> Callable[..., Any]:
        plain = getattr(dist, name)

        @wraps(plain)
        def run(*args: Any, **kwargs: Any) -> Any:
            given = [*args, *kwargs.values()]
            group = next((one for one in given if isinstance(one, dist.ProcessGroup)), None)
            one = self._begin(op, group, _bytes(given))
            return self._run(one, lambda: plain(*args, **kwargs))

        return run

    def _message(self, name: str, op: str) -> Callable[..., Any]:
        plain = self._plain[name]

        @wraps(plain)
        def run(tensor: Tensor, peer: int | None = None, group: Any = None, **more: Any) -> Any:
            peer = more.pop("dst" if op == "send" else "src", peer)
            ends = self._ends(op, peer, group, more)
            one = self._begin(op, group, _bytes([tensor]), ends)
            return self._run(one, lambda: plain(tensor, peer, group, **more))

        return run

    def _ends(self, op: str, peer: int | None, group: Any, more: Any) -> tuple[int, int]:
        """Return sender and receiver; -1 for any."""
        if peer is None:
            place = more.get("group_dst" if op == "send" else "group_src")
            whole: Any = dist.group.WORLD if group is None else group
            peer = -1 if place is None else dist.get_global_rank(whole, place)
        mine = self.record.rank
        return (mine, peer) if op == "send" else (peer, mine)

    def _paired(self) -> Callable[..., Any]:
        """Return `P2POp`, which accepts only torch's own functions."""
        plain = dist.P2POp
        own = {"isend": self._plain["isend"], "irecv": self._plain["irecv"]}

        def run(op: Any, *args: Any, **kwargs: Any) -> Any:
            return plain(own.get(op.__name__, op), *args, **kwargs)

        return run

    def _batch(self) -> Callable[..., Any]:
        plain = dist.batch_isend_irecv

        def run(ops: Sequence[Any]) -> list[Any]:
            begun = []
            for each in ops:
                op = MESSAGES[each.op.__name__]
                ends = self._ends(op, each.peer, each.group, {})
                begun.append(self._begin(op, each.group, _bytes([each.tensor]), ends))
            works = plain([*ops])
            if len(works) == len(begun):
                return [RecordedWork(work, one, self.record) for work, one in zip(works, begun)]
            for one in begun:  # one handle for all: only the last operation is waited for
                one.ended = one.began
            begun[-1].ended = 0.0
            return [RecordedWork(work, begun[-1], self.record) for work in works]

        return run

    # -- the module that communicates
    # -------------------------------------------------------------------

    def _whose(self, frame: FrameType | None) -> str:
        """Return the module, or the parameters, that communicate, by the frames of the callers."""
        for _ in range(_DEEP):
            if frame is None:
                break
            if found := self.record.module_of(frame) or self._of_sums(frame):
                return found
            frame = frame.f_back
        return ""

    def _of_sums(self, frame: FrameType) -> str:
        """Return the parameters of a gradient reduction, or the module of a fully_shard unit."""
        code = frame.f_code
        if code.co_filename.endswith(_FSDP):
            return str(getattr(frame.f_locals.get("self"), "_module_fqn", None) or "")
        if code.co_name == "begin_one" and "members" in frame.f_locals:
            members = frame.f_locals["members"]
            names = self.record.parameters
            found = [names.get(id(one), "") for one in getattr(members, "parameters", members)]
            return found[0] + (f" and {len(found) - 1} more" if len(found) > 1 else "")
        return ""


def _bytes(given: Sequence[Any]) -> int:
    """Return the bytes of the largest tensor: the full one, of which ranks have or get shards."""
    sizes = [one.numel() * one.element_size() for one in given if isinstance(one, Tensor)]
    return max(sizes, default=0)


_replaced = ExitStack()


def record_calls(record: RankRecord) -> None:
    """Let torch.distributed report to this record from now on, and to no other."""
    _replaced.close()
    calls = RecordedFunctions(record)
    _replaced.enter_context(replace_functions(calls.functions()))
    _replaced.enter_context(listen_to_collectives(calls.listen))
