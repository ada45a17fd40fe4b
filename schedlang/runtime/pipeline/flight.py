"""One microbatch between forward and backward on one stage: its state, and what autograd saved."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from schedlang.pipeline.timeline import Op
from schedlang.runtime.pipeline.split_backward import SplitBackward
from schedlang.runtime.tracing.graph import Token

# ---- What autograd saved in one forward of a stage, as a bag that can be carried elsewhere and
# back.
# Saved-tensor hooks around the forward put every storage that autograd wants to keep into the bag,
# once however many views of it are saved. Parameters, buffers, inputs of the model and tensors of
# classes of their own stay where they are: they are shared with others. What is carried away is
# bytes; it comes back to the last bit.


SMALL = 1 << 16  # bytes; smaller storages travel together
ALIGNED = 64  # bytes, at which storages begin that travel together


@dataclass
class _Slot:
    """One storage of some bytes; they lie in `raw` from `start` on, or are away.

    `views` are tensors over it with their counts of writes when they were saved.
    """

    size: int
    raw: Tensor | None
    start: int = 0
    views: list[tuple[Tensor, int]] = field(default_factory=list)

    def check(self) -> None:
        """As autograd does for what it saves itself."""
        if any(view._version != count for view, count in self.views):
            raise RuntimeError("a value that backward needs was written into after it was saved")

    def taken(self) -> Tensor:
        """The bytes, of which this slot lets go."""
        self.check()
        raw, self.raw = self.raw, None
        assert raw is not None
        self.views.clear()
        return raw[self.start : self.start + self.size]


class _Saved(NamedTuple):
    """A saved tensor: which slot, and how it is seen in there."""

    slot: int
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class Bag:
    """The storages that one forward saved, but those at addresses that stay.

    They are asked for in the course of the forward: fully_shard gathers weights in it. What lies
    on the meta device is counted where `hollow`, and left alone otherwise.
    """

    def __init__(self, stays: Container[int] = (), hollow: bool = False) -> None:
        self._stays, self._hollow = stays, hollow
        self._slots: list[_Slot] = []
        self._known: dict[int, int] = {}  # while the forward runs: address -> slot
        self._leaves: list[tuple[Tensor, _Saved]] = []
        self._bring: Callable[[], Sequence[Tensor]] | None = None

    @property
    def bytes(self) -> int:
        """How many bytes of it are on this rank now."""
        return sum(slot.size for slot in self._slots if slot.raw is not None)

    def collecting(self) -> AbstractContextManager[Any]:
        """Around a forward: what it saves goes into this bag."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    @contextmanager
    def at_hand(self) -> Iterator[None]:
        """Around a forward: modules that ask for it put into this bag what they save."""
        before, _here.bag = _here.bag, self
        try:
            yield
        finally:
            _here.bag = before

    def close(self, leaves: Iterable[Tensor]) -> None:
        """The forward has ended; the memory of its received `leaves` is the bag's as well."""
        for leaf in leaves:
            if address(leaf) in self._known:
                self._leaves.append((leaf, self._put(leaf)))
        self._known.clear()
        self._stays = ()

    def sizes(self) -> list[int]:
        """The bytes of each part, as `pack` makes them: one storage alone is not filled up."""
        return [part[0].size if len(part) == 1 else sum(map(_room, part)) for part in self._parts()]

    def pack(self) -> list[Tensor]:
        """The bytes of the bag in parts; it refers to none of them any more."""
        packed = []
        for part in self._parts():
            raws = [slot.taken() for slot in part]
            for leaf, _ in self._leaves:
                leaf.data = leaf.data.new_zeros(()).expand(leaf.shape)
            packed.append(raws[0] if len(raws) == 1 else _together(raws))
        return packed

    def bring(self, parts: Callable[[], Sequence[Tensor]]) -> None:
        """The bytes are on their way: `parts()` waits for them, at the first need."""
        self._bring = parts

    def open(self) -> None:
        """Before a backward: everything is in its place again."""
        bring, self._bring = self._bring, None
        for part, raw in zip(self._parts(), bring() if bring is not None else ()):
            at = 0
            for slot in part:
                slot.raw, slot.start = raw, at
                at += _room(slot)
        for leaf, saved in self._leaves if bring is not None else ():
            leaf.data = self._view(saved)

    def _pack(self, tensor: Tensor) -> Any:
        key = address(tensor)
        taken = key in self._known or (
            _plain(tensor) and (self._hollow or not tensor.is_meta) and key not in self._stays
        )
        return self._put(tensor) if taken else tensor

    def _put(self, tensor: Tensor) -> _Saved:
        key = address(tensor)
        if key not in self._known:
            self._known[key] = len(self._slots)
            storage = tensor.untyped_storage()
            raw = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self._slots.append(_Slot(storage.nbytes(), raw))
        view = tensor.detach()  # has the same count of writes
        slot = self._known[key]
        self._slots[slot].views.append((view, view._version))
        offset = int(view.storage_offset())
        return _Saved(slot, view.dtype, offset, view.size(), view.stride())

    def _unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self._slots[saved.slot].check()
        return self._view(saved)

    def _view(self, saved: _Saved) -> Tensor:
        slot = self._slots[saved.slot]
        assert slot.raw is not None, "a backward began before what it needs was called back"
        at = slot.start // saved.dtype.itemsize + saved.offset
        empty = torch.empty(0, dtype=saved.dtype, device=slot.raw.device)
        return empty.set_(slot.raw.untyped_storage(), at, saved.size, saved.stride)

    def _parts(self) -> list[list[_Slot]]:
        """Large storages alone, all small ones together."""
        small = [slot for slot in self._slots if slot.size < SMALL]
        large = [[slot] for slot in self._slots if slot.size >= SMALL]
        return [*large, *([small] if small else [])]


class _Here(threading.local):
    bag: Bag | None = None


_here = _Here()


def bag_at_hand() -> Bag | None:
    """The bag of the forward that runs, where only some modules put into it what they save."""
    return _here.bag


def _room(slot: _Slot) -> int:
    return -(-slot.size // ALIGNED) * ALIGNED


def _together(raws: Sequence[Tensor]) -> Tensor:
    """Storages in one run of bytes, each at a place where any dtype may begin."""
    rooms = [-(-raw.numel() // ALIGNED) * ALIGNED for raw in raws]
    flat = torch.zeros(sum(rooms), dtype=torch.uint8, device=raws[0].device)
    at = 0
    for raw, room in zip(raws, rooms):
        flat[at : at + raw.numel()].copy_(raw)
        at += room
    return flat


def _plain(tensor: Tensor) -> bool:
    """Whether a tensor is bytes in memory and nothing else."""
    if type(tensor) is not Tensor or tensor.layout != torch.strided:
        return False
    return not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference())


def address(tensor: Tensor) -> int:
    """Equal for tensors in the same memory; tensors of other classes lie nowhere in particular."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.untyped_storage()._cdata) if local.layout == torch.strided else id(tensor)


# ---- One microbatch between its forward and its backward on one stage: who it is, what it keeps.


class Work(NamedTuple):
    """A slice of a microbatch on a replica of a stage: what one forward and one backward are of."""

    stage: int
    replica: int
    microbatch: int
    slice: int


def work_of(op: Op) -> Work:
    """What an operation works on."""
    return Work(op.stage, op.replica, op.microbatch, op.slice)


class Message(NamedTuple):
    """The name of a message between two stages; `back`: gradients, along the edge backwards."""

    back: bool
    source: int
    target: int
    replica: int
    microbatch: int
    slice: int


class Carried(Protocol):
    """What slices of one microbatch hand to each other within a stage, beside the messages.

    `leaves()` came from earlier slices; they get a gradient in the backward, and `returned()` is
    called when they have it. `roots()` are what later slices took, with the gradients they gave.
    """

    def leaves(self) -> Sequence[torch.Tensor]:
        """What came from earlier slices."""

    def roots(self) -> tuple[Sequence[Any], Sequence[torch.Tensor]]:
        """What later slices took, and the gradients that they gave."""

    def returned(self) -> None:
        """The leaves have their gradients."""


@dataclass
class Flight:
    """What a stage keeps of a microbatch from its forward to its backward.

    leaves   what was received, where gradients go back from
    edges    where the gradients of what was sent enter
    split    the second half of a backward that was begun
    bag      what its forward saved, where that is carried away in between
    """

    leaves: dict[Token, torch.Tensor]
    edges: Mapping[Token, GradientEdge]
    loss: torch.Tensor | None = None
    split: SplitBackward | None = None
    carried: Carried | None = None
    bag: Bag | None = None
