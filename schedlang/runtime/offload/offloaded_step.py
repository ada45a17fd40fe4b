"""Optimizer steps whose parameters, gradients or optimizer state are off the device, or on a peer.

* `PeerState`: optimizer state in the memory of the next rank of a pipeline. State moves in rounds,
  the same number on all ranks of a ring: the state of some parameters is received, they step, the
  state is sent out again. Each half of a round starts all of its messages before it waits for any,
  so no two ranks wait for each other. State that is out is a meta tensor in the optimizer's own
  state: its shape is known, and reading it by mistake fails.
* `OffloadedState`: a step over batches of parameters: their values, gradients and state are copied
  to host memory, the user's own optimizer steps on these, and all goes back to its tier (Ren et
  al., ZeRO-Offload, 2021). Tensors on disk are written to new files, which replace the old ones
  only when all ranks have written all of theirs: a full disk leaves the state before the step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.checkpointing.optimizer_state import mark_unsharded
from schedlang.runtime.comm import world
from schedlang.runtime.comm.collectives import Group, count
from schedlang.runtime.device import HOST, current_stream, has_streams, host_wait, mark_stream
from schedlang.runtime.grad_reduction.gradient import bucket_indices, local_gradient
from schedlang.runtime.offload.streamed_parameters import Window
from schedlang.runtime.optim.full_tensor_step import FullTensorStep, step_only
from schedlang.runtime.storage import copies
from schedlang.runtime.storage.offloaded_gradients import (
    local_tensor,
    restore_gradient,
    wait_for_offloaded,
)
from schedlang.runtime.storage.tiers import (
    CPU,
    DEVICE,
    DISK,
    PEER,
    ScratchFiles,
    host_copy,
    set_tier,
)

_UNCHANGED = -1  # a header: the held bytes are still valid


@dataclass
class PeerState:
    """This rank's place in a ring, the parameters whose state is out, and the state it holds.

    rounds  names of the parameters of each round of this rank; `max_rounds`: rounds of the ring
    hosts   the process group of hosts in the ring, which exchange numbers of bytes
    held    by round: bytes held for the previous rank
    """

    group: Group
    parameters: Mapping[str, nn.Parameter]
    rounds: Sequence[Sequence[str]]
    max_rounds: int
    hosts: world.ProcessGroup | None = None
    held: dict[int, Tensor] = field(default_factory=dict)

    def iterate_rounds(self, optimizer: torch.optim.Optimizer) -> Iterator[Sequence[str]]:
        """Yield, round by round, the names whose state is here; send it out before the next
        round."""
        for round_index in range(self.max_rounds):
            self._receive_round(round_index, optimizer)
            yield self._names(round_index)
            self._send_round(round_index, optimizer)

    @contextmanager
    def at_home(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Receive all state for the time of a block, to read or save it."""
        for round_index in range(self.max_rounds):
            self._receive_round(round_index, optimizer)
        try:
            yield
        finally:
            self.send_all(optimizer)

    def send_all(self, optimizer: torch.optim.Optimizer) -> None:
        """Send out all state that is here, after it was loaded or read."""
        for round_index in range(self.max_rounds):
            self._send_round(round_index, optimizer)

    def held_bytes(self) -> int:
        """Return the bytes that are held for the previous rank."""
        return sum(state.nbytes for state in self.held.values())

    # -- a round -----------------------------------------------------------------------------------

    def _names(self, round_index: int) -> Sequence[str]:
        return self.rounds[round_index] if round_index < len(self.rounds) else ()

    def _moved_entries(
        self, round_index: int, optimizer: torch.optim.Optimizer
    ) -> list[tuple[dict[str, Any], str]]:
        """Return the entries of the optimizer's state that move: those shaped as their
        parameter."""
        entries = []
        for name in self._names(round_index):
            parameter = self.parameters[name]
            state, shape = optimizer.state.get(parameter, {}), local_tensor(parameter).shape
            entries += [
                (state, key)
                for key, value in state.items()
                if isinstance(value, Tensor)
                and local_tensor(value).shape == shape
                and shape.numel()
            ]
        return entries

    def _receive_round(self, round_index: int, optimizer: torch.optim.Optimizer) -> None:
        entries = self._moved_entries(round_index, optimizer)
        outgoing = self.held.pop(round_index, None)
        flat = self._empty(sum(state[key].nbytes for state, key in entries if state[key].is_meta))
        self._exchange(outgoing, flat, home=True)
        offset = 0
        for state, key in entries:
            placeholder = state[key]
            if placeholder.is_meta:
                received = torch.empty_like(placeholder, device=self._device)
                _raw(received).copy_(flat[offset : offset + received.nbytes])
                state[key], offset = received, offset + received.nbytes

    def _send_round(self, round_index: int, optimizer: torch.optim.Optimizer) -> None:
        entries = self._moved_entries(round_index, optimizer)
        are_out = [state[key].is_meta for state, key in entries]
        assert all(are_out) or not any(are_out), "state of one round is half out"
        unchanged = any(are_out)
        parts = (
            [] if unchanged else [_raw(_dense(local_tensor(state[key]))) for state, key in entries]
        )
        outgoing = torch.cat(parts) if parts else self._empty(0)
        size = self._exchange_size(_UNCHANGED if unchanged else outgoing.numel())
        incoming = self._empty(max(size, 0))
        self._exchange(outgoing, incoming, home=False)
        if size != _UNCHANGED:
            self.held.pop(round_index, None)
            if size:
                self.held[round_index] = set_tier(incoming, PEER)
        for state, key in () if unchanged else entries:
            state[key] = torch.empty_like(local_tensor(state[key]), device="meta")

    # -- messages ----------------------------------------------------------------------------------

    @property
    def _device(self) -> torch.device:
        return next((local_tensor(p).device for p in self.parameters.values()), torch.device("cpu"))

    def _empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _exchange(self, outgoing: Tensor | None, incoming: Tensor, *, home: bool) -> None:
        """Send `outgoing` in one direction of the ring, fill `incoming` from the other; wait for
        both."""
        dest, source = self._neighbours(-1 if home else 1)
        with torch._C.DisableTorchFunction():
            sends = [] if outgoing is None or not outgoing.numel() else [(outgoing, dest)]
            if sends:
                count("send", self.group, sends[0][0])
            receives = [(incoming, source)] if incoming.numel() else []
            for work in world.batch_isend_irecv(sends, receives, self.group.pg):
                work.wait()

    def _exchange_size(self, number: int) -> int:
        """Send a number to the next rank's host, and return that of the previous rank."""
        dest, source = self._neighbours(1)
        with torch._C.DisableTorchFunction():
            size = torch.tensor([number], dtype=torch.int64, device=HOST)
            received = torch.empty_like(size)
            for work in world.batch_isend_irecv([(size, dest)], [(received, source)], self.hosts):
                work.wait()
            return int(received)

    def _neighbours(self, distance: int) -> tuple[int, int]:
        """Return the ranks `distance` places behind this one in the ring, and before it."""
        ranks, position = self.group.ranks, self.group.rank
        return ranks[(position + distance) % len(ranks)], ranks[(position - distance) % len(ranks)]


def _dense(tensor: Tensor) -> Tensor:
    """Return the tensor, contiguous as `empty_like` would make it."""
    return tensor if tensor.is_contiguous() else torch.empty_like(tensor).copy_(tensor)


def _raw(tensor: Tensor) -> Tensor:
    """Return the bytes of a dense tensor, in memory order."""
    with torch._C.DisableTorchFunction():
        flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
        return flat.view(torch.uint8)


UNDONE = "nothing was changed: the state is that before the step"


@dataclass(frozen=True)
class ParameterTiers:
    """The tiers of a parameter, of its gradients until the step, and of its optimizer state."""

    parameter: str = DEVICE
    gradient: str = DEVICE
    state: str = DEVICE

    @property
    def as_tuple(self) -> tuple[str, str, str]:
        """The three tiers."""
        return self.parameter, self.gradient, self.state

    @property
    def step(self) -> str:
        """The tier on which the step is computed."""
        on_device = self.parameter == DEVICE and self.state in (DEVICE, PEER)
        return DEVICE if on_device else CPU


class OffloadedStorage(Protocol):
    """Storage of a parameter off the device: full (`StreamedParameter`), or its shard (`Shard`)."""

    @property
    def home(self) -> Tensor:
        """The stored tensor."""

    def as_stored(self, value: Tensor) -> Tensor:
        """Return new values in the layout of the stored tensor."""

    def set_home(self, home: Tensor) -> None:
        """Store the parameter in this tensor from now on."""


@dataclass
class _Update:
    """A parameter after a step and before it; not committed yet."""

    name: str
    parameter: nn.Parameter
    master: nn.Parameter
    old: dict[str, Any]
    state: dict[str, Any] = field(default_factory=dict)
    home: Tensor | None = None  # the new file of the parameter


@dataclass(frozen=True)
class _StepInput:
    """A parameter's value and gradient where its step is computed; wait for the event first."""

    name: str
    value: Tensor
    grad: Tensor
    event: torch.Event | None = None  # of a gradient that is copied to the device


class _Batch(NamedTuple):
    """Parameters that step together, and events to wait for before the host reads them."""

    each: Sequence[_StepInput]
    copied: Sequence[torch.Event | None]


T = TypeVar("T")


def _prefetch(items: Iterable[T]) -> Iterator[T]:
    """Yield each item after the next one was requested: its copies overlap with computation."""
    previous: list[T] = []
    for item in items:
        yield from previous
        previous = [item]
    yield from previous


@dataclass
class OffloadedState:
    """This rank's parameters, and the tiers of each.

    disk        whether a row puts anything on disk, on any rank
    rewritten   whether a step writes files, on any rank
    tensorwise  whether the optimizer may step on some parameters at a time
    peer        optimizer state that is held by another rank
    """

    parameters: Mapping[str, nn.Parameter]
    tiers: Mapping[str, ParameterTiers]
    homes: Mapping[str, OffloadedStorage]  # of parameters off the device
    window: Window
    scratch: ScratchFiles
    disk: bool
    rewritten: bool
    tensorwise: bool = True
    peer: PeerState | None = None
    _buffers: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def check_full_step(self, full: FullTensorStep | None) -> None:
        """Refuse a step on full tensors that could not be undone (S855)."""
        if full is not None and self.rewritten:
            raise Refusal.of(
                "S855",
                "an optimizer step on full tensors cannot be undone on a full disk",
                notes=("this optimizer needs full tensors, and they are sharded",),
                helps=(
                    "keep everything in memory: `to=cpu`",
                    "or use an elementwise optimizer (SGD, Adam, AdamW, ...)",
                ),
            )

    def begin(self, buffers: Mapping[str, Tensor]) -> None:
        """Begin a step; if it may fail, copy the buffers."""
        self._buffers = [(b, b.detach().clone()) for b in buffers.values()] if self.disk else []

    def finish_backward(self) -> None:
        """End the backwards: wait for offloaded gradients, drop parameters from the device."""
        self.window.clear()
        wait_for_offloaded(self.parameters.values())

    def step(self, optimizer: torch.optim.Optimizer | None, full: FullTensorStep | None) -> None:
        """Run the step of the optimizer.

        Raises Refusal S850 on all ranks, with nothing changed, if a disk is full.
        """
        if full is not None:
            for parameter in self.parameters.values():
                restore_gradient(parameter)
            self.check(UNDONE)
            full.step(optimizer)
            self.store_all(optimizer)
            return
        if self.peer is not None and optimizer is not None:
            for names in self.peer.iterate_rounds(optimizer):
                fetched = self._fetch(names, {})
                self._commit(optimizer, self._step(optimizer, fetched) if names else ())
        updates: list[_Update] = []
        for fetched in self._prefetched_batches() if optimizer is not None else ():
            assert optimizer is not None
            updates += self._step(optimizer, fetched)
            if not self.disk:
                self._commit(optimizer, updates)
                updates = []
        try:
            self.check(UNDONE)
        except Refusal:
            for update in updates:
                assert optimizer is not None
                optimizer.state[update.parameter] = update.old
            raise
        if optimizer is None:
            for parameter in self.parameters.values():  # the caller runs the step
                restore_gradient(parameter)
            return
        self._commit(optimizer, updates)
        if self.tensorwise or not self.tiers:
            undeclared = {id(p): p for n, p in self.parameters.items() if n not in self.tiers}
            step_only(optimizer, undeclared)

    def check(self, consequence: str) -> None:
        """Raise Refusal S850 on all ranks if a write has failed on one."""
        if self.disk:
            try:
                self.scratch.raise_failure(consequence)
            except Refusal:
                for buffer, saved in self._buffers:
                    buffer.detach().copy_(saved)
                raise

    def store_all(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Move everything to its tier, after it was loaded or otherwise created."""
        for name, tiers in self.tiers.items():
            parameter = self.parameters[name]
            state = optimizer.state.get(parameter) if optimizer is not None else None
            if state:
                assert optimizer is not None
                optimizer.state[parameter] = self._stored_state(
                    state, tiers, local_tensor(parameter).shape
                )
            if tiers.parameter == DISK:
                self.homes[name].set_home(self.scratch.store(self.homes[name].home))
        if self.peer is not None and optimizer is not None:
            self.peer.send_all(optimizer)
        self.check("the state that could not be written stays in memory")

    def load_peer_state(
        self, optimizer: torch.optim.Optimizer | None
    ) -> AbstractContextManager[None]:
        """Receive state that other ranks hold, for the time of a block; all ranks must enter."""
        if self.peer is None or optimizer is None:
            return nullcontext()
        return self.peer.at_home(optimizer)

    # -- some parameters ---------------------------------------------------------------------------

    def _batches(self) -> Iterator[list[str]]:
        """Yield the names that step together; all, if the optimizer looks at all."""
        if not self.tensorwise and self.tiers:
            yield list(self.parameters)
            return
        remote = (
            [name for round_names in self.peer.rounds for name in round_names]
            if self.peer is not None
            else []
        )
        trained = (name for name in self.tiers if self.parameters[name].requires_grad)
        names = [name for name in trained if name not in remote]
        sizes = [(local_tensor(self.parameters[n]).nbytes, self.tiers[n].step) for n in names]
        for bucket in bucket_indices(sizes):
            yield [names[k] for k in bucket]

    def _prefetched_batches(self) -> Iterator[_Batch]:
        """Yield the batches that step together; if they are copied, prefetch the next one.

        All inputs exist when the step begins: no copy waits for the results of earlier batches.
        """
        behind = {device: mark_stream(current_stream(device)) for device in self._devices}
        fetched = (self._fetch(names, behind) for names in self._batches())
        return _prefetch(fetched) if behind else fetched

    @property
    def _devices(self) -> list[torch.device]:
        """Return the devices from which copies to the host are asynchronous."""
        owners = list(self.parameters.values())
        tensors = [local_tensor(t) for t in (*owners, *(p.grad for p in owners)) if t is not None]
        devices = dict.fromkeys(t.device for t in tensors)
        return [device for device in devices if has_streams(device)]

    def _fetch(
        self, names: Sequence[str], behind: Mapping[torch.device, torch.Event | None]
    ) -> _Batch:
        """Bring the inputs of the step on some parameters to where it is computed."""
        inputs, copied = [], False

        def fetch(value: Tensor) -> Tensor:
            return copies.to_host(value, behind=behind.get(value.device))

        for name in names:
            parameter, tiers = self.parameters[name], self.tiers.get(name, ParameterTiers())
            grad, value = local_gradient(parameter), local_tensor(parameter)
            if grad is None:
                continue
            if tiers.step == CPU:
                on_host = tiers.parameter == CPU and not self.disk
                value = value if on_host else fetch(value)
                grad = grad if tiers.gradient != DEVICE else fetch(grad)
                copied |= not on_host or tiers.gradient == DEVICE
                inputs.append(_StepInput(name, value, grad))
            else:
                value = value.clone() if self.disk else value
                on_device = tiers.gradient == DEVICE
                grad, event = (grad, None) if on_device else copies.to_device(grad, value.device)
                inputs.append(_StepInput(name, value, grad, event))
        return _Batch(inputs, [copies.record_copies(device) for device in self._devices if copied])

    def _step(self, optimizer: torch.optim.Optimizer, fetched: _Batch) -> list[_Update]:
        for event in fetched.copied:
            host_wait(event)
        updates = [self._master(optimizer, item) for item in fetched.each]
        step_only(optimizer, {id(item.parameter): item.master for item in updates})
        for item in updates:
            tiers = self.tiers.get(item.name, ParameterTiers())
            item.state = self._stored_state(
                optimizer.state.pop(item.master, {}), tiers, item.master.shape
            )
            item.master.grad = None
            if tiers.parameter == DISK:
                item.home = self.scratch.store(
                    self.homes[item.name].as_stored(item.master.detach())
                )
        return updates

    def _master(self, optimizer: torch.optim.Optimizer, fetched: _StepInput) -> _Update:
        """Make a parameter for the step: of a copy, or of the values of the parameter itself."""
        parameter = self.parameters[fetched.name]
        old, master = optimizer.state.pop(parameter, {}), nn.Parameter(fetched.value)
        master.grad = copies.wait_copy(fetched.grad, fetched.event)
        # loaded state, and state made with the optimizer (Adagrad's), has the parameter's layout
        state = {key: local_tensor(v) if hasattr(v, "to_local") else v for key, v in old.items()}
        if self.disk:  # a step that may be undone must not change the old state
            state = copy.deepcopy(state)
        if state:
            optimizer.state[master] = state
        return _Update(fetched.name, parameter, master, old)

    def _commit(self, optimizer: torch.optim.Optimizer, updates: Sequence[_Update]) -> None:
        for update in updates:
            if update.state:
                optimizer.state[update.parameter] = update.state
            if update.home is not None:
                self.homes[update.name].set_home(update.home)
                continue
            value = local_tensor(update.parameter)
            if value.data_ptr() != update.master.data_ptr():
                copies.copy_into(value, update.master.detach())

    def _stored_state(
        self, state: Mapping[str, Any], tiers: ParameterTiers, shape: torch.Size
    ) -> dict[str, Any]:
        """Return optimizer state on its tier; entries not shaped as the parameter stay in
        memory."""

        def laid(value: Tensor) -> Tensor:
            part = local_tensor(value)
            if tiers.state == DISK and part.shape == shape:
                return self.scratch.store(part)
            if not part.is_meta:  # meta in a dry run
                part = set_tier(part, CPU) if part.is_cpu else host_copy(part)
            return mark_unsharded(part) if hasattr(value, "of_whole") else part

        if tiers.state in (DEVICE, PEER):
            return dict(state)
        return dict(pytree.tree_map_only(Tensor, laid, dict(state)))


F = TypeVar("F", bound=Callable[..., Any])


def with_peer_state(method: F) -> F:
    """Wrap a method of a program: it runs with optimizer state that other ranks hold received."""

    @wraps(method)
    def run(program: Any, *args: Any, **kwargs: Any) -> Any:
        with (
            nullcontext()
            if program.offloaded is None
            else program.offloaded.load_peer_state(program.optimizer)
        ):
            return method(program, *args, **kwargs)

    return cast(F, run)
