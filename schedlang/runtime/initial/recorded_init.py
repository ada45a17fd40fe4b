"""Deferred initialization: a model is made on the meta device, and its initialization is recorded.

Each rank later replays the record and keeps its parts. The idea is that of torchdistX's deferred
initialization and of its fake tensors.
"""

from __future__ import annotations

import hashlib
import inspect
import mmap
import weakref
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from schedlang.diagnostics.diagnostic import Refusal, kind_of, refuse_at_caller
from schedlang.ir import pytree
from schedlang.runtime.comm.agreement import checksum
from schedlang.runtime.device import on_host
from schedlang.runtime.initial.weight_files import TargetPart
from schedlang.runtime.redistribution.sharding import copy_overlap, full_slice

_aten = torch.ops.aten
Storage = int  # number of a storage in the order in which they were made


@dataclass(frozen=True)
class RecordedView:
    """A tensor of a record: a view of a storage."""

    storage: Storage
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def view_on(self, data: torch.UntypedStorage) -> Tensor:
        """Return the same view of another storage."""
        empty = torch.empty(0, dtype=self.dtype, device=data.device)
        return empty.set_(data, self.offset, self.shape, self.stride)


@dataclass(frozen=True)
class RecordedOperator:
    """One operator.

    reads, writes  existing storages; `made`: new storages, with the index of the output
    overwrites     those of `writes` that are completely overwritten
    draw           its number among the draws from torch's generator; None: it does not draw
    state          of the generator, if it was set since the previous draw
    """

    func: Any
    args: Any
    kwargs: Mapping[str, Any]
    reads: frozenset[Storage]
    writes: frozenset[Storage]
    overwrites: frozenset[Storage]
    made: tuple[tuple[int, Storage], ...]
    draw: int | None
    state: Tensor | None


# operators that overwrite their target completely
_OVERWRITING = {
    *("normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "bernoulli_", "exponential_"),
    *("cauchy_", "log_normal_", "geometric_"),
}


# operators that return uninitialised memory
_EMPTY = {
    *(_aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default),
    *(_aten.new_empty.default, _aten.new_empty_strided.default),
}


@dataclass
class InitRecord:
    """The operators that make a model's tensors, and the storages of these.

    `_states` has the states of the generator before each draw, as far as known, so that draws of
    unneeded tensors need not be repeated.
    """

    device: torch.device
    entries: list[RecordedOperator] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # bytes, by storage
    views: dict[str, RecordedView] = field(default_factory=dict)  # of the parameters, by name
    # version counters of the parameters' storages
    versions: dict[Storage, int] = field(default_factory=dict)
    _numbers: dict[int, Storage] = field(default_factory=dict)
    _kept: list[torch.UntypedStorage] = field(default_factory=list)  # keeps addresses unique
    _states: Tensor | None = None  # one row per draw, known up to `_known`
    _known: int = 1
    _drawing: list[int] = field(default_factory=list)  # indices of the operators that draw
    # indices of operators, by storage
    _writers: dict[Storage, list[int]] = field(default_factory=dict)
    _state: Tensor | None = None

    def number(self, tensor: Tensor) -> Storage | None:
        """Return the storage of a tensor, if it is of this record."""
        return self._numbers.get(tensor.untyped_storage()._cdata) if tensor.is_meta else None

    def view(self, tensor: Tensor) -> RecordedView | None:
        """Return a tensor as a view of a storage of this record."""
        number = self.number(tensor)
        if number is None:
            return None
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        return RecordedView(number, tensor.dtype, shape, stride, int(tensor.storage_offset()))

    def add(self, tensor: Tensor) -> Storage:
        """Number the storage of a new tensor."""
        storage = tensor.untyped_storage()
        self._kept.append(storage)
        self._numbers[storage._cdata] = len(self.sizes)
        self.sizes.append(storage.nbytes())
        return len(self.sizes) - 1

    def fill(self, targets: Sequence[TargetPart]) -> None:
        """Make one full tensor at a time, and keep its parts. Raises Refusal S623 before any."""
        by_storage: dict[Storage, list[tuple[TargetPart, RecordedView]]] = {}
        for target in targets:
            view = self.view(target.original)
            if view is None or self.versions.get(view.storage) != target.original._version:
                raise Refusal.of(
                    "S623",
                    f"`{target.names[0]}` has no values: it was changed after `deferred_init`",
                    helps=("change the model in the function that `deferred_init` calls",),
                )
            by_storage.setdefault(view.storage, []).append((target, view))

        def fill_rooms(
            parts: list[tuple[TargetPart, RecordedView]], data: torch.UntypedStorage
        ) -> None:
            for target, view in parts:
                with torch.no_grad():
                    copy_overlap(
                        view.view_on(data), full_slice(target.shape), target.part, target.cells
                    )

        self.replay({storage: partial(fill_rooms, parts) for storage, parts in by_storage.items()})

    def digest(self) -> str:
        """Return a text that is equal for records that make the same values."""
        hasher = hashlib.blake2b(repr(sorted(self.views.items())).encode(), digest_size=8)
        for entry in self.entries:
            parts = pytree.tree_leaves((entry.args, dict(entry.kwargs), entry.state))
            for part in (entry.func, *parts):
                hasher.update((checksum(part) if isinstance(part, Tensor) else repr(part)).encode())
        return hasher.hexdigest()

    def add_operator(self, entry: RecordedOperator) -> None:
        """Add an operator."""
        index = len(self.entries)
        self.entries.append(entry)
        if entry.draw is not None:
            self._drawing.append(index)
        for number in entry.writes | {number for _, number in entry.made}:
            self._writers.setdefault(number, []).append(index)

    @property
    def draw_count(self) -> int:
        """The number of draws."""
        return len(self._drawing)

    def changed_state(self) -> Tensor | None:
        """Return the state of torch's generator, if it has changed since the last call."""
        state = torch.get_rng_state()
        if self._state is not None and torch.equal(state, self._state):
            return None
        self._state = state
        return state

    def replay(self, fillers: Mapping[Storage, Callable[[torch.UntypedStorage], None]]) -> None:
        """Make the values of some storages one after the other, each passed to its function.

        Only the storages that one of them needs are held at a time. Each draw starts with the state
        that the generator had in the recording, so any order is right; in the order of first draws,
        no draw is repeated only to find the next state. torch's generator is unchanged afterwards.
        """
        slices = {number: self._slice(number) for number in fillers}
        first_draws = {number: self._first_draw(indices) for number, indices in slices.items()}
        forked_rng = torch.random.fork_rng(devices=[])
        with _disable_current_modes(), forked_rng, torch.no_grad(), torch.device(self.device):
            for number in sorted(fillers, key=first_draws.__getitem__):
                storages = self._run(slices[number])
                fillers[number](storages[number] if number in storages else self._empty(number))

    def _first_draw(self, indices: Sequence[int]) -> int:
        draws = (self.entries[index].draw for index in indices)
        return next((draw for draw in draws if draw is not None), 0)

    def _slice(self, number: Storage) -> list[int]:
        """Return the operators, in order, on which the final contents of a storage depend."""
        indices: set[int] = set()
        pending = [(number, len(self.entries))]
        while pending:
            storage, end = pending.pop()
            writers = self._writers.get(storage, [])
            position = bisect_left(writers, end) - 1
            if position < 0 or writers[position] in indices:
                continue
            index = writers[position]
            indices.add(index)
            entry = self.entries[index]
            pending += [(read, index) for read in entry.reads | (entry.writes - entry.overwrites)]
        return sorted(indices)

    def _run(self, indices: Sequence[int]) -> dict[Storage, torch.UntypedStorage]:
        """Run these operators; return the storages that they have made and written."""
        storages: dict[Storage, torch.UntypedStorage] = {}

        def real(value: Any) -> Any:
            if not isinstance(value, RecordedView):
                return value
            if value.storage not in storages:
                storages[value.storage] = self._empty(value.storage)
            return value.view_on(storages[value.storage])

        for index in indices:
            entry = self.entries[index]
            if entry.draw is not None:
                torch.set_rng_state(self._state_before(entry.draw))
            args, kwargs = pytree.tree_map(real, (entry.args, dict(entry.kwargs)))
            outputs = pytree.tree_leaves(entry.func(*args, **kwargs))
            for output_index, number in entry.made:
                storages[number] = outputs[output_index].untyped_storage()
            if entry.draw is not None and entry.draw + 1 == self._known < self.draw_count:
                self._all_states()[self._known] = torch.get_rng_state()
                self._known += 1
        return storages

    def _empty(self, number: Storage) -> torch.UntypedStorage:
        """Return memory for a storage; on the host by mmap, so that it returns to the system."""
        size = self.sizes[number]
        if size >= mmap.PAGESIZE and on_host(self.device):
            return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8).untyped_storage()
        return torch.empty(size, dtype=torch.uint8, device=self.device).untyped_storage()

    def _state_before(self, draw: int) -> Tensor:
        """Return the state of the generator before a draw; earlier draws are run for it."""
        saved_state = self.entries[self._drawing[draw]].state
        if saved_state is not None:
            return saved_state
        while self._known <= draw:
            index = self._drawing[self._known - 1]
            entry = self.entries[index]
            self._run([index] if entry.writes == entry.overwrites else self._before(index))
        return self._all_states()[draw].clone()  # a generator reads the storage, not the view

    def _all_states(self) -> Tensor:
        """Return the tensor for the states before all draws.

        It is one tensor: small ones between large temporary ones would fragment the memory.
        """
        if self._states is None or len(self._states) < self.draw_count:
            grown = torch.empty(self.draw_count, len(torch.get_rng_state()), dtype=torch.uint8)
            if self._states is not None:
                grown[: len(self._states)] = self._states
            self._states = grown
        return self._states

    def _before(self, index: int) -> list[int]:
        """Return an operator that draws, after all operators on which it depends."""
        entry = self.entries[index]
        indices = {index}
        for number in entry.reads | (entry.writes - entry.overwrites):
            indices |= {earlier for earlier in self._slice(number) if earlier < index}
        return sorted(indices)

    def values(self, views: Sequence[RecordedView]) -> list[Tensor]:
        """Return tensors with their present values; those of one storage share one."""
        storages: dict[Storage, torch.UntypedStorage] = {}
        self.replay({view.storage: partial(storages.__setitem__, view.storage) for view in views})
        with _disable_current_modes():
            return [view.view_on(storages[view.storage]) for view in views]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that makes meta tensors in place of real ones, and records the operators on them."""

    def __init__(self, record: InitRecord) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = record

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        recorded = [t for t in tensors if self.record.number(t) is not None]
        if func is _aten._local_scalar_dense.default and recorded:
            return self._value(recorded[0]).item()
        if func is _aten._to_copy.default and recorded and _is_type(kwargs.get("device"), "cpu"):
            return func(self._value(recorded[0]), *args[1:], **kwargs)
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if not recorded and not self._makes(func, tensors, kwargs):
            if draws:
                raise _refusal(func, "draws into a tensor that was there before")
            return func(*args, **kwargs)
        if draws and kwargs.get("generator") is not None:
            raise _refusal(func, "draws from a generator of its own")
        return self._record_call(func, args, kwargs, draws)

    def _makes(self, func: Any, tensors: list[Tensor], kwargs: Mapping[str, Any]) -> bool:
        """Return whether an operator creates a tensor on the device of the record."""
        if tensors:  # `torch.tensor([..])`, which may be overwritten; `[]` only tests a device
            source = tensors[0]
            lifted = func is _aten.lift_fresh.default and source.device == self.record.device
            return lifted and source.numel() > 0
        if not _takes_device(func):
            return False
        device = kwargs.get("device")
        return device is None or torch.device(device) in (self.record.device, torch.device("meta"))

    def _record_call(self, func: Any, args: Any, kwargs: dict[str, Any], draws: bool) -> Any:
        record = self.record
        state = record.changed_state() if draws else None
        recorded, by_name = pytree.tree_map(self._as_recorded, (args, kwargs))
        on_meta = pytree.tree_map(lambda v: v.to("meta") if _is_real(v) else v, (args, kwargs))
        if _takes_device(func):
            on_meta[1]["device"] = torch.device("meta")
            if _is_type(by_name.get("device"), "meta"):  # from another tensor of the record
                by_name["device"] = record.device
        if func is _aten.lift_fresh.default:
            func = _aten.clone.default
        writes, overwrites = _written_storages(func, args, kwargs, record)
        outputs = func(*on_meta[0], **on_meta[1])
        new_storages = [
            (index, record.add(tensor))
            for index, tensor in enumerate(pytree.tree_leaves(outputs))
            if isinstance(tensor, Tensor) and record.number(tensor) is None
        ]
        if (writes or new_storages or draws) and func not in _EMPTY:
            leaves = pytree.tree_leaves((recorded, by_name))
            reads = {leaf.storage for leaf in leaves if isinstance(leaf, RecordedView)} - writes
            effects = (
                frozenset(reads),
                frozenset(writes),
                frozenset(overwrites),
                tuple(new_storages),
            )
            record.add_operator(
                RecordedOperator(
                    func, recorded, by_name, *effects, record.draw_count if draws else None, state
                )
            )
        return outputs

    def _as_recorded(self, value: Any) -> Any:
        """Return an argument as stored in the record: its tensors as views, other tensors
        copied."""
        if not isinstance(value, Tensor):
            return value
        view = self.record.view(value)
        return value.detach().clone() if view is None else view

    def _value(self, tensor: Tensor) -> Tensor:
        """Return the present value of a tensor, for code of the model that reads it."""
        view = self.record.view(tensor)
        assert view is not None, "only tensors of the record are asked for"
        return self.record.values([view])[0]


class PretendedDevice(TorchFunctionMode):
    """A mode under which tensors of a record report the device of the record.

    So code takes its usual branches: torch's `trunc_normal_`, for one, skips meta tensors.
    """

    def __init__(self, record: InitRecord) -> None:
        super().__init__()
        self.record = record

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _DEVICE_PROPERTIES and self.record.number(args[0]) is not None:
            with _disable_current_modes():
                return func(torch.empty(0, device=self.record.device))
        if func in _READING and (view := self.record.view(args[0])) is not None:
            return func(self.record.values([view])[0], *args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))


# the functions of these properties of a tensor, as function modes see them
_DEVICE_PROPERTIES = frozenset(
    inspect.getattr_static(Tensor, name).__get__
    for name in ("device", "is_meta", "is_cpu", "is_cuda")
)
_READING = {Tensor.tolist, Tensor.numpy, Tensor.__array__}


@refuse_at_caller()
def deferred_init(make: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    """Return `make(*args, **kwargs)` with parameters on the meta device, and a record of their
    values.

    Only buffers take memory. A program that is built of the model has bit by bit the values that
    the model would have had if it had been made here; each rank makes one parameter at a time and
    keeps its part. torch's generator is unchanged. Raises Refusal S626 if a call cannot be
    recorded: draws from another generator, or into tensors that existed before.
    """
    record = InitRecord(torch.get_default_device())
    with torch.random.fork_rng(devices=[]), PretendedDevice(record), Recorder(record):
        model = make(*args, **kwargs)
    if not isinstance(model, nn.Module):
        message = f"`deferred_init` takes a function that returns a module, not {kind_of(model)}"
        raise Refusal.of("S626", message)
    _fill_buffers(model, record)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (view := record.view(parameter)) is not None:
            record.views[name] = view
            record.versions[view.storage] = parameter._version
    _RECORDS[model] = record
    return model


def record_of(model: nn.Module) -> InitRecord | None:
    """Return the record of a model of `deferred_init`, or None."""
    return _RECORDS.get(model)


_RECORDS: weakref.WeakKeyDictionary[nn.Module, InitRecord] = weakref.WeakKeyDictionary()


def _fill_buffers(model: nn.Module, record: InitRecord) -> None:
    """Give buffers, and tensors that are plain attributes, their values."""
    parameters = {id(p) for p in model.parameters()}
    entries = [
        (table, name, record.view(value))
        for module in model.modules()
        for table in (module._buffers, vars(module))
        for name, value in table.items()
        if isinstance(value, Tensor) and id(value) not in parameters
    ]
    views = list(dict.fromkeys(view for _, _, view in entries if view is not None))
    values = dict(zip(views, record.values(views)))
    for table, name, view in entries:
        if view is not None:
            table[name] = values[view]


def _written_storages(
    func: Any, args: Any, kwargs: Mapping[str, Any], record: InitRecord
) -> tuple[set[Storage], set[Storage]]:
    """Return the storages into which an operator writes, and those that it overwrites
    completely."""
    writes, overwrites = set(), set()
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        for tensor in pytree.tree_leaves(value):
            if isinstance(tensor, Tensor) and (number := record.number(tensor)) is not None:
                writes.add(number)
                if func._schema.name.removeprefix("aten::") in _OVERWRITING and _is_whole(tensor):
                    overwrites.add(number)
    return writes, overwrites


def _is_whole(tensor: Tensor) -> bool:
    """Return whether a tensor covers its storage."""
    count = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size > 1 and stride != count:
            return False
        count *= size
    return count * tensor.itemsize == tensor.untyped_storage().nbytes()


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_meta


def _takes_device(func: Any) -> bool:
    return any(argument.name == "device" for argument in func._schema.arguments)


def _is_type(device: Any, kind: str) -> bool:
    return device is not None and torch.device(device).type == kind


def _refusal(func: Any, reason: str) -> Refusal:
    return Refusal.of(
        "S626",
        f"`deferred_init` cannot record `{func._schema.name.removeprefix('aten::')}`: it {reason}",
        helps=(
            "draw from torch's own generator, into tensors that the function makes",
            "or make the model as usual, on a real device",
        ),
    )
