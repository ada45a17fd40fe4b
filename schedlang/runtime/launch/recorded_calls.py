"""The functions of torch.distributed, each of which tells the record of this rank what it does."""

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

from schedlang.runtime.adapters.torch_distributed import replaced
from schedlang.runtime.comm.collectives import Group, listening
from schedlang.runtime.launch.record import Op, Record

# by the name of the function, what the field calls it
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
_DEEP = 80  # frames that are looked at for whose sake something is sent
_OWN = frozenset({"wait", "_work", "_one", "_record"})


class Waited(dist.Work):
    """The handle of an operation: itself, but that waiting for it is told."""

    def __init__(self, work: Any, one: Op, record: Record) -> None:
        super().__init__()
        self._work, self._one, self._record = work, one, record

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """See `Work.wait`."""
        if self._one.ended:
            return self._work.wait(*args, **kwargs)
        since = self._record.wait(self._one)
        done = self._work.wait(*args, **kwargs)
        self._record.done(self._one, since)
        return done

    def __getattribute__(self, name: str) -> Any:
        # the base class has all names, and knows nothing of them
        plain = name in _OWN or name.startswith("__")
        found = self if plain else object.__getattribute__(self, "_work")
        return object.__getattribute__(self, name) if plain else getattr(found, name)


class Calls:
    """The stand-ins of one rank."""

    def __init__(self, record: Record) -> None:
        self.record, self._told = record, ""
        self._names: dict[Any, str] = {}
        self._plain = {name: getattr(dist, name) for name in MESSAGES}

    def listen(self, kind: str, group: Group, size: int) -> None:
        """The runtime tells for whose sake it asks for the next collective."""
        self._told = group.label if group.pg is not None else ""

    def functions(self) -> dict[str, Callable[..., Any]]:
        """The stand-ins by the names of what they stand for."""
        made = {n: self._collective(n, op) for n, op in COLLECTIVES.items() if hasattr(dist, n)}
        made |= {name: self._message(name, op) for name, op in MESSAGES.items()}
        return {**made, "P2POp": self._paired(), "batch_isend_irecv": self._batch()}

    def _begin(self, op: str, group: Any, size: int, ends: tuple[int, int] | None = None) -> Op:
        whose, self._told = self._told or self._whose(sys._getframe(2)), ""
        one = self.record.op(self._lane(group), op, whose, size, ends)
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
        since = self.record.wait(one)
        work = call()
        if isinstance(work, dist.Work):  # whoever asked waits later, or not at all
            self.record.waiting -= not one.beside
            one.waits = False
            return Waited(work, one, self.record)
        self.record.done(one, since)
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
        """The sender and the receiver; -1 for anyone."""
        if peer is None:
            place = more.get("group_dst" if op == "send" else "group_src")
            whole: Any = dist.group.WORLD if group is None else group
            peer = -1 if place is None else dist.get_global_rank(whole, place)
        mine = self.record.rank
        return (mine, peer) if op == "send" else (peer, mine)

    def _paired(self) -> Callable[..., Any]:
        """`P2POp`, which takes torch's own functions and no others."""
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
                return [Waited(work, one, self.record) for work, one in zip(works, begun)]
            for one in begun:  # all in one: the last is waited for
                one.ended = one.began
            begun[-1].ended = 0.0
            return [Waited(work, begun[-1], self.record) for work in works]

        return run

    # -- for whose sake ----------------------------------------------------------------------------

    def _whose(self, frame: FrameType | None) -> str:
        """The module, or the parameters, that this is sent for: who calls knows it."""
        for _ in range(_DEEP):
            if frame is None:
                break
            if found := self.record.module_of(frame) or self._of_sums(frame):
                return found
            frame = frame.f_back
        return ""

    def _of_sums(self, frame: FrameType) -> str:
        """The parameters of a sum of gradients, or the module of a unit of fully_shard."""
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
    """The bytes of the largest tensor: the whole one, of which ranks hold or get parts."""
    sizes = [one.numel() * one.element_size() for one in given if isinstance(one, Tensor)]
    return max(sizes, default=0)


_replaced = ExitStack()


def tell(record: Record) -> None:
    """Have torch.distributed tell this record from now on, and no other."""
    _replaced.close()
    calls = Calls(record)
    _replaced.enter_context(replaced(calls.functions()))
    _replaced.enter_context(listening(calls.listen))
