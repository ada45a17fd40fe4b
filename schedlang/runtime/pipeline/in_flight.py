"""One microbatch between its forward and backward on one stage: its state, and its saved tensors.

`SavedStorages` holds the storages that autograd saved, and can move them elsewhere and back.
`WorkItem`, `StageMessage`, `MessageRoute` and `Transfer` name what a step computes and sends.
"""

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
from schedlang.runtime.storage.saved_tensors_slot import (
    VersionedTensor,
    View,
    is_plain,
    pack_hooks,
    pack_unchanged,
    set_policies,
)
from schedlang.runtime.tracing.stage_graph import Token

# ---- The tensors that autograd saved in one forward of a stage, as a bag of storages.
# Saved-tensor hooks around the forward put every saved storage into the bag, once even if several
# views of it are saved. Parameters, buffers, inputs of the model and tensor subclasses stay where
# they are: others share them. Storages move as bytes, so they come back bit for bit.


SMALL = 1 << 16  # bytes; smaller storages travel together
ALIGNED = 64  # bytes; the alignment of storages that travel together


@dataclass
class _Storage:
    """One storage of `size` bytes, in `raw` from `start` on; `raw` is None while the bytes are
    elsewhere.

    `views` are the saved tensors over this storage.
    """

    size: int
    raw: Tensor | None
    start: int = 0
    views: list[VersionedTensor] = field(default_factory=list)

    def check(self) -> None:
        """Check version counters, as autograd does for the tensors that it saves itself."""
        for view in self.views:
            view.tensor()

    def take_bytes(self) -> Tensor:
        """Return the bytes, and drop the reference to them."""
        self.check()
        raw, self.raw = self.raw, None
        assert raw is not None
        self.views.clear()
        return raw[self.start : self.start + self.size]


class _SavedTensor(NamedTuple):
    """A saved tensor: its storage, and its view of that storage."""

    held: _Storage
    view: View

    def tensor(self) -> Tensor:
        """Return the tensor, after a check of its version counter."""
        self.held.check()
        return self.unchecked_tensor()

    def unchecked_tensor(self) -> Tensor:
        """Return the tensor, even if its storage was written into."""
        raw = self.held.raw
        assert raw is not None, "a backward began before what it needs was called back"
        return self.view.restore_on(raw, self.held.start)


class SavedStorages:
    """The storages that one forward saved, except those at addresses that stay.

    `stays` is queried during the forward, because fully_shard gathers weights in it. Storages on
    the meta device are collected if `on_meta`, and skipped otherwise.
    """

    def __init__(self, stays: Container[int] = (), on_meta: bool = False) -> None:
        self._stays, self._on_meta = stays, on_meta
        self._storages: list[_Storage] = []
        self._known: dict[int, _Storage] = {}  # while the forward runs: by address
        self._leaves: list[tuple[Tensor, _SavedTensor]] = []
        self._bring: Callable[[], Sequence[Tensor]] | None = None

    @property
    def bytes(self) -> int:
        """Bytes of the bag that are on this rank now."""
        return sum(storage.size for storage in self._storages if storage.raw is not None)

    def collect(self) -> AbstractContextManager[Any]:
        """Collect, within a block, all tensors that a forward saves."""
        return pack_hooks(self._pack)

    def offer(self) -> AbstractContextManager[None]:
        """Offer this bag, within a block, to modules that park their saved tensors themselves."""
        return set_policies(park=self._pack)

    def close(self, leaves: Iterable[Tensor]) -> None:
        """End the forward; received `leaves` that were saved belong to the bag as well."""
        for leaf in leaves:
            if storage_key(leaf) in self._known:
                self._leaves.append((leaf, self._put(leaf)))
        self._known.clear()
        self._stays = ()

    def sizes(self) -> list[int]:
        """Return the bytes of each piece that `pack` makes; a storage alone is not padded."""
        return [
            part[0].size if len(part) == 1 else sum(map(_aligned_size, part))
            for part in self._parts()
        ]

    def pack(self) -> list[Tensor]:
        """Return the bytes of the bag in pieces; the bag refers to none of them any more."""
        packed = []
        for part in self._parts():
            raws = [storage.take_bytes() for storage in part]
            for leaf, _ in self._leaves:
                leaf.data = leaf.data.new_zeros(()).expand(leaf.shape)
            packed.append(raws[0] if len(raws) == 1 else _concatenate(raws))
        return packed

    def set_loader(self, parts: Callable[[], Sequence[Tensor]]) -> None:
        """Set the function that returns the pieces; it is called, and waits, at the first need."""
        self._bring = parts

    def restore(self) -> None:
        """Put all bytes back into their storages, before a backward."""
        bring, self._bring = self._bring, None
        for part, raw in zip(self._parts(), bring() if bring is not None else ()):
            offset = 0
            for storage in part:
                storage.raw, storage.start = raw, offset
                offset += _aligned_size(storage)
        for leaf, saved in self._leaves if bring is not None else ():
            leaf.data = saved.unchecked_tensor()

    def _pack(self, tensor: Tensor) -> Any:
        key = storage_key(tensor)
        collected = key in self._known or (
            is_plain(tensor) and (self._on_meta or not tensor.is_meta) and key not in self._stays
        )
        return self._put(tensor) if collected else pack_unchanged(tensor)

    def _put(self, tensor: Tensor) -> _SavedTensor:
        entry = self._known.get(storage_key(tensor))
        if entry is None:
            storage = tensor.untyped_storage()
            raw = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            entry = self._known[storage_key(tensor)] = _Storage(storage.nbytes(), raw)
            self._storages.append(entry)
        entry.views.append(VersionedTensor(tensor))
        return _SavedTensor(entry, View.of(tensor))

    def _parts(self) -> list[list[_Storage]]:
        """Return the storages of each piece: each large storage alone, all small ones together."""
        small = [storage for storage in self._storages if storage.size < SMALL]
        large = [[storage] for storage in self._storages if storage.size >= SMALL]
        return [*large, *([small] if small else [])]


def _aligned_size(storage: _Storage) -> int:
    return -(-storage.size // ALIGNED) * ALIGNED


def _concatenate(raws: Sequence[Tensor]) -> Tensor:
    """Return storages in one buffer of bytes, each aligned for any dtype."""
    aligned_sizes = [-(-raw.numel() // ALIGNED) * ALIGNED for raw in raws]
    flat = torch.zeros(sum(aligned_sizes), dtype=torch.uint8, device=raws[0].device)
    offset = 0
    for raw, aligned_size in zip(raws, aligned_sizes):
        flat[offset : offset + raw.numel()].copy_(raw)
        offset += aligned_size
    return flat


def storage_key(tensor: Tensor) -> int:
    """Return a key that is equal for tensors in one storage; tensor subclasses may have no
    storage."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.untyped_storage()._cdata) if local.layout == torch.strided else id(tensor)


# ---- One microbatch between its forward and its backward on one stage: its names and its state.


class WorkItem(NamedTuple):
    """A slice of a microbatch on a replica of a stage: the unit of one forward and one backward."""

    stage: int
    replica: int
    microbatch: int
    slice: int


def work_of(op: Op) -> WorkItem:
    """Return the work of an operation."""
    return tuple.__new__(WorkItem, (op.stage, op.replica, op.microbatch, op.slice))


class StageMessage(NamedTuple):
    """The name of a message between two stages; `back`: gradients, against the edge."""

    back: bool
    source: int
    target: int
    replica: int
    microbatch: int
    slice: int


def make_message(back: bool, source: int, target: int, op: WorkItem | Op) -> StageMessage:
    """Return the name of the message of an operation, or of some work, between two stages."""
    return tuple.__new__(StageMessage, (back, source, target, op.replica, op.microbatch, op.slice))


@dataclass(frozen=True)
class MessageRoute:
    """The messages of some work on a stage, by name; the same in all steps.

    incoming  messages from earlier stages, with their tokens
    outgoing  messages to later stages: whether the target is on this rank, tokens, differentiable
              ones
    awaited   messages of their gradients, with the message of the values, and the tokens
    returned  messages of the gradients of `incoming`: whether the stage is on this rank, the tokens
    written   the tokens into which the model writes
    leaves    the received tokens that get a gradient
    """

    incoming: tuple[tuple[StageMessage, Sequence[Token]], ...]
    outgoing: tuple[tuple[StageMessage, bool, Sequence[Token], Sequence[Token]], ...]
    awaited: tuple[tuple[StageMessage, StageMessage, Sequence[Token]], ...]
    returned: tuple[tuple[StageMessage, bool, Sequence[Token]], ...]
    written: frozenset[Token]
    leaves: Sequence[Token]


class Transfer(NamedTuple):
    """An operation that sends or receives a message of `size` tensors to or from `rank`.

    `layout_source` is the message with the same layout: for gradients the message of the values.
    """

    name: StageMessage
    rank: int
    size: int
    layout_source: StageMessage


class SliceCarry(Protocol):
    """The values that slices of one microbatch pass on within a stage, beside the messages.

    `leaves()` came from earlier slices and get gradients in the backward; then `release()` is
    called. `roots()` are values that later slices used, with the gradients that these computed.
    """

    def leaves(self) -> Sequence[torch.Tensor]:
        """Return the values from earlier slices."""

    def roots(self) -> tuple[Sequence[Any], Sequence[torch.Tensor]]:
        """Return the values that later slices used, and their gradients."""

    def release(self) -> None:
        """Note that the leaves have their gradients."""


@dataclass
class InFlight:
    """The state of a microbatch on a stage from its forward to its backward.

    leaves   received values, where the backward of the stage ends
    edges    graph edges where the gradients of sent values enter
    split    the second half of a backward that has begun
    bag      tensors that the forward saved, if they are moved elsewhere in between
    """

    leaves: dict[Token, torch.Tensor]
    edges: Mapping[Token, GradientEdge]
    loss: torch.Tensor | None = None
    split: SplitBackward | None = None
    carried: SliceCarry | None = None
    bag: SavedStorages | None = None
