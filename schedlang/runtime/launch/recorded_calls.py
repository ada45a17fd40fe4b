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

    def __init__(self, work: Any, op: Op, record: RankRecord) -> None:
        super().__init__()
        self._work, self._one, self._record = work, op, record

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """See `Work.wait`."""
        if self._one.ended:
            return self._work.wait(*args, **kwargs)
        since = self._record.begin_wait(self._one)
        result = self._work.wait(*args, **kwargs)
        self._record.end_operation(self._one, since)
        return result

    def __getattribute__(self, name: str) -> Any:
        # the base class defines all names, but only the wrapped work has their state
        is_own = name in _OWN or name.startswith("__")
        owner = self if is_own else object.__getattribute__(self, "_work")
        return object.__getattribute__(self, name) if is_own else getattr(owner, name)


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
        calls = {n: self._collective(n, op) for n, op in COLLECTIVES.items() if hasattr(dist, n)}
        calls |= {name: self._message(name, op) for name, op in MESSAGES.items()}
        return {**calls, "P2POp": self._paired(), "batch_isend_irecv": self._batch()}

    def _begin(self, op: str, group: Any, size: int, ends: tuple[int, int] | None = None) -> Op:
        whose, self._told = self._told or self._whose(sys._getframe(2)), ""
        operation = self.record.begin_operation(self._lane(group), op, whose, size, ends)
        operation.backward = torch._C._current_graph_task_id() != -1
        operation.beside = operation.beside and not operation.backward
        return operation

    def _lane(self, group: Any) -> str:
        group = dist.group.WORLD if group is None else group
        if group not in self._names:
            name = self._names[group] = str(group.group_name)
            self.record.lanes[name] = tuple(dist.get_process_group_ranks(group))
        return self._names[group]

    def _run(self, op: Op, call: Callable[[], Any]) -> Any:
        since = self.record.begin_wait(op)
        work = call()
        if isinstance(work, dist.Work):  # the caller waits later, or not at all
            self.record.waiting -= not op.beside
            op.waits = False
            return RecordedWork(work, op, self.record)
        self.record.end_operation(op, since)
        return work

    def _collective(self, name: str, op: str) -> Callable[..., Any]:
        original = getattr(dist, name)

        @wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            values = [*args, *kwargs.values()]
            group = next((value for value in values if isinstance(value, dist.ProcessGroup)), None)
            value = self._begin(op, group, _bytes(values))
            return self._run(value, lambda: original(*args, **kwargs))

        return run

    def _message(self, name: str, op: str) -> Callable[..., Any]:
        original = self._plain[name]

        @wraps(original)
        def run(tensor: Tensor, peer: int | None = None, group: Any = None, **options: Any) -> Any:
            peer = options.pop("dst" if op == "send" else "src", peer)
            ends = self._ends(op, peer, group, options)
            operation = self._begin(op, group, _bytes([tensor]), ends)
            return self._run(operation, lambda: original(tensor, peer, group, **options))

        return run

    def _ends(self, op: str, peer: int | None, group: Any, options: Any) -> tuple[int, int]:
        """Return sender and receiver; -1 for any."""
        if peer is None:
            group_rank = options.get("group_dst" if op == "send" else "group_src")
            peer_group: Any = dist.group.WORLD if group is None else group
            peer = -1 if group_rank is None else dist.get_global_rank(peer_group, group_rank)
        own_rank = self.record.rank
        return (own_rank, peer) if op == "send" else (peer, own_rank)

    def _paired(self) -> Callable[..., Any]:
        """Return `P2POp`, which accepts only torch's own functions."""
        original = dist.P2POp
        originals = {"isend": self._plain["isend"], "irecv": self._plain["irecv"]}

        def run(op: Any, *args: Any, **kwargs: Any) -> Any:
            return original(originals.get(op.__name__, op), *args, **kwargs)

        return run

    def _batch(self) -> Callable[..., Any]:
        original = dist.batch_isend_irecv

        def run(ops: Sequence[Any]) -> list[Any]:
            begun = []
            for p2p_op in ops:
                op = MESSAGES[p2p_op.op.__name__]
                ends = self._ends(op, p2p_op.peer, p2p_op.group, {})
                begun.append(self._begin(op, p2p_op.group, _bytes([p2p_op.tensor]), ends))
            works = original([*ops])
            if len(works) == len(begun):
                return [
                    RecordedWork(work, op_record, self.record)
                    for work, op_record in zip(works, begun)
                ]
            for op_record in begun:  # one handle for all: only the last operation is waited for
                op_record.ended = op_record.began
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
            if label := self.record.module_of(frame) or self._of_sums(frame):
                return label
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
            labels = [names.get(id(p), "") for p in getattr(members, "parameters", members)]
            return labels[0] + (f" and {len(labels) - 1} more" if len(labels) > 1 else "")
        return ""


def _bytes(values: Sequence[Any]) -> int:
    """Return the bytes of the largest tensor: the full one, of which ranks have or get shards."""
    sizes = [value.numel() * value.element_size() for value in values if isinstance(value, Tensor)]
    return max(sizes, default=0)


_replaced = ExitStack()


def record_calls(record: RankRecord) -> None:
    """Let torch.distributed report to this record from now on, and to no other."""
    _replaced.close()
    calls = RecordedFunctions(record)
    _replaced.enter_context(replace_functions(calls.functions()))
    _replaced.enter_context(listen_to_collectives(calls.listen))
