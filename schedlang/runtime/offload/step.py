"""A step where parameters, gradients or the optimizer's state lie off the device.

Some parameters at a time: their values, gradients and state are brought together in host memory,
the user's own optimizer steps on these, and everything goes back to where it lies (Ren et al.,
ZeRO-Offload, 2021).  What is on disk is written anew, and takes the old one's place only when all
ranks have written all of theirs: a full disk leaves everything as it was before the step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal
from schedlang.runtime.device import has_streams, settled
from schedlang.runtime.grad_reduction.flat import buckets
from schedlang.runtime.grad_reduction.gradient import local_gradient
from schedlang.runtime.offload.parameters import Window
from schedlang.runtime.offload.peer import Peer
from schedlang.runtime.optim.whole_step import WholeStep, step_on
from schedlang.runtime.storage import copies
from schedlang.runtime.storage.leaving import all_arrived, give_back, local
from schedlang.runtime.storage.scratch import Scratch
from schedlang.runtime.storage.tiers import CPU, DEVICE, DISK, PEER, mark, plain_copy

UNDONE = "nothing was changed: the state is that before the step"


@dataclass(frozen=True)
class Tiers:
    """Where a parameter lies, its gradients between their making and the step, and its state."""

    parameter: str = DEVICE
    gradient: str = DEVICE
    state: str = DEVICE

    @property
    def each(self) -> tuple[str, str, str]:
        """All three."""
        return self.parameter, self.gradient, self.state

    @property
    def step(self) -> str:
        """Where the step is computed."""
        near = self.parameter == DEVICE and self.state in (DEVICE, PEER)
        return DEVICE if near else CPU


class Home(Protocol):
    """Where a parameter lies off the device: whole (`Held`), or its slice (`Shard`)."""

    @property
    def home(self) -> Tensor:
        """What lies there."""

    def laid(self, value: Tensor) -> Tensor:
        """New values as they would lie there."""

    def settle(self, home: Tensor) -> None:
        """Let it lie there from now on."""


@dataclass
class _Made:
    """What a step has made of a parameter, and what it was; nothing else knows of it yet."""

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
    """What steps together, and what to wait for before the host reads it."""

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
class Away:
    """What of this rank's parameters lies where.

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
            raise Refusal(
                Diagnostic(
                    "S855",
                    "an optimizer step on full tensors cannot be undone on a full disk",
                    notes=("this optimizer needs full tensors, and they are sharded",),
                    helps=(
                        "keep everything in memory: `to=cpu`",
                        "or use an elementwise optimizer (SGD, Adam, AdamW, ...)",
                    ),
                )
            )

    def begin(self, buffers: Mapping[str, Tensor]) -> None:
        """A step begins; where it may fail, buffers are noted as they are."""
        self._buffers = [(b, b.detach().clone()) for b in buffers.values()] if self.disk else []

    def arrived(self) -> None:
        """All gradients have been made: those that left are there, and parameters are gone."""
        self.window.clear()
        all_arrived(self.parameters.values())

    def step(self, optimizer: torch.optim.Optimizer | None, whole: WholeStep | None) -> None:
        """The optimizer's step.

        Raises Refusal S850 on all ranks, with nothing changed, where a disk is full.
        """
        if whole is not None:
            for parameter in self.parameters.values():
                give_back(parameter)
            self.check(UNDONE)
            whole.step(optimizer)
            self.settle(optimizer)
            return
        if self.peer is not None and optimizer is not None:
            for names in self.peer.steps(optimizer):
                fetched = self._fetched(names)
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
                give_back(parameter)
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
        """While it is entered, state that other ranks hold is here; all ranks enter it."""
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
        """What steps together; where it is copied, the next while this is stepped on."""
        fetched = map(self._fetched, self._batches())
        return _ahead(fetched) if self._devices else fetched

    @property
    def _devices(self) -> list[torch.device]:
        """Those from which the host copies, and need not wait until it reads."""
        some = list(self.parameters.values())
        there = [local(one) for one in (*some, *(p.grad for p in some)) if one is not None]
        lies = dict.fromkeys(one.device for one in there)
        return [device for device in lies if has_streams(device)]

    def _fetched(self, names: Sequence[str]) -> _Batch:
        """What the step on some parameters needs, on its way to where the step is computed."""
        found, copied = [], False
        for name in names:
            parameter, tiers = self.parameters[name], self.tiers.get(name, Tiers())
            grad, value = local_gradient(parameter), local(parameter)
            if grad is None:
                continue
            if tiers.step == CPU:
                own = tiers.parameter == CPU and not self.disk
                value = value if own else copies.to_host(value)
                grad = grad if tiers.gradient != DEVICE else copies.to_host(grad)
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
        """What stands for a parameter in the step: a copy, or the parameter's own values."""
        parameter = self.parameters[fetched.name]
        old, master = optimizer.state.pop(parameter, {}), nn.Parameter(fetched.value)
        master.grad = copies.ready(fetched.grad, fetched.event)
        # what is on disk, or may have to be as it was, is not stepped on
        state = copy.deepcopy(dict(old)) if self.disk else dict(old)
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
            return mark(part, CPU) if part.is_cpu else plain_copy(part)

        if tiers.state in (DEVICE, PEER):
            return dict(state)
        return dict(pytree.tree_map_only(Tensor, laid, dict(state)))


F = TypeVar("F", bound=Callable[..., Any])


def at_home(method: F) -> F:
    """A program's method that finds here what of the optimizer's state other ranks hold."""

    @wraps(method)
    def run(program: Any, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if program.away is None else program.away.home(program.optimizer):
            return method(program, *args, **kwargs)

    return cast(F, run)
