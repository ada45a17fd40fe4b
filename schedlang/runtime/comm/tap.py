"""One rank of a world that is not there: what it would send is written down, and goes nowhere.

Groups are torch's own, of its `fake` backend; the functions of torch.distributed that the runtime
calls are replaced while it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from schedlang.runtime.adapters.torch_distributed import replaced
from schedlang.runtime.comm import world as comm
from schedlang.runtime.comm.collectives import Group, listening


@dataclass(frozen=True)
class Lane:
    """A process group: its ranks, and which one of several over the same ranks."""

    ranks: tuple[int, ...]
    number: int = 0

    def __str__(self) -> str:
        return f"{list(self.ranks)}" + (f" (no. {self.number + 1})" if self.number else "")


@dataclass(frozen=True)
class Sent:
    """One operation of one rank: a collective, a message, or the making of a group (`lane` None).

    `how` is the reduction, or the root; `ends` the two ranks of a message, from and to; `fqn` for
    whose sake, where that is told.
    """

    op: str
    lane: Lane | None
    shape: tuple[int, ...] = ()
    dtype: str = ""
    how: str = ""
    ends: tuple[int, int] | None = None
    fqn: str = field(default="", compare=False)

    def __str__(self) -> str:
        how = f" {self.how}" if self.how else ""
        what = f" of {self.dtype}{list(self.shape)}" if self.dtype else ""
        return f"{self.op}{how}{what}"


# told of every collective and message: its name, between which ranks, its tensors, its two ends
Hear = Callable[[str, Lane, Sequence[Tensor], tuple[int, int] | None], None]


class Done:
    """The handle of an operation that needs no waiting."""

    def wait(self, timeout: object = None) -> bool:
        """Nothing to wait for."""
        return True

    def is_completed(self) -> bool:
        """Always."""
        return True


class Tap:
    """The log of one rank, in order."""

    def __init__(self, rank: int, world: int, hear: Hear | None = None) -> None:
        self.rank, self.hear = rank, hear
        self.log: list[Sent] = []
        self.summed: list[tuple[Lane, Tensor]] = []  # what was given to all-reduces
        self._lanes: dict[Any, Lane] = {}
        self._count = {tuple(range(world)): 1}  # over these ranks so many groups are there
        self.told = ""  # for whose sake the next collective is

    def listen(self, kind: str, group: Group, size: int) -> None:
        """The runtime tells of a collective before it asks for it."""
        self.told = group.label

    def note(self, sent: Sent, tensor: Tensor | None = None) -> Done:
        """Write one operation down."""
        sent, self.told = replace(sent, fqn=self.told), ""
        self.log.append(sent)
        # kept for who asks which gradients it was, and not where memory is watched
        summed = self.hear is None and sent.op == "all_reduce"
        if tensor is not None and summed and sent.lane is not None:
            self.summed.append((sent.lane, tensor))
        return Done()

    def lane(self, group: Any) -> Lane:
        """The lane of a process group; None is the world."""
        group = dist.group.WORLD if group is None else group
        if group not in self._lanes:
            self._lanes[group] = Lane(tuple(dist.get_process_group_ranks(group)))
        return self._lanes[group]

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The groups that this rank is in, as far as they were made or used."""
        return tuple(self._lanes.values())

    def made(self, ranks: Sequence[int], group: Any) -> None:
        """A group was made; every rank of the world takes part in that."""
        key = tuple(ranks)
        number = self._count.setdefault(key, 0)
        self._count[key] += 1
        self.log.append(Sent("new group", None, key))
        if self.rank in key:
            self._lanes[group] = Lane(key, number)


def _functions(tap: Tap) -> dict[str, Callable[..., Any]]:
    """Return the stand-ins for functions of torch.distributed."""
    plain_new = dist.new_group

    def new_group(ranks: Sequence[int] | None = None, *args: Any, **kwargs: Any) -> Any:
        made = plain_new(ranks, *args, **kwargs)
        tap.made(ranks if ranks is not None else range(dist.get_world_size()), made)
        return made

    def collective(name: str, whole: int) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Done:
            op = kwargs.get("op", next((a for a in args if isinstance(a, dist.ReduceOp)), None))
            group = kwargs.get("group", next((a for a in args if _is_group(a)), None))
            root = f"from {kwargs['src']}" if "src" in kwargs else ""
            root = f"to {kwargs['dst']}" if "dst" in kwargs else root
            reduces = "reduce" in name
            how = root or (str(op if op is not None else dist.ReduceOp.SUM) if reduces else "")
            tensor = args[whole] if len(args) > whole else None
            held = tensor if isinstance(tensor, Tensor) else None
            given = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
            if tap.hear is not None:
                tap.hear(name, tap.lane(group), given, None)
            return tap.note(_sent(name, tap.lane(group), held, how), held)

        return run

    def message(name: str, sends: bool) -> Callable[..., Any]:
        def run(tensor: Tensor, peer: int, group: Any = None, tag: int = 0) -> Done:
            ends = (tap.rank, peer) if sends else (peer, tap.rank)
            if tap.hear is not None:
                tap.hear(name, tap.lane(group), [tensor], ends)
            return tap.note(_sent(name, tap.lane(group), tensor, "", ends), tensor)

        return run

    return {
        **_newer(collective),
        "new_group": new_group,
        "all_reduce": collective("all_reduce", 0),
        "all_gather_into_tensor": collective("all_gather", 0),
        "reduce_scatter_tensor": collective("reduce_scatter", 1),
        "all_to_all_single": collective("all_to_all", 9),  # counts may differ from rank to rank
        "broadcast": collective("broadcast", 0),
        "reduce": collective("reduce", 0),
        "barrier": collective("barrier", 9),
        "isend": message("send", True),
        "irecv": message("recv", False),
        "send": message("send", True),
        "recv": message("recv", False),
    }


def _newer(collective: Callable[[str, int], Callable[..., Done]]) -> dict[str, Any]:
    """Return stand-ins for what fully_shard calls from torch 2.13 on: a handle only if it is asked
    for."""

    def at_once(run: Callable[..., Done]) -> Callable[..., Done | None]:
        def asked(*args: Any, **kwargs: Any) -> Done | None:
            done = run(*args, **kwargs)
            return done if kwargs.get("async_op") else None

        return asked

    found = {
        "all_gather_single": at_once(collective("all_gather", 0)),
        "reduce_scatter_single": at_once(collective("reduce_scatter", 1)),
    }
    return {name: function for name, function in found.items() if hasattr(dist, name)}


def _is_group(value: object) -> bool:
    return isinstance(value, dist.ProcessGroup)


def _sent(
    name: str, lane: Lane, tensor: Tensor | None, how: str, ends: tuple[int, int] | None = None
) -> Sent:
    if tensor is None:
        return Sent(name, lane, how=how, ends=ends)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Sent(name, lane, tuple(tensor.shape), dtype, how, ends)


def free() -> bool:
    """Return whether this process may play a rank: not while it is one."""
    return not dist.is_initialized()


@contextmanager
def playing(rank: int, world: int, hear: Hear | None = None) -> Iterator[Tap]:
    """Be one rank of a world of this size, alone; nothing that is sent arrives anywhere."""
    assert free(), "this process is a rank already"
    tap, hook = Tap(rank, world, hear), sys.excepthook
    if world == 1:
        yield tap
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    functions, pass_over = _functions(tap), comm.pass_over

    def passed(groups: comm.Groups) -> None:
        for ranks in groups:
            tap.made(ranks, None)
        pass_over(groups)

    try:
        comm.pass_over = passed
        with replaced(functions), listening(tap.listen):
            yield tap
    finally:
        comm.pass_over = pass_over
        dist.destroy_process_group()
        sys.excepthook = hook
