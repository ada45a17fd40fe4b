"""One microbatch between forward and backward on one stage: its state, and what autograd saved."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from schedlang.pipeline.timeline.table import Op
from schedlang.runtime.pipeline.split_backward import SplitBackward
from schedlang.runtime.storage.saved import Kept, View, as_it_is, plain, slot, within
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
class _Storage:
    """One storage of some bytes; they lie in `raw` from `start` on, or are away.

    `views` are the tensors over it that were saved.
    """

    size: int
    raw: Tensor | None
    start: int = 0
    views: list[Kept] = field(default_factory=list)

    def check(self) -> None:
        """Check versions, as autograd does for what it saves itself."""
        for view in self.views:
            view.tensor()

    def taken(self) -> Tensor:
        """The bytes, of which this lets go."""
        self.check()
        raw, self.raw = self.raw, None
        assert raw is not None
        self.views.clear()
        return raw[self.start : self.start + self.size]


class _Saved(NamedTuple):
    """A saved tensor: in which storage it lies, and how."""

    held: _Storage
    view: View

    def tensor(self) -> Tensor:
        """Give it, where the bytes of its storage lie now."""
        self.held.check()
        return self.lies()

    def lies(self) -> Tensor:
        """Give it, whatever was written there."""
        raw = self.held.raw
        assert raw is not None, "a backward began before what it needs was called back"
        return self.view.on(raw, self.held.start)


class Bag:
    """The storages that one forward saved, but those at addresses that stay.

    They are asked for in the course of the forward: fully_shard gathers weights in it. What lies
    on the meta device is counted where `on_meta`, and left alone otherwise.
    """

    def __init__(self, stays: Container[int] = (), on_meta: bool = False) -> None:
        self._stays, self._on_meta = stays, on_meta
        self._storages: list[_Storage] = []
        self._known: dict[int, _Storage] = {}  # while the forward runs: by address
        self._leaves: list[tuple[Tensor, _Saved]] = []
        self._bring: Callable[[], Sequence[Tensor]] | None = None

    @property
    def bytes(self) -> int:
        """The number of its bytes that are on this rank now."""
        return sum(one.size for one in self._storages if one.raw is not None)

    def collecting(self) -> AbstractContextManager[Any]:
        """Collect in this bag what a forward saves, for the time of a block."""
        return slot(self._pack)

    def at_hand(self) -> AbstractContextManager[None]:
        """Offer this bag, for the time of a block, to modules that ask for it."""
        return within(park=self._pack)

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
            raws = [one.taken() for one in part]
            for leaf, _ in self._leaves:
                leaf.data = leaf.data.new_zeros(()).expand(leaf.shape)
            packed.append(raws[0] if len(raws) == 1 else _together(raws))
        return packed

    def bring(self, parts: Callable[[], Sequence[Tensor]]) -> None:
        """The bytes are on their way: `parts()` waits for them, at the first need."""
        self._bring = parts

    def open(self) -> None:
        """Bring everything back to its place, before a backward."""
        bring, self._bring = self._bring, None
        for part, raw in zip(self._parts(), bring() if bring is not None else ()):
            at = 0
            for one in part:
                one.raw, one.start = raw, at
                at += _room(one)
        for leaf, saved in self._leaves if bring is not None else ():
            leaf.data = saved.lies()

    def _pack(self, tensor: Tensor) -> Any:
        key = address(tensor)
        taken = key in self._known or (
            plain(tensor) and (self._on_meta or not tensor.is_meta) and key not in self._stays
        )
        return self._put(tensor) if taken else as_it_is(tensor)

    def _put(self, tensor: Tensor) -> _Saved:
        known = self._known.get(address(tensor))
        if known is None:
            storage = tensor.untyped_storage()
            raw = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            known = self._known[address(tensor)] = _Storage(storage.nbytes(), raw)
            self._storages.append(known)
        known.views.append(Kept(tensor))
        return _Saved(known, View.of(tensor))

    def _parts(self) -> list[list[_Storage]]:
        """Large storages alone, all small ones together."""
        small = [one for one in self._storages if one.size < SMALL]
        large = [[one] for one in self._storages if one.size >= SMALL]
        return [*large, *([small] if small else [])]


def _room(one: _Storage) -> int:
    return -(-one.size // ALIGNED) * ALIGNED


def _together(raws: Sequence[Tensor]) -> Tensor:
    """Storages in one run of bytes, each at a place where any dtype may begin."""
    rooms = [-(-raw.numel() // ALIGNED) * ALIGNED for raw in raws]
    flat = torch.zeros(sum(rooms), dtype=torch.uint8, device=raws[0].device)
    at = 0
    for raw, room in zip(raws, rooms):
        flat[at : at + raw.numel()].copy_(raw)
        at += room
    return flat


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
    """Return what an operation works on."""
    return tuple.__new__(Work, (op.stage, op.replica, op.microbatch, op.slice))


class Message(NamedTuple):
    """The name of a message between two stages; `back`: gradients, along the edge backwards."""

    back: bool
    source: int
    target: int
    replica: int
    microbatch: int
    slice: int


def message(back: bool, source: int, target: int, of: Work | Op) -> Message:
    """Name what an operation, or some work, sends from one stage to another."""
    return tuple.__new__(Message, (back, source, target, of.replica, of.microbatch, of.slice))


@dataclass(frozen=True)
class Route:
    """The messages of some work on a stage, by name: constants of all steps.

    incoming  what earlier stages send, with its tokens
    outgoing  what later stages get: to whom, whether these run here too, with its tokens
    awaited   their gradients, with the message that these answer, and the tokens that get one
    returned  the gradients of what came in: whether the stage is here too, and the tokens
    written   the tokens that the model writes into
    leaves    the tokens that came in and get a gradient
    """

    incoming: tuple[tuple[Message, Sequence[Token]], ...]
    outgoing: tuple[tuple[Message, bool, Sequence[Token], Sequence[Token]], ...]
    awaited: tuple[tuple[Message, Message, Sequence[Token]], ...]
    returned: tuple[tuple[Message, bool, Sequence[Token]], ...]
    written: frozenset[Token]
    leaves: Sequence[Token]


class Transfer(NamedTuple):
    """A row that sends or receives a message: which, with what rank, and of how many tensors.

    of  the message whose layout this one has: for gradients the values that they are those of
    """

    name: Message
    rank: int
    size: int
    of: Message


class Carried(Protocol):
    """The values that slices of one microbatch pass on within a stage, beside the messages.

    `leaves()` came from earlier slices; they get a gradient in the backward, and `returned()` is
    called when they have it. `roots()` are what later slices took, with the gradients they gave.
    """

    def leaves(self) -> Sequence[torch.Tensor]:
        """Return the values from earlier slices."""

    def roots(self) -> tuple[Sequence[Any], Sequence[torch.Tensor]]:
        """Return the values that later slices took, and the gradients that they gave."""

    def returned(self) -> None:
        """The leaves have their gradients."""


@dataclass
class Flight:
    """The values that a stage keeps of a microbatch from its forward to its backward.

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
