"""Storages that a rank holds while a step runs: when each came and went, and what it was for."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, ops
from torch.utils import _pytree as pytree
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode

from schedlang.ir.memory import CLASSES, STATE
from schedlang.runtime.adapters.torch_tensor import resizes

# ---- What a rank does while a step is played: operations, bytes that move through memory,
# messages.


HALF = 2  # bytes of the floats in which operations are counted


@dataclass(frozen=True)
class Message:
    """One collective, or one message to another rank: bytes whole, and between which ranks.

    `ends` of a message: from, and to.
    """

    op: str
    ranks: tuple[int, ...]
    bytes: int
    ends: tuple[int, int] | None = None


@dataclass
class Work:
    """The work of one stretch of a step.

    operators   (kind, operations, bytes read and written) of each operator -> how often it ran:
                a product of matrices, attention that is fused, or other.  Operations count as
                16-bit ones: in 32 bits they are twice as many, as tensor cores have it
    messages    what is sent, and how often
    copied      bytes that go to the host, and come back
    """

    operators: Counter[tuple[str, float, int]] = field(default_factory=Counter)
    messages: Counter[Message] = field(default_factory=Counter)
    copied: int = 0

    def ran(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Take up one operator; those that only look at a tensor in another way cost nothing.

        The copy of slices into the place from which they are gathered is of these alone.
        """
        if not _moves_nothing(func):
            made = list(_tensors((out,)))
            given = [*_tensors(args), *_tensors(kwargs.values())]
            if func._overloadpacket.__name__ == "all_gather_copy_in":  # it is given the whole, too
                made = given = list(_tensors(args[:1]))
            moved = sum(t.numel() * t.element_size() for t in (*given, *made))
            # the first: beside its result in 16 bits attention gives a sum of exponents in 32
            width = made[0].element_size() if made else HALF
            flops = _flops(func, args, kwargs, out) * width / HALF
            self.operators[_kind(func._overloadpacket, flops), flops, moved] += 1

    def sent(self, message: Message) -> None:
        """Take up what was sent."""
        self.messages[message] += 1


@cache
def _moves_nothing(func: Any) -> bool:
    """Return whether an operator gives nothing but a view, or memory as it is."""
    name = func._overloadpacket.__name__
    return bool(func.is_view) or name.removeprefix("new_").startswith("empty")


@cache
def _attends(packet: Any) -> bool:
    """Return whether an operator is attention as a whole."""
    return "attention" in packet.__name__


def _kind(packet: Any, flops: float) -> str:
    if not flops:
        return "other"
    return "attention" if _attends(packet) else "product"


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """The operations of one operator, by torch's formula; none for those that only move bytes."""
    own = FORMULAS.get(func._overloadpacket)
    if own is not None:
        return own(*args)
    formula = flop_counter.flop_registry.get(func._overloadpacket)
    return float(formula(*args, **kwargs, out_val=out)) if formula is not None else 0.0


def _attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> float:
    count: Callable[..., int] = flop_counter.sdpa_flop_count
    return float(count(query.shape, key.shape, value.shape))


def _attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> float:
    count: Callable[..., int] = flop_counter.sdpa_backward_flop_count
    return float(count(grad.shape, query.shape, key.shape, value.shape))


def _grouped(first: Tensor, second: Tensor, *rest: Any, **more: Any) -> float:
    """Products of groups of rows, whichever of both has a matrix for each group."""
    groups = len(first) if first.dim() == second.dim() == 3 else 1
    return 2.0 * groups * first.shape[-2] * first.shape[-1] * second.shape[-1]


# the fused operators of a CPU, which stand for any device's: torch has no formulas for them
FORMULAS: dict[Any, Callable[..., float]] = {
    ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    ops.aten._grouped_mm: _grouped,
}


# ---- What storages a rank holds while a step runs: when each came, when it went, and what it was
# for.
# Every tensor that an operator returns is looked at, so that a byte counts as long as anything
# holds it, however many views of it there are.  It works alike with values and on the meta device.


Levels = NDArray[np.int64]  # bytes, by class
HOST = "host"  # what was moved there, and is not on the device
KINDS = (*CLASSES, HOST)


@dataclass
class Block:
    """One storage: its bytes now, in which stretch it came, and what is known of its use."""

    now: int
    born: int
    said: str = ""  # a class that was told
    resized: bool = False  # as what is gathered is, and freed again
    sent: bool = False  # a collective wrote it, or read it
    state: bool = False  # one of parameters or gradients


@dataclass
class Stretch:
    """A run between two marks: its first event, the blocks alive at its end, its work."""

    what: Any
    start: int
    kept: frozenset[int] = frozenset()
    work: Work = field(default_factory=Work)


@dataclass(frozen=True)
class Ran:
    """A stretch by class: at most (where their sum is greatest) and at its end.

    passing  what is no state of the training, at most
    work     what was done
    """

    what: Any
    most: Levels
    end: Levels
    passing: int
    work: Work


class Footprint(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes storages on one device as they come and go; with `works` also what is done."""

    def __init__(self, device: str, works: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = torch.device(device)
        self.works = works
        self.blocks: list[Block] = []
        self.events: list[tuple[int, int]] = []  # block, bytes more or fewer
        self.stretches = [Stretch(None, 0)]
        self._alive: dict[int, tuple[Any, int]] = {}  # id of a storage -> what keeps watch, block
        self._plain_resize: Any = None
        self._looks = True
        self.host = 0  # bytes in host memory at most, once `ran` has counted
        # runs an operator; who plays a step without values may know its result already
        self.operator: Callable[[Any, Any, Any], Any] = lambda func, args, kw: func(*args, **kw)

    # -- what is told ------------------------------------------------------------------------------

    def hold(self, said: str, tensors: Iterable[Any]) -> None:
        """Say what tensors are for; those not known yet are taken up."""
        for tensor in tensors:
            block = self._block(tensor)
            if block is not None:
                block.said = block.said or said

    def leave_out(self, tensors: Iterable[Any]) -> None:
        """Count no bytes of tensors that stand for some off the device."""
        for tensor in tensors:
            local = getattr(tensor, "_local_tensor", tensor)
            if self._block(local) is not None:
                self._change(self._alive[id(local.untyped_storage())][1], 0)

    def track(self, tier: str, tensor: Tensor) -> None:
        """A store of offloaded tensors tells what it put where."""
        if tier == "cpu":
            self.hold(HOST, [tensor])

    def touched(self, tensor: Any, state: bool) -> None:
        """A collective reads or writes a tensor; `state`: of parameters or gradients."""
        block = self._block(tensor)
        if block is not None:
            block.sent, block.state = True, block.state or state

    def sent(self, message: Message) -> None:
        """A collective, or a message to another rank."""
        self.stretches[-1].work.sent(message)

    def mark(self, what: Any) -> None:
        """Something else begins to run."""
        self.stretches[-1].kept = frozenset(number for _, number in self._alive.values())
        self.stretches.append(Stretch(what, len(self.events)))

    def unseen(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose storages do not count: it looks for shapes on the meta device anyway."""

        def unwatched(*args: Any, **kwargs: Any) -> Any:
            before, self._looks = self._looks, False
            try:
                return run(*args, **kwargs)
            finally:
                self._looks = before

        return unwatched

    def holds(self, storages: Iterable[int]) -> set[int]:
        """Return which of some storages, by their ids, are alive still."""
        return {key for key in storages if key in self._alive}

    # -- what was seen -----------------------------------------------------------------------------

    def ran(self, forwards: Iterable[Any]) -> list[Ran]:
        """All stretches by class; what is alive after one of `forwards` is kept for a backward."""
        kept: frozenset[int] = frozenset()
        passes = set(map(id, forwards))
        for stretch in self.stretches:
            kept |= stretch.kept if id(stretch.what) in passes else frozenset()
        kinds = [KINDS.index(self._kind(k, kept)) for k in range(len(self.blocks))]
        changes = np.zeros((len(self.events) + 1, len(KINDS)), dtype=np.int64)
        for place, (number, size) in enumerate(self.events, 1):
            changes[place, kinds[number]] = size
        everywhere = changes.cumsum(0)
        self.host = int(everywhere[:, -1].max())
        levels = everywhere[:, :-1]
        totals, passing = levels.sum(1), levels[:, len(STATE) :].sum(1)
        ends = [*(s.start for s in self.stretches[1:]), len(self.events)]
        found = []
        for stretch, end in zip(self.stretches, ends):
            top = stretch.start + int(totals[stretch.start : end + 1].argmax())
            most = int(passing[stretch.start : end + 1].max())
            stretch.work.copied = int(abs(changes[stretch.start + 1 : end + 1, -1]).sum())
            found.append(Ran(stretch.what, levels[top], levels[end], most, stretch.work))
        return found

    def _kind(self, number: int, kept: frozenset[int]) -> str:
        block = self.blocks[number]
        if block.said or block.resized or block.state:
            return block.said or "communication"
        if number in kept:
            return "activations"
        lasts = number in self.stretches[block.born].kept
        return "communication" if block.sent or lasts else "temporary"

    # -- watching ----------------------------------------------------------------------------------

    def __enter__(self) -> Any:
        self._heard = resizes(self._resized)
        self._heard.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        self._heard.__exit__(None, None, None)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operator, and look at what it returns."""
        out = self.operator(func, args, kwargs or {})
        if not self._looks:
            return out
        if self.works:
            self.stretches[-1].work.ran(func, args, kwargs or {}, out)
        if isinstance(out, Tensor):
            self._block(out)
        elif out is not None:
            for one in pytree.tree_leaves(out):
                self._block(one)
        return out

    def _block(self, value: Any) -> Block | None:
        """The block of a tensor on the device; None for anything else."""
        local = getattr(value, "_local_tensor", value)
        if type(local) not in _KINDS or local.device != self.device:
            return None
        storage = local.untyped_storage()
        key = id(storage)
        found = self._alive.get(key)
        if found is not None:
            return self.blocks[found[1]]
        number, block = len(self.blocks), Block(storage.nbytes(), len(self.stretches) - 1)

        def gone(_: Any) -> None:
            self._alive.pop(key, None)
            self._change(number, 0)

        self._alive[key] = (weakref.ref(storage, gone), number)
        self.blocks.append(block)
        self.events.append((number, block.now))
        return block

    def _resized(self, storage: torch.UntypedStorage, size: int) -> None:
        found = self._alive.get(id(storage))
        if found is not None:
            self.blocks[found[1]].resized = True
            self._change(found[1], size)

    def _change(self, number: int, size: int) -> None:
        block = self.blocks[number]
        self.events.append((number, size - block.now))
        block.now = size


_KINDS = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
