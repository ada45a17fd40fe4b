"""A step of an optimizer that looks at whole tensors (Muon, Adafactor, LAMB), on parts of them.

Some parameters at a time are put together with their gradients and state on the ranks that hold a
part; the user's own optimizer steps on these, and each rank takes its parts back. Between steps
nothing is whole: state that is shaped like a parameter lies as the parameter does, anything else
(rows and columns of Adafactor's) is the same on all of its ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.runtime.collectives.ranks import Ranks
from schedlang.runtime.saving.holding import Holding, assemble, take
from schedlang.runtime.saving.moments import _laid, like_parameter, local
from schedlang.runtime.stepping.one_kind import step_by_kinds
from schedlang.runtime.summing.gradient import local_gradient

AT_ONCE = 2**24  # elements that are whole at a time, or one parameter


@dataclass(frozen=True)
class WholeStep:
    """How parameters of these holdings are stepped on; the same on every rank."""

    parameters: Mapping[str, nn.Parameter]
    holdings: Mapping[str, Holding]
    ranks: Ranks

    def step(self, optimizer: torch.optim.Optimizer | None) -> None:
        """One step; every rank takes part, also one that trains nothing."""
        split = [n for n, h in self.holdings.items() if h.layout.splits or h.sliced]
        if optimizer is not None:
            rest = {id(p): p for n, p in self.parameters.items() if n not in set(split)}
            step_on(optimizer, rest)
        for names in self._batches(split):
            self._step_whole(optimizer, names)

    def _batches(self, names: Sequence[str]) -> Iterator[list[str]]:
        batch: list[str] = []
        size = 0
        for name in names:
            count = torch.Size(self.holdings[name].layout.shape).numel()
            if batch and size + count > AT_ONCE:
                yield batch
                batch, size = [], 0
            batch.append(name)
            size += count
        if batch:
            yield batch

    def _step_whole(self, optimizer: torch.optim.Optimizer | None, names: list[str]) -> None:
        held = {n: self.parameters[n] for n in names if n in self.parameters}
        states: Mapping[Any, dict[str, Any]] = {} if optimizer is None else optimizer.state
        values = self._whole(names, lambda n: local(held[n]) if n in held else None)
        grads = self._whole(names, lambda n: local_gradient(held[n]) if n in held else None)
        keys = sorted({key for p in held.values() for key in states.get(p, {})})
        slots = {key: self._whole(names, lambda n, k=key: _part(held, states, n, k))
                 for key in self._everyones(keys)}  # fmt: skip
        if optimizer is None:
            return
        wholes: dict[int, nn.Parameter] = {}
        for name, parameter in held.items():
            if name not in grads:
                continue
            whole = wholes[id(parameter)] = nn.Parameter(values[name].to(local(parameter).device))
            whole.grad = grads[name].to(whole.device)
            state = dict(states.get(parameter, {}))
            state.update({k: s[name].to(whole.device) for k, s in slots.items() if name in s})
            if state:
                optimizer.state[whole] = state
        step_on(optimizer, wholes)
        for name, parameter in held.items():
            if id(parameter) in wholes:
                self._take_back(optimizer, name, parameter, wholes[id(parameter)])

    def _take_back(
        self, optimizer: torch.optim.Optimizer, name: str, mine: nn.Parameter, whole: nn.Parameter
    ) -> None:
        """This rank's parts of the value and of the state."""

        def part(value: Tensor) -> Tensor:
            return take(value, self.holdings[name], self.ranks.mesh, self.ranks.rank)

        with torch.no_grad():
            local(mine).copy_(part(whole.detach()))
            state = optimizer.state.pop(whole, {})
            optimizer.state[mine] = {
                key: _laid(part(value), mine) if like_parameter(value, whole) else value
                for key, value in state.items()
            }

    def _whole(self, names: Sequence[str], part: Any) -> dict[str, Tensor]:
        some = {name: self.holdings[name] for name in names}
        return assemble(some, part, self.ranks)

    def _everyones(self, keys: Sequence[str]) -> list[str]:
        """Keys of state that some rank has."""
        from schedlang.runtime.collectives import comm

        return sorted({k for some in comm.distinct(list(keys)) for k in some})


def _part(
    held: Mapping[str, nn.Parameter], states: Mapping[Any, dict[str, Any]], name: str, key: str
) -> Tensor | None:
    """A rank's part of state that lies as its parameter does."""
    if name not in held:
        return None
    value = states.get(held[name], {}).get(key)
    return local(value) if like_parameter(value, held[name]) else None


def step_on(optimizer: torch.optim.Optimizer, stands_for: Mapping[int, nn.Parameter]) -> None:
    """A step on these alone: by the id of a parameter in a group what takes its place."""
    before = [group["params"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            found = (stands_for.get(id(p)) for p in group["params"])
            group["params"] = [p for p in found if p is not None]
        step_by_kinds(optimizer)
    finally:
        for group, parameters in zip(optimizer.param_groups, before):
            group["params"] = parameters
