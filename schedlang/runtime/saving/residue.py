"""What compressed sums keep from step to step, in a checkpoint: errors, starts of iterations.

The errors of a parameter are one tensor with a place for each rank that sums it, in front of the
parameter's own dims.  Where as many ranks sum it, each gets its own back; where others do, they
share what is left of all alike, so that what a step left out is still added to a later one.
A start belongs to a part of a matrix, and is taken up where a rank holds that part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from schedlang.runtime.collectives import comm
from schedlang.runtime.saving.boxes import Boxed, plain_torch, whole
from schedlang.runtime.saving.holding import Block, blocks
from schedlang.runtime.saving.moments import local

if TYPE_CHECKING:
    from schedlang.runtime.program import Program

ERRORS, STARTS = ("sums", "errors"), ("sums", "starts")
Told = Mapping[str, Any]


def described(program: Program) -> dict[str, Any] | None:
    """How many ranks sum, how often they have, and of what they keep something; None: nothing."""
    c = program.assembly.compressor
    if c is None:
        return None
    mine = {
        "errors": {n: _kind(m.error) for n, m in c.memories.items() if m.error is not None},
        "starts": {f"{n} {_part(program, n)}": [list(m.q.shape), _kind(m.q)]
                   for n, m in c.memories.items() if m.q is not None},
    }  # fmt: skip
    out: dict[str, Any] = {"step": c.step, "places": c.group.size, "errors": {}, "starts": {}}
    for found in comm.distinct(mine):
        out["errors"].update(found["errors"])
        out["starts"].update(found["starts"])
    return out


def tensors(program: Program) -> list[Boxed]:
    """What this rank keeps."""
    c = program.assembly.compressor
    found: list[Boxed] = []
    if c is None:
        return found
    for name, memory in c.memories.items():
        if memory.error is not None:
            place, places = _place(program), c.group.size
            found.append(_errors(program, name, memory.error[None], (place,), places))
        if memory.q is not None:
            path = (*STARTS, f"{name} {_part(program, name)}")
            speaks = _speaks(program, name) and _place(program) == 0
            found.append(whole(path, memory.q, speaks=speaks))
    return found


def blank(program: Program, told: Told | None) -> dict[tuple[str, str], Boxed]:
    """Room for what a checkpoint has of this rank's parts, by what it is and name."""
    c = program.assembly.compressor
    if c is None or told is None:
        return {}
    found: dict[tuple[str, str], Boxed] = {}
    places = told["places"]
    mine = (_place(program),) if places == c.group.size else tuple(range(places))
    for name in c.names:
        kind = told["errors"].get(name) if c.codec.feedback else None
        if kind is not None:
            shape = local(program.assembly.parameters[name]).shape
            empty = _zeros((len(mine), *shape), kind)
            found["error", name] = _errors(program, name, empty, mine, places)
        start = f"{name} {_part(program, name)}"
        size, kind = told["starts"].get(start, ((0, 0), ""))
        if c.codec.kind == "powersgd" and size[1] == c.codec.rank:
            found["start", name] = whole((*STARTS, start), _zeros(size, kind))
    return found


def put_back(program: Program, told: Told | None, parts: Mapping[tuple[str, str], Boxed]) -> None:
    """Go on from what was read; from nothing where nothing was."""
    from schedlang.runtime.summing.compressed import Memory

    c = program.assembly.compressor
    if c is None:
        return
    c.step = told["step"] if told is not None else 0
    c.memories.clear()
    for (what, name), boxed in parts.items():
        device = program.assembly.parameters[name].device
        memory = c.memories.setdefault(name, Memory())
        if what == "error":
            share = boxed.local.sum(0) / (1 if len(boxed.local) == 1 else c.group.size)
            memory.error = share.reshape(share.shape[0], -1).to(device)
        else:
            memory.q = boxed.local.to(device)


def _errors(
    program: Program, name: str, held: Tensor, places: tuple[int, ...], count: int
) -> Boxed:
    """The errors of some places for this rank's part of a parameter, of so many places."""
    a = program.assembly
    holding, mesh, rank = a.holdings[name], a.ranks.mesh, a.ranks.rank
    shape = holding.layout.shape
    inner = list(blocks(holding.segments(mesh, rank), shape))
    boxes = tuple(
        Block((at, *b.local), (place, *b.whole), (1, *b.size))
        for at, place in enumerate(places)
        for b in inner
    )
    lies = held.reshape(len(places), *local(a.parameters[name]).shape)
    return Boxed((*ERRORS, name), lies, (count, *shape), boxes, _speaks(program, name))


def _place(program: Program) -> int:
    """The place of this rank among those that sum with it."""
    a = program.assembly
    assert a.compressor is not None
    return a.ranks.mesh.index(a.ranks.rank, a.compressor.group.axes)


def _speaks(program: Program, name: str) -> bool:
    """Is this the rank that speaks for its part, among those at its place?"""
    a = program.assembly
    assert a.compressor is not None
    mesh = a.ranks.mesh
    first = dict.fromkeys(mesh.fold(a.compressor.group.axes), 0)
    return a.holdings[name].primary(mesh, mesh.rank({**mesh.coordinates(a.ranks.rank), **first}))


def _part(program: Program, name: str) -> str:
    """Which part of a parameter this rank holds, as text."""
    a = program.assembly
    runs = a.holdings[name].segments(a.ranks.mesh, a.ranks.rank)
    return ",".join("+".join(f"{run.start}:{run.length}" for run in dim) for dim in runs)


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _zeros(shape: Any, kind: str) -> Tensor:
    with plain_torch():
        return torch.zeros(tuple(shape), dtype=getattr(torch, kind))
