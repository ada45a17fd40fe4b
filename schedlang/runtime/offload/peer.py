"""The optimizer's state in the memory of the next rank of a pipeline; it comes home for the step.

State travels in rounds, the same number on all ranks of a ring: the state of some parameters comes
home, they step, it goes out again.  Each half of a round starts all of its messages before it
waits for any, so no two ranks wait for each other.  What is out is a tensor on the meta device in
the optimizer's own state: its shape is known, and nothing can be read of it by mistake.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.runtime.comm import world
from schedlang.runtime.comm.collectives import Group, count
from schedlang.runtime.storage.leaving import local
from schedlang.runtime.storage.tiers import PEER, mark

_KEPT = -1  # a header that says: what you hold is still right


@dataclass
class Peer:
    """This rank's place in a ring, the parameters whose state is out, and what it holds.

    rounds  the names of each round, of this rank; `most` is how many rounds the ring makes
    held    by round: what lies here for the rank before, as bytes
    """

    group: Group
    parameters: Mapping[str, nn.Parameter]
    rounds: Sequence[Sequence[str]]
    most: int
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
        """What lies here for the rank before."""
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
        told = torch.tensor([_KEPT if kept else out.numel()], device=self._device)
        theirs = torch.empty_like(told)
        self._exchange(told, theirs, home=False, header=True)
        size = int(theirs)
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

    def _exchange(
        self, out: Tensor | None, into: Tensor, *, home: bool, header: bool = False
    ) -> None:
        """Send `out` one way round the ring and fill `into` from the other; wait for both."""
        ring, by = self.group, -1 if home else 1
        to = ring.ranks[(ring.rank + by) % ring.size]
        source = ring.ranks[(ring.rank - by) % ring.size]
        with torch._C.DisableTorchFunction():
            sent = [] if out is None or not out.numel() else [(out, to)]
            if sent and not header:
                count("send", ring, sent[0][0])
            wanted = [(into, source)] if into.numel() else []
            for work in world.both_ways(sent, wanted, ring.pg):
                work.wait()


def _dense(tensor: Tensor) -> Tensor:
    """The tensor, laid in memory as one made like it is."""
    return tensor if tensor.is_contiguous() else torch.empty_like(tensor).copy_(tensor)


def _raw(tensor: Tensor) -> Tensor:
    """The bytes of a dense tensor, as it lies in memory."""
    with torch._C.DisableTorchFunction():
        flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
        return flat.view(torch.uint8)
