"""Whole tensors of a program under the original's names, from what each rank holds of them.

Every function here is called by all ranks alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from schedlang.diagnostic import Diagnostic, Refusal
from schedlang.runtime.assembly import Assembly
from schedlang.runtime.attend import Layout
from schedlang.runtime.collectives import comm
from schedlang.runtime.context.rejoin import input_gradient
from schedlang.runtime.parts import Part, named_tensors
from schedlang.runtime.saving.holding import assemble, take
from schedlang.runtime.saving.moments import local
from schedlang.runtime.summing.gradient import local_gradient
from schedlang.runtime.summing.replicas import reshard


def _assembled(a: Assembly, part: Callable[[str], Tensor | None]) -> dict[str, Tensor]:
    return assemble(a.holdings, part, a.ranks)


def _parameters(a: Assembly) -> dict[str, Tensor]:
    return _assembled(a, lambda n: local(a.parameters[n]) if n in a.parameters else None)


def gradients(a: Assembly) -> dict[str, Tensor]:
    """The whole gradients; one that no rank has is left out."""
    found = a.parameters
    return _assembled(a, lambda n: local_gradient(found[n]) if n in found else None)


def trained(a: Assembly) -> list[str]:
    """The names of the parameters that some rank trains, in model order."""
    mine = [name for name, p in a.parameters.items() if p.requires_grad]
    union = {name for names in comm.distinct(mine) for name in names}
    return [name for name in a.holdings if name in union]


def state_dict(a: Assembly) -> dict[str, Tensor]:
    """Parameters and buffers by the original's keys."""
    found = _parameters(a)
    found.update(buffers(a))
    for names in a.ties:
        found.update({name: found[names[0]] for name in names if names[0] in found})
    return {key: found[key] for key in a.keys}


def buffers(a: Assembly) -> dict[str, Tensor]:
    """All buffers by name, those that a state dict leaves out too; of copies the first rank's.

    Of stages laid twice those of the first replica, which also evaluates: statistics of one
    direction, never a mixture of both.
    """
    own = {name: value.detach().cpu().clone() for name, value in a.buffers.items()}
    if a.stage_axis is None:
        return own
    place = a.ranks.mesh.index(a.ranks.rank, a.stage_axis)
    mine = {n: v for n, v in own.items() if place == a.buffer_homes.get(n, place)}
    merged: dict[str, Tensor] = {}
    for values in reversed(comm.distinct(mine)):
        merged.update(values)
    return merged


def buffer_errors(a: Assembly) -> dict[str, float]:
    """For each buffer whether its copies on all ranks that hold it are equal (0) or not (1)."""
    place = a.ranks.mesh.index(a.ranks.rank, a.stage_axis) if a.stage_axis is not None else 0
    stages = a.buffer_stages
    mine = {
        name: value.detach().cpu().clone()
        for name, value in a.buffers.items()
        if a.stage_axis is None or stages.get(name) is None or place in (stages[name] or ())
    }
    everyone = comm.distinct(mine)
    out = {}
    for name in dict.fromkeys(name for found in everyone for name in found):
        first, *others = [found[name] for found in everyone if name in found]
        out[name] = float(any(not torch.equal(first, other) for other in others))
    return out


def load_state_dict(a: Assembly, state: Mapping[str, Tensor]) -> None:
    """Take over whole values; raises Refusal S641 before anything is changed."""
    shapes = {name: h.layout.shape for name, h in a.holdings.items()}
    wrong = [f"`{k}` is missing" for k in a.keys if k not in state]
    wrong += [f"`{k}` is unknown" for k in state if k not in a.keys]
    wrong += [
        f"`{name}` is {list(state[name].shape)}, not {list(shape)}"
        for name, shape in shapes.items()
        if name in state and tuple(state[name].shape) != shape
    ]
    if wrong:
        more = (f"and {len(wrong) - 8} more like these",) * (len(wrong) > 8)
        helps = ("give the full state dict of this model, as `model.state_dict()` returns it",)
        notes = (*wrong[:8], *more)
        raise Refusal(
            Diagnostic("S641", "the state dict is not of this model", notes=notes, helps=helps)
        )
    with torch.no_grad():
        for name, parameter in a.parameters.items():
            part = take(state[name], a.holdings[name], a.ranks.mesh, a.ranks.rank)
            local(parameter).copy_(part)
        for name, buffer in a.buffers.items():
            if name in state:
                buffer.copy_(state[name])
    reshard(a.sliced)


def replica_errors(a: Assembly) -> dict[str, float]:
    """For each parameter the greatest relative difference between copies of one part."""
    found = _parameters(a)
    mine = {}
    for name, parameter in a.parameters.items():
        part = take(found[name], a.holdings[name], a.ranks.mesh, a.ranks.rank).double()
        if part.numel():
            scale = float(part.abs().max())
            error = float((local(parameter).cpu().double() - part).abs().max())
            mine[name] = error / scale if scale else error
    everyone = comm.gathered(mine)
    return {name: max(found.get(name, 0.0) for found in everyone) for name in a.holdings}


def optimizer_state(
    a: Assembly, optimizer: torch.optim.Optimizer | None
) -> dict[str, dict[str, Any]]:
    """By parameter name and slot: whole tensors, and numbers as they are."""
    own: dict[str, Mapping[str, Any]] = {}
    if optimizer is not None:
        own = {name: optimizer.state.get(p, {}) for name, p in a.parameters.items()}
    keys = sorted({key for state in own.values() for key in state})
    out: dict[str, dict[str, Any]] = {}
    for key in sorted({key for keys in comm.distinct(keys) for key in keys}):
        for name, value in _slot(a, own, key).items():
            out.setdefault(name, {})[key] = value
    return out


def _slot(a: Assembly, own: Mapping[str, Mapping[str, Any]], key: str) -> dict[str, Any]:
    shapes = {name: tuple(local(p).shape) for name, p in a.parameters.items()}

    def part(name: str) -> Tensor | None:
        value = own.get(name, {}).get(key)
        value = local(value) if isinstance(value, Tensor) else None
        return value if value is not None and tuple(value.shape) == shapes[name] else None

    found: dict[str, Any] = dict(_assembled(a, part))
    plain = {
        name: state[key].cpu().clone() if isinstance(state[key], Tensor) else state[key]
        for name, state in own.items()
        if key in state and part(name) is None
    }
    for values in reversed(comm.distinct(plain)):
        found.update(values)
    return found


def input_gradients(
    a: Assembly, parts: Sequence[Part], times: float = 1.0
) -> dict[str, Tensor | None]:
    """Gradients of the batch's float tensors: the rows of all replicas, summed over stages.

    The loss was multiplied by `times`.
    """
    mine = [
        {
            k: None if v.grad is None else v.grad / times
            for k, v in named_tensors(part.inputs).items()
            if v.requires_grad
        }
        for part in parts
    ]
    everyone = comm.gathered(mine)
    places = range(a.ranks.mesh.size(a.row_axes))
    names = mine[0] if mine else {}
    layout = parts[0].seat.layout if parts and parts[0].seat is not None else None
    return {n: _joined([_rows(a, everyone, place, n, layout) for place in places]) for n in names}


def _rows(
    a: Assembly, everyone: Sequence[Any], place: int, name: str, layout: Layout | None
) -> Tensor | None:
    """The gradient of some rows, from all ranks that have tokens of them."""
    if layout is None or a.tokens is None:
        return _replica(a, everyone, place, name)
    count = len(layout.runs)
    found = [_replica(a, everyone, place * count + k, name) for k in range(count)]
    return input_gradient(found, layout, name in (a.tokens.along or ()))


def _replica(a: Assembly, everyone: Sequence[Any], place: int, name: str) -> Tensor | None:
    """One replica's rows: each stage's part of the gradient, added up."""
    found = [
        [part[name] for part in parts]
        for rank, parts in enumerate(everyone)
        if a.speaks(rank) and a.place(rank) == place
    ]
    return _joined([_added(values) for values in zip(*found)])


def _joined(rows: Sequence[Tensor | None]) -> Tensor | None:
    there = [row for row in rows if row is not None]
    return torch.cat(there) if there and len(there) == len(rows) else None


def _added(values: Sequence[Tensor | None]) -> Tensor | None:
    there = [value for value in values if value is not None]
    return torch.stack(there).sum(0) if there else None
