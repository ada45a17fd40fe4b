"""A step where parameters, gradients or the optimizer's state lie off the device, or on a peer.

* The optimizer's state in the memory of the next rank of a pipeline; it comes for the step. State
  travels in rounds, the same number on all ranks of a ring: the state of some parameters comes
  home, they step, it goes out again.  Each half of a round starts all of its messages before it
  waits for any, so no two ranks wait for each other.  What is out is a tensor on the meta device
  in the optimizer's own state: its shape is known, and nothing can be read of it by mistake.
* A step where parameters, gradients or the optimizer's state lie off the device. Some parameters
  at a time: their values, gradients and state are brought together in host memory, the user's own
  optimizer steps on these, and everything goes back to where it lies (Ren et al., ZeRO-Offload,
  2021).  What is on disk is written anew, and takes the old one's place only when all ranks have
  written all of theirs: a full disk leaves everything as it was before the step.
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
from schedlang.runtime.checkpointing.moments import of_whole
from schedlang.runtime.comm import world
from schedlang.runtime.comm.collectives import Group, count
from schedlang.runtime.device import HOST, current_stream, has_streams, record, settled
from schedlang.runtime.grad_reduction.gradient import buckets, local_gradient
from schedlang.runtime.offload.parameters import Window
from schedlang.runtime.optim.whole_step import WholeStep, step_on
from schedlang.runtime.storage import copies
from schedlang.runtime.storage.offloaded_gradients import (
    local,
    restore_gradient,
    wait_for_offloaded,
)
from schedlang.runtime.storage.tiers import CPU, DEVICE, DISK, PEER, Scratch, mark, plain_copy

_KEPT = -1  # a header that says: what you hold is still right


@dataclass
class Peer:
    """This rank's place in a ring, the parameters whose state is out, and what it holds.

    rounds  the names of each round, of this rank; `most` is how many rounds the ring makes
    hosts   the same ring for hosts, who tell each other how many bytes come
    held    by round: what lies here for the rank before, as bytes
    """

    group: Group
    parameters: Mapping[str, nn.Parameter]
    rounds: Sequence[Sequence[str]]
    most: int
    hosts: world.ProcessGroup | None = None
    held: dict[int, Tensor] = field(default_factory=dict)

    def steps(self, optimizer: torch.optim.Optimizer) -> Iterator[Sequence[str]]:
        """Round by round the names whose state is home; it goes out when the next is asked for."""
        for turn in range(self.most):
            self._bring(turn, optimizer)
            yield self._names(turn)
            self._send(turn, optimizer)

    @contextmanager
    def home(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """All state is where its parameters are, while something reads or saves it."""
        for turn in range(self.most):
            self._bring(turn, optimizer)
        try:
            yield
        finally:
            self.settle(optimizer)

    def settle(self, optimizer: torch.optim.Optimizer) -> None:
        """Send out all that is home, after it was loaded or read."""
        for turn in range(self.most):
            self._send(turn, optimizer)

    def held_bytes(self) -> int:
        """The bytes that lie here for the rank before."""
        return sum(one.nbytes for one in self.held.values())

    # -- a round -----------------------------------------------------------------------------------

    def _names(self, turn: int) -> Sequence[str]:
        return self.rounds[turn] if turn < len(self.rounds) else ()

    def _moving(
        self, turn: int, optimizer: torch.optim.Optimizer
    ) -> list[tuple[dict[str, Any], str]]:
        """The places in the optimizer's state that travel: those shaped as their parameter."""
        found = []
        for name in self._names(turn):
            parameter = self.parameters[name]
            state, shape = optimizer.state.get(parameter, {}), local(parameter).shape
            found += [
                (state, key)
                for key, value in state.items()
                if isinstance(value, Tensor) and local(value).shape == shape and shape.numel()
            ]
        return found

    def _bring(self, turn: int, optimizer: torch.optim.Optimizer) -> None:
        places = self._moving(turn, optimizer)
        out = self.held.pop(turn, None)
        flat = self._empty(sum(state[key].nbytes for state, key in places if state[key].is_meta))
        self._exchange(out, flat, home=True)
        at = 0
        for state, key in places:
            like = state[key]
            if like.is_meta:
                made = torch.empty_like(like, device=self._device)
                _raw(made).copy_(flat[at : at + made.nbytes])
                state[key], at = made, at + made.nbytes

    def _send(self, turn: int, optimizer: torch.optim.Optimizer) -> None:
        places = self._moving(turn, optimizer)
        there = [state[key].is_meta for state, key in places]
        assert all(there) or not any(there), "state of one round is half out"
        kept = any(there)
        parts = [] if kept else [_raw(_dense(local(state[key]))) for state, key in places]
        out = torch.cat(parts) if parts else self._empty(0)
        size = self._told(_KEPT if kept else out.numel())
        into = self._empty(max(size, 0))
        self._exchange(out, into, home=False)
        if size != _KEPT:
            self.held.pop(turn, None)
            if size:
                self.held[turn] = mark(into, PEER)
        for state, key in () if kept else places:
            state[key] = torch.empty_like(local(state[key]), device="meta")

    # -- messages ----------------------------------------------------------------------------------

    @property
    def _device(self) -> torch.device:
        return next((local(p).device for p in self.parameters.values()), torch.device("cpu"))

    def _empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _exchange(self, out: Tensor | None, into: Tensor, *, home: bool) -> None:
        """Send `out` one way round the ring and fill `into` from the other; wait for both."""
        to, source = self._beside(-1 if home else 1)
        with torch._C.DisableTorchFunction():
            sent = [] if out is None or not out.numel() else [(out, to)]
            if sent:
                count("send", self.group, sent[0][0])
            wanted = [(into, source)] if into.numel() else []
            for work in world.batch_isend_irecv(sent, wanted, self.group.pg):
                work.wait()

    def _told(self, number: int) -> int:
        """Tell the next rank's host a number, and hear that of the rank before."""
        to, source = self._beside(1)
        with torch._C.DisableTorchFunction():
            mine = torch.tensor([number], dtype=torch.int64, device=HOST)
            theirs = torch.empty_like(mine)
            for work in world.batch_isend_irecv([(mine, to)], [(theirs, source)], self.hosts):
                work.wait()
            return int(theirs)

    def _beside(self, by: int) -> tuple[int, int]:
        """The ranks so many places behind this one in the ring, and before it."""
        ranks, place = self.group.ranks, self.group.rank
        return ranks[(place + by) % len(ranks)], ranks[(place - by) % len(ranks)]


def _dense(tensor: Tensor) -> Tensor:
    """The tensor, laid in memory as one made like it is."""
    return tensor if tensor.is_contiguous() else torch.empty_like(tensor).copy_(tensor)


def _raw(tensor: Tensor) -> Tensor:
    """The bytes of a dense tensor, as it lies in memory."""
    with torch._C.DisableTorchFunction():
        flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
        return flat.view(torch.uint8)


UNDONE = "nothing was changed: the state is that before the step"


@dataclass(frozen=True)
class Tiers:
    """The tiers of a parameter, of its gradients until the step, and of its state."""

    parameter: str = DEVICE
    gradient: str = DEVICE
    state: str = DEVICE

    @property
    def each(self) -> tuple[str, str, str]:
        """All three."""
        return self.parameter, self.gradient, self.state

    @property
    def step(self) -> str:
        """The tier on which the step is computed."""
        near = self.parameter == DEVICE and self.state in (DEVICE, PEER)
        return DEVICE if near else CPU


class Home(Protocol):
    """A parameter off the device: whole (`StreamedParameter`), or its slice (`Shard`)."""

    @property
    def home(self) -> Tensor:
        """The tensor that lies there."""

    def laid(self, value: Tensor) -> Tensor:
        """New values as they would lie there."""

    def settle(self, home: Tensor) -> None:
        """Let it lie there from now on."""


@dataclass
class _Made:
    """A parameter after a step, and before it; nothing else knows of it yet."""

    name: str
    parameter: nn.Parameter
    master: nn.Parameter
    old: dict[str, Any]
    state: dict[str, Any] = field(default_factory=dict)
    home: Tensor | None = None  # where the parameter will lie, on disk


@dataclass(frozen=True)
class _Fetched:
    """A parameter's values and gradient where its step is computed; wait for the event first."""

    name: str
    value: Tensor
    grad: Tensor
    event: torch.Event | None = None  # of a gradient that comes to the device


class _Batch(NamedTuple):
    """Parameters that step together, and the events to wait for before the host reads them."""

    each: Sequence[_Fetched]
    copied: Sequence[torch.Event | None]


T = TypeVar("T")


def _ahead(some: Iterable[T]) -> Iterator[T]:
    """Each, after the one behind it was asked for: its copies run while this one is computed."""
    before: list[T] = []
    for one in some:
        yield from before
        before = [one]
    yield from before


@dataclass
class Offloaded:
    """This rank's parameters, and where each of their parts lies.

    disk        whether any row puts anything on disk, on any rank
    rewritten   whether a step writes files, on any rank
    tensorwise  whether the optimizer may step on some parameters at a time
    peer        where state goes that lies on another rank
    """

    parameters: Mapping[str, nn.Parameter]
    tiers: Mapping[str, Tiers]
    homes: Mapping[str, Home]  # of parameters off the device
    window: Window
    scratch: Scratch
    disk: bool
    rewritten: bool
    tensorwise: bool = True
    peer: Peer | None = None
    _buffers: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def check_whole(self, whole: WholeStep | None) -> None:
        """Refuse a step on whole tensors where it would have to be undone (S855)."""
        if whole is not None and self.rewritten:
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
        """A step begins; where it may fail, buffers are noted as they are."""
        self._buffers = [(b, b.detach().clone()) for b in buffers.values()] if self.disk else []

    def arrived(self) -> None:
        """All gradients have been made: those that left are there, and parameters are gone."""
        self.window.clear()
        wait_for_offloaded(self.parameters.values())

    def step(self, optimizer: torch.optim.Optimizer | None, whole: WholeStep | None) -> None:
        """The optimizer's step.

        Raises Refusal S850 on all ranks, with nothing changed, where a disk is full.
        """
        if whole is not None:
            for parameter in self.parameters.values():
                restore_gradient(parameter)
            self.check(UNDONE)
            whole.step(optimizer)
            self.settle(optimizer)
            return
        if self.peer is not None and optimizer is not None:
            for names in self.peer.steps(optimizer):
                fetched = self._fetched(names, {})
                self._commit(optimizer, self._step(optimizer, fetched) if names else ())
        made: list[_Made] = []
        for fetched in self._coming() if optimizer is not None else ():
            assert optimizer is not None
            made += self._step(optimizer, fetched)
            if not self.disk:
                self._commit(optimizer, made)
                made = []
        try:
            self.check(UNDONE)
        except Refusal:
            for one in made:
                assert optimizer is not None
                optimizer.state[one.parameter] = one.old
            raise
        if optimizer is None:
            for parameter in self.parameters.values():  # the step is the caller's own
                restore_gradient(parameter)
            return
        self._commit(optimizer, made)
        if self.tensorwise or not self.tiers:
            rest = {id(p): p for n, p in self.parameters.items() if n not in self.tiers}
            step_on(optimizer, rest)

    def check(self, consequence: str) -> None:
        """Raise Refusal S850 on all ranks if anything could not be written on one."""
        if self.disk:
            try:
                self.scratch.check(consequence)
            except Refusal:
                for buffer, old in self._buffers:
                    buffer.detach().copy_(old)
                raise

    def settle(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Put everything where it lies, after it was loaded or otherwise made anew."""
        for name, tiers in self.tiers.items():
            parameter = self.parameters[name]
            state = optimizer.state.get(parameter) if optimizer is not None else None
            if state:
                assert optimizer is not None
                optimizer.state[parameter] = self._laid(state, tiers, local(parameter).shape)
            if tiers.parameter == DISK:
                self.homes[name].settle(self.scratch.put(self.homes[name].home))
        if self.peer is not None and optimizer is not None:
            self.peer.settle(optimizer)
        self.check("the state that could not be written stays in memory")

    def home(self, optimizer: torch.optim.Optimizer | None) -> AbstractContextManager[None]:
        """Bring the state that other ranks hold here, for the time of a block; all ranks enter
        it."""
        if self.peer is None or optimizer is None:
            return nullcontext()
        return self.peer.home(optimizer)

    # -- some parameters ---------------------------------------------------------------------------

    def _batches(self) -> Iterator[list[str]]:
        """The parameters that step together; all, where the optimizer looks at all."""
        if not self.tensorwise and self.tiers:
            yield list(self.parameters)
            return
        out = [name for turn in self.peer.rounds for name in turn] if self.peer is not None else []
        trained = (name for name in self.tiers if self.parameters[name].requires_grad)
        names = [name for name in trained if name not in out]
        sizes = [(local(self.parameters[n]).nbytes, self.tiers[n].step) for n in names]
        for bucket in buckets(sizes):
            yield [names[k] for k in bucket]

    def _coming(self) -> Iterator[_Batch]:
        """The batches that step together; where they are copied, the next one ahead.

        All is there when the step begins: no copy waits for what goes back of the batches before.
        """
        behind = {device: record(current_stream(device)) for device in self._devices}
        fetched = (self._fetched(names, behind) for names in self._batches())
        return _ahead(fetched) if behind else fetched

    @property
    def _devices(self) -> list[torch.device]:
        """Return the devices from which copies to the host run without waiting."""
        some = list(self.parameters.values())
        there = [local(one) for one in (*some, *(p.grad for p in some)) if one is not None]
        lies = dict.fromkeys(one.device for one in there)
        return [device for device in lies if has_streams(device)]

    def _fetched(
        self, names: Sequence[str], behind: Mapping[torch.device, torch.Event | None]
    ) -> _Batch:
        """Bring what the step on some parameters needs to where it is computed."""
        found, copied = [], False

        def came(value: Tensor) -> Tensor:
            return copies.to_host(value, behind=behind.get(value.device))

        for name in names:
            parameter, tiers = self.parameters[name], self.tiers.get(name, Tiers())
            grad, value = local_gradient(parameter), local(parameter)
            if grad is None:
                continue
            if tiers.step == CPU:
                own = tiers.parameter == CPU and not self.disk
                value = value if own else came(value)
                grad = grad if tiers.gradient != DEVICE else came(grad)
                copied |= not own or tiers.gradient == DEVICE
                found.append(_Fetched(name, value, grad))
            else:
                value = value.clone() if self.disk else value
                near = tiers.gradient == DEVICE
                grad, event = (grad, None) if near else copies.to_device(grad, value.device)
                found.append(_Fetched(name, value, grad, event))
        return _Batch(found, [copies.mark(device) for device in self._devices if copied])

    def _step(self, optimizer: torch.optim.Optimizer, fetched: _Batch) -> list[_Made]:
        for event in fetched.copied:
            settled(event)
        made = [self._master(optimizer, one) for one in fetched.each]
        step_on(optimizer, {id(one.parameter): one.master for one in made})
        for one in made:
            tiers = self.tiers.get(one.name, Tiers())
            one.state = self._laid(optimizer.state.pop(one.master, {}), tiers, one.master.shape)
            one.master.grad = None
            if tiers.parameter == DISK:
                one.home = self.scratch.put(self.homes[one.name].laid(one.master.detach()))
        return made

    def _master(self, optimizer: torch.optim.Optimizer, fetched: _Fetched) -> _Made:
        """Make a parameter for the step: of a copy, or of the parameter's own values."""
        parameter = self.parameters[fetched.name]
        old, master = optimizer.state.pop(parameter, {}), nn.Parameter(fetched.value)
        master.grad = copies.ready(fetched.grad, fetched.event)
        # what was loaded, or made with the optimizer (Adagrad's), lies as the parameter does
        state = {key: local(v) if hasattr(v, "to_local") else v for key, v in old.items()}
        if self.disk:  # what is on disk, or may have to be as it was, is not stepped on
            state = copy.deepcopy(state)
        if state:
            optimizer.state[master] = state
        return _Made(fetched.name, parameter, master, old)

    def _commit(self, optimizer: torch.optim.Optimizer, made: Sequence[_Made]) -> None:
        for one in made:
            if one.state:
                optimizer.state[one.parameter] = one.state
            if one.home is not None:
                self.homes[one.name].settle(one.home)
                continue
            value = local(one.parameter)
            if value.data_ptr() != one.master.data_ptr():
                copies.onto(value, one.master.detach())

    def _laid(self, state: Mapping[str, Any], tiers: Tiers, shape: torch.Size) -> dict[str, Any]:
        """The state of a parameter where it lies; what is not shaped like it stays in memory."""

        def laid(value: Tensor) -> Tensor:
            part = local(value)
            if tiers.state == DISK and part.shape == shape:
                return self.scratch.put(part)
            if not part.is_meta:  # as it is where a step is played
                part = mark(part, CPU) if part.is_cpu else plain_copy(part)
            return of_whole(part) if hasattr(value, "of_whole") else part

        if tiers.state in (DEVICE, PEER):
            return dict(state)
        return dict(pytree.tree_map_only(Tensor, laid, dict(state)))


F = TypeVar("F", bound=Callable[..., Any])


def with_peer_state(method: F) -> F:
    """A program's method that finds here what of the optimizer's state other ranks hold."""

    @wraps(method)
    def run(program: Any, *args: Any, **kwargs: Any) -> Any:
        with (
            nullcontext()
            if program.offloaded is None
            else program.offloaded.home(program.optimizer)
        ):
            return method(program, *args, **kwargs)

    return cast(F, run)
