"""Cuts a forward at the edges of its modules, so that each is seen alone: what it takes and gives.

After the consistent generator of TTrace (arXiv 2506.09280): if every module is fed what it should
get, an error cannot travel, and whoever gives something wrong is wrong itself. A module hands
something on in two places: to the modules that it calls, and to whoever called it. Backward is cut
likewise: what it hands on gets a drawn cotangent, and the gradients of what it was given (by its
caller, by the modules it called, as parameters) are its own doing.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from schedlang.runtime import nests as pytree
from schedlang.runtime.logits.lazy_logits import LazyLogits
from schedlang.runtime.logits.vocab import ShardedLogits
from schedlang.runtime.staging.stage import enter

Frame = tuple[str, int]  # a module and which of its calls in one pass over the model
# of one call: ("input", its own frame, place), ("output", the frame of a module called, place) for
# what it is given; ("hands", the frame of a module called or its own, place) for what it hands on
Place = tuple[str, Frame, int]
Starts = list[int | None]  # of split logits the first class that this rank holds


@dataclass
class Call:
    """What one call of a module of the original takes, gives, and does in backward."""

    inputs: list[Tensor]
    outputs: list[Tensor] = field(default_factory=list)
    gradients: dict[Place, Tensor] = field(default_factory=dict)  # None ones are left out
    parameters: dict[str, Tensor] = field(default_factory=dict)  # by name, through this call only


@dataclass
class Running:
    """A call that has not returned."""

    frame: Frame
    module: nn.Module
    inputs: list[Tensor]
    given: dict[Place, Tensor] = field(default_factory=dict)
    hands: dict[Place, Tensor] = field(default_factory=dict)
    starts: dict[Place, int] = field(default_factory=dict)  # of those that are split logits


class Alone(ABC):
    """Hooks on all modules of a model that replace what crosses their edges.

    What is handed on is told (`taken`, `returned`), which answer by what the other side is given
    instead: detached, so that no graph is larger than a module's own code.
    """

    def __init__(self, model: nn.Module, opaque: Collection[str] = ()) -> None:
        """Inside `opaque` modules nothing is seen."""
        self.running: list[Running] = []
        self.turns: dict[str, int] = {}
        self.handles: list[Any] = []
        for name, module in outside(model, opaque):
            before = module.register_forward_pre_hook(self._before(name), with_kwargs=True)
            after = module.register_forward_hook(self._after, with_kwargs=True)
            self.handles += [before, after]

    def remove(self) -> None:
        """Leave the model as it was."""
        for handle in self.handles:
            handle.remove()

    # -- what differs between the original and a program -------------------------------------------

    @abstractmethod
    def taken(self, frame: Frame, tensors: list[Tensor], starts: Starts) -> list[Tensor]:
        """What a module is given instead of what its caller hands it."""

    @abstractmethod
    def returned(self, call: Running, tensors: list[Tensor], starts: Starts) -> list[Tensor]:
        """What a caller is given instead of what the module returns."""

    @abstractmethod
    def cotangent(self, place: Place, value: Tensor) -> Tensor:
        """The gradient that is sent back into something handed on."""

    # -- the hooks ---------------------------------------------------------------------------------

    def _before(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if not name:  # a pass may have ended by an exception: nothing is left of it
                self.running.clear()
                self.turns.clear()
            frame = name, self.turns.get(name, 0)
            self.turns[name] = frame[1] + 1
            tensors, starts, spec = parts_of((args, kwargs))
            if self.running:
                self._hand(self.running[-1], frame, tensors, starts)
            inputs = self.taken(frame, tensors, starts)
            call = Running(frame, module, inputs, _placed("input", frame, inputs))
            self.running.append(call)
            return pytree.tree_unflatten(rebuilt(spec[0], inputs), spec[1])

        return hook

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        while self.running and self.running[-1].module is not module:
            self.running.pop()
        if not self.running:
            return output
        call = self.running[-1]
        tensors, starts, spec = parts_of(output)
        self._hand(call, call.frame, tensors, starts)
        outputs = self.returned(call, tensors, starts)
        self.running.pop()
        if self.running:
            self.running[-1].given |= _placed("output", call.frame, outputs)
            self.running[-1].starts |= _started("output", call.frame, starts)
        return pytree.tree_unflatten(rebuilt(spec[0], outputs), spec[1])

    def _hand(self, call: Running, frame: Frame, tensors: list[Tensor], starts: Starts) -> None:
        call.hands |= _placed("hands", frame, tensors)
        call.starts |= _started("hands", frame, starts)

    # -- backward of one call ----------------------------------------------------------------------

    def gradients(self, call: Running) -> tuple[dict[Place, Tensor], dict[str, Tensor]]:
        """Gradients of what a call was given, and of its own parameters, under the cotangents."""
        hands = {p: t for p, t in call.hands.items() if t.requires_grad}
        given = {p: t for p, t in call.given.items() if t.requires_grad}
        own = {n: p for n, p in call.module.named_parameters(recurse=False) if p.requires_grad}
        if not hands or not (given or own) or not torch.is_grad_enabled():
            return {}, {}
        drawn = [self.cotangent(place, value) for place, value in hands.items()]
        found = torch.autograd.grad(
            list(hands.values()), [*given.values(), *own.values()], drawn, allow_unused=True
        )
        back = {p: g for p, g in zip(given, found) if g is not None}
        rest = found[len(given) :]
        return back, {n: g for n, g in zip(own, rest) if g is not None}


def _placed(kind: str, frame: Frame, tensors: Sequence[Tensor]) -> dict[Place, Tensor]:
    return {(kind, frame, k): tensor for k, tensor in enumerate(tensors)}


def _started(kind: str, frame: Frame, starts: Starts) -> dict[Place, int]:
    return {(kind, frame, k): start for k, start in enumerate(starts) if start is not None}


def outside(model: nn.Module, opaque: Collection[str]) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a model by name, without those inside opaque ones."""
    for name, module in model.named_modules():
        if not any(name.startswith(f"{other}.") for other in opaque):
            yield name, module


def parts_of(tree: Any) -> tuple[list[Tensor], Starts, tuple[list[Any], Any]]:
    """The tensors of a nest, where those that are split logits start, and what rebuilds the nest.

    Split logits count as their own part without the padding.
    """
    leaves, spec = pytree.tree_flatten(tree, is_leaf=lambda v: isinstance(v, ShardedLogits))
    # what a head hands on alone is its logits
    leaves = [leaf.computed() if isinstance(leaf, LazyLogits) else leaf for leaf in leaves]
    tensors: list[Tensor] = []
    starts: list[int | None] = []
    for leaf in leaves:
        if isinstance(leaf, ShardedLogits):
            mine = leaf.local.shape[-1]
            true = max(0, min(mine, leaf.classes - leaf.group.rank * mine))
            tensors.append(leaf.local[..., :true])
            starts.append(leaf.group.rank * mine)
        elif isinstance(leaf, Tensor):
            tensors.append(leaf)
            starts.append(None)
    return tensors, starts, (leaves, spec)


def rebuilt(leaves: Sequence[Any], tensors: Sequence[Tensor]) -> list[Any]:
    """The leaves with other tensors; each may be written into, as what a module returns may."""
    out: list[Any] = []
    rest = iter(tensors)
    for leaf in leaves:
        if isinstance(leaf, ShardedLogits):
            mine = enter(next(rest))
            padding = leaf.local.detach()[..., mine.shape[-1] :]
            local = torch.cat([mine, padding], -1) if padding.shape[-1] else mine
            out.append(ShardedLogits(local, leaf.group, leaf.classes))
        else:
            out.append(enter(next(rest)) if isinstance(leaf, Tensor) else leaf)
    return out


def fresh(value: Tensor, wants: bool) -> Tensor:
    """A copy without history, a leaf of a new graph if it `wants` a gradient."""
    copy = value.detach().clone()
    return copy.requires_grad_() if wants and copy.is_floating_point() else copy


def drawn(place: Place, value: Tensor) -> Tensor:
    """A cotangent for the whole of something handed on, the same wherever it is drawn."""
    seed = zlib.crc32(repr(place).encode())
    # not by torch: the modes of a proof refuse random numbers that are not the model's
    numbers = numpy.random.default_rng(seed).standard_normal(tuple(value.shape))
    return torch.as_tensor(numbers, dtype=value.dtype)


class Recorder(Alone):
    """The calls of the original in one pass, in the order in which they return."""

    def __init__(self, model: nn.Module, opaque: Collection[str] = ()) -> None:
        super().__init__(model, opaque)
        self.calls: dict[Frame, Call] = {}
        self._inputs: dict[Frame, list[Tensor]] = {}

    def taken(self, frame: Frame, tensors: list[Tensor], starts: Starts) -> list[Tensor]:
        """The same, detached, and noted."""
        self._inputs[frame] = [kept(tensor) for tensor in tensors]
        return [fresh(tensor, tensor.requires_grad) for tensor in tensors]

    def returned(self, call: Running, tensors: list[Tensor], starts: Starts) -> list[Tensor]:
        """The same, detached, and noted with what the call does in backward."""
        outputs = [kept(tensor) for tensor in tensors]
        back, own = self.gradients(call)
        self.calls[call.frame] = Call(self._inputs.pop(call.frame), outputs, back, own)
        return [fresh(tensor, tensor.requires_grad) for tensor in tensors]

    def cotangent(self, place: Place, value: Tensor) -> Tensor:
        """The whole one."""
        return drawn(place, value)


def kept(tensor: Tensor) -> Tensor:
    """A copy that remembers whether a gradient flows into it."""
    return fresh(tensor, tensor.requires_grad)


Calls = Mapping[Frame, Call]
