"""Storages, operators and messages of a rank while a step is played, on meta or with values.

`Footprint` records when each storage was created and freed, and what it was for.
"""

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
from schedlang.runtime.adapters.torch_tensor import listen_to_resizes

# ---- Work of a rank while a step is played: FLOPs, bytes read and written, messages.


HALF = 2  # bytes of the floats in which operations are counted


@dataclass(frozen=True)
class TrafficMessage:
    """A collective, or a message to another rank: bytes of the full tensor, and the ranks.

    `ends` of a message: source and target.
    """

    op: str
    ranks: tuple[int, ...]
    bytes: int
    ends: tuple[int, int] | None = None


@dataclass
class SegmentWork:
    """The work of one segment of a step.

    operators  (kind, FLOPs, bytes read and written) of an operator -> how often it ran; kinds:
               matrix product, fused attention, other. FLOPs count as 16-bit ones: in 32 bits they
               are twice as many, as on tensor cores
    messages   messages, and how often each was sent
    copied     bytes copied to the host and back
    """

    operators: Counter[tuple[str, float, int]] = field(default_factory=Counter)
    messages: Counter[TrafficMessage] = field(default_factory=Counter)
    copied: int = 0

    def add_operator(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Count one operator; views cost nothing.

        all_gather_copy_in counts only the slices that it copies.
        """
        if not _is_view_only(func):
            outputs = list(_tensors((result,)))
            inputs = [*_tensors(args), *_tensors(kwargs.values())]
            # another argument is the full
            if func._overloadpacket.__name__ == "all_gather_copy_in":
                outputs = inputs = list(_tensors(args[:1]))
            bytes_moved = sum(t.numel() * t.element_size() for t in (*inputs, *outputs))
            # the first: besides its result in 16 bits, attention returns a logsumexp in 32
            width = outputs[0].element_size() if outputs else HALF
            flops = _flops(func, args, kwargs, result) * width / HALF
            self.operators[_kind(func._overloadpacket, flops), flops, bytes_moved] += 1

    def add_message(self, message: TrafficMessage) -> None:
        """Count a message."""
        self.messages[message] += 1


@cache
def _is_view_only(func: Any) -> bool:
    """Return whether an operator returns a view, or uninitialised memory."""
    name = func._overloadpacket.__name__
    return bool(func.is_view) or name.removeprefix("new_").startswith("empty")


@cache
def _is_attention(packet: Any) -> bool:
    """Return whether an operator is a fused attention."""
    return "attention" in packet.__name__


def _kind(packet: Any, flops: float) -> str:
    if not flops:
        return "other"
    return "attention" if _is_attention(packet) else "product"


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Return the FLOPs of one operator, by torch's formula; 0 for those that only move bytes."""
    custom = FORMULAS.get(func._overloadpacket)
    if custom is not None:
        return custom(*args)
    formula = flop_counter.flop_registry.get(func._overloadpacket)
    return float(formula(*args, **kwargs, out_val=result)) if formula is not None else 0.0


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> float:
    count: Callable[..., int] = flop_counter.sdpa_flop_count
    return float(count(query.shape, key.shape, value.shape))


def _attention_backward_flops(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> float:
    count: Callable[..., int] = flop_counter.sdpa_backward_flop_count
    return float(count(grad.shape, query.shape, key.shape, value.shape))


def _grouped_flops(first: Tensor, second: Tensor, *rest: Any, **options: Any) -> float:
    """Return the FLOPs of products of groups of rows; either operand may have a matrix per
    group."""
    groups = len(first) if first.dim() == second.dim() == 3 else 1
    return 2.0 * groups * first.shape[-2] * first.shape[-1] * second.shape[-1]


# fused operators of the CPU, which stand for those of any device; torch has no formulas for them
FORMULAS: dict[Any, Callable[..., float]] = {
    ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    ops.aten._grouped_mm: _grouped_flops,
}


# ---- Storages of a rank while a step runs: when each was created and freed, and its use.
# Every tensor that an operator returns is recorded, so that a byte counts as long as anything
# refers to it, whatever the number of its views. It works with values and on the meta device.


Levels = NDArray[np.int64]  # bytes, by class
HOST = "host"  # bytes that were moved to the host
KINDS = (*CLASSES, HOST)


@dataclass
class StorageRecord:
    """One storage: its bytes now, the segment in which it was created, facts of its use."""

    now: int
    born: int
    tagged: str = ""  # a class that was set
    resized: bool = False  # as gathered parameters are
    sent: bool = False  # a collective wrote or read it
    state: bool = False  # one of parameters or gradients


@dataclass
class StepSegment:
    """A run between two marks: its first event, the blocks alive at its end, its work."""

    operation: Any
    start: int
    kept: frozenset[int] = frozenset()
    work: SegmentWork = field(default_factory=SegmentWork)


@dataclass(frozen=True)
class SegmentUse:
    """A segment by class of bytes: at its peak (of the sum) and at its end.

    peak_transient  peak of the bytes that are no training state
    work            the work of the segment
    """

    operation: Any
    peak: Levels
    end: Levels
    peak_transient: int
    work: SegmentWork


class Footprint(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that records storages on one device; with `works` also operators and messages."""

    def __init__(self, device: str, works: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = torch.device(device)
        self.works = works
        self.blocks: list[StorageRecord] = []
        self.events: list[tuple[int, int]] = []  # block, bytes more or fewer
        self.stretches = [StepSegment(None, 0)]
        self._alive: dict[int, tuple[Any, int]] = {}  # id of a storage -> weak reference, block
        self._watching = True
        self.host = 0  # peak bytes in host memory, after `add_operator`
        # runs an operator; a dry run may replace it by a cache of results
        self.operator: Callable[[Any, Any, Any], Any] = lambda func, args, kw: func(*args, **kw)

    # -- input -------------------------------------------------------------------------------------

    def set_class(self, class_name: str, tensors: Iterable[Any]) -> None:
        """Set the class of tensors; those that are not known yet are recorded."""
        for tensor in tensors:
            block = self._block(tensor)
            if block is not None:
                block.tagged = block.tagged or class_name

    def exclude(self, tensors: Iterable[Any]) -> None:
        """Count no bytes for tensors that stand for tensors off the device."""
        for tensor in tensors:
            local = getattr(tensor, "_local_tensor", tensor)
            if self._block(local) is not None:
                self._change(self._alive[id(local.untyped_storage())][1], 0)

    def track(self, tier: str, tensor: Tensor) -> None:
        """Record a tensor that a store of offloaded tensors has put on a tier."""
        if tier == "cpu":
            self.set_class(HOST, [tensor])

    def note_collective(self, tensor: Any, state: bool) -> None:
        """Note that a collective reads or writes a tensor; `state`: of parameters or gradients."""
        block = self._block(tensor)
        if block is not None:
            block.sent, block.state = True, block.state or state

    def add_message(self, message: TrafficMessage) -> None:
        """Record a collective, or a message to another rank."""
        self.stretches[-1].work.add_message(message)

    def begin_segment(self, operation: Any) -> None:
        """Begin a segment."""
        self.stretches[-1].kept = frozenset(number for _, number in self._alive.values())
        self.stretches.append(StepSegment(operation, len(self.events)))

    def without_watching(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose storages do not count: it only finds shapes on meta."""

        def unwatched(*args: Any, **kwargs: Any) -> Any:
            previous, self._watching = self._watching, False
            try:
                return function(*args, **kwargs)
            finally:
                self._watching = previous

        return unwatched

    def alive_of(self, storages: Iterable[int]) -> set[int]:
        """Return those of some storages, by id, that are alive."""
        return {key for key in storages if key in self._alive}

    # -- results -----------------------------------------------------------------------------------

    def summarize(self, forwards: Iterable[Any]) -> list[SegmentUse]:
        """Return all segments; storages alive after one of `forwards` are kept for a backward."""
        kept_blocks: frozenset[int] = frozenset()
        passes = set(map(id, forwards))
        for stretch in self.stretches:
            kept_blocks |= stretch.kept if id(stretch.operation) in passes else frozenset()
        kinds = [KINDS.index(self._kind(k, kept_blocks)) for k in range(len(self.blocks))]
        changes = np.zeros((len(self.events) + 1, len(KINDS)), dtype=np.int64)
        for event_index, (number, size) in enumerate(self.events, 1):
            changes[event_index, kinds[number]] = size
        everywhere = changes.cumsum(0)
        self.host = int(everywhere[:, -1].max())
        levels = everywhere[:, :-1]
        totals, passing = levels.sum(1), levels[:, len(STATE) :].sum(1)
        ends = [*(s.start for s in self.stretches[1:]), len(self.events)]
        uses = []
        for stretch, end in zip(self.stretches, ends):
            top = stretch.start + int(totals[stretch.start : end + 1].argmax())
            passing_peak = int(passing[stretch.start : end + 1].max())
            stretch.work.copied = int(abs(changes[stretch.start + 1 : end + 1, -1]).sum())
            uses.append(
                SegmentUse(stretch.operation, levels[top], levels[end], passing_peak, stretch.work)
            )
        return uses

    def _kind(self, number: int, kept_blocks: frozenset[int]) -> str:
        block = self.blocks[number]
        if block.tagged or block.resized or block.state:
            return block.tagged or "communication"
        if number in kept_blocks:
            return "activations"
        lasts = number in self.stretches[block.born].kept
        return "communication" if block.sent or lasts else "temporary"

    # -- watching ----------------------------------------------------------------------------------

    def __enter__(self) -> Any:
        self._resize_watch = listen_to_resizes(self._resized)
        self._resize_watch.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        self._resize_watch.__exit__(None, None, None)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operator, and record the tensors that it returns."""
        output = self.operator(func, args, kwargs or {})
        if not self._watching:
            return output
        if self.works:
            self.stretches[-1].work.add_operator(func, args, kwargs or {}, output)
        if isinstance(output, Tensor):
            self._block(output)
        elif output is not None:
            for leaf in pytree.tree_leaves(output):
                self._block(leaf)
        return output

    def _block(self, value: Any) -> StorageRecord | None:
        """Return the block of a tensor on the device; None for anything else."""
        local = getattr(value, "_local_tensor", value)
        if type(local) not in _KINDS or local.device != self.device:
            return None
        storage = local.untyped_storage()
        key = id(storage)
        entry = self._alive.get(key)
        if entry is not None:
            return self.blocks[entry[1]]
        number, block = len(self.blocks), StorageRecord(storage.nbytes(), len(self.stretches) - 1)

        def gone(_: Any) -> None:
            self._alive.pop(key, None)
            self._change(number, 0)

        self._alive[key] = (weakref.ref(storage, gone), number)
        self.blocks.append(block)
        self.events.append((number, block.now))
        return block

    def _resized(self, storage: torch.UntypedStorage, size: int) -> None:
        entry = self._alive.get(id(storage))
        if entry is not None:
            self.blocks[entry[1]].resized = True
            self._change(entry[1], size)

    def _change(self, number: int, size: int) -> None:
        block = self.blocks[number]
        self.events.append((number, size - block.now))
        block.now = size


_KINDS = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
