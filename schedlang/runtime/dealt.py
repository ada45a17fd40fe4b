"""A batch of a whole step dealt to ranks: the microbatches of this one, and what all weigh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from schedlang.runtime.assembly import Assembly
from schedlang.runtime.collectives import comm
from schedlang.runtime.parts import Batch, Part, rows_of, split


@dataclass(frozen=True)
class Dealt:
    """This rank's microbatches and their weights, those of the whole batch, and of everyone.

    everyone  of each replica, the weight of each of its microbatches
    """

    parts: Sequence[Part]
    weights: Sequence[float]
    everyone: Sequence[Sequence[float]]

    @property
    def total(self) -> float:
        """The weight of the whole batch; where nothing weighs anything all parts weigh 1."""
        return float(sum(map(sum, self.everyone))) or float(sum(map(len, self.everyone)))

    @property
    def empty(self) -> bool:
        """Is there nothing in the whole batch that weighs anything?"""
        return not any(map(any, self.everyone))


def dealt(a: Assembly, batch: Batch, local: bool) -> Dealt:
    """What a rank computes of a batch: of the whole one, or (`local`) of its own rows."""
    mine = _of_rows(a, batch) if local else _of_all(a, batch)
    if mine.empty:  # the model's own loss of nothing (NaN, or 0), whatever the layout
        return replace(mine, weights=[1.0] * len(mine.weights))
    return mine


def _of_all(a: Assembly, batch: Batch) -> Dealt:
    mesh, place = a.ranks.mesh, a.place(a.ranks.rank)
    rows = split(batch, mesh.size(a.row_axes), a.micro)
    everyone = [parts for share in rows for parts in a.by_tokens(share)]
    alone = mesh.size(a.replicas) * a.micro == 1
    weights = iter(() if alone else a.weigh_all([part for parts in everyone for part in parts]))
    weigh = [[1.0 if alone else next(weights) for _ in parts] for parts in everyone]
    return Dealt(everyone[place], weigh[place], weigh)


def _of_rows(a: Assembly, batch: Batch) -> Dealt:
    mesh = a.ranks.mesh
    (rows,) = split(batch, 1, a.micro)
    own = a.by_tokens(rows)[mesh.index(a.ranks.rank, a.context)]
    weights = a.weigh_all(own)
    group = a.ranks.group(a.replicas)
    if group.pg is None:
        return Dealt(own, weights, [weights])
    on_host = a.ranks.on_host(a.replicas)
    assert on_host is not None
    told = comm.numbers([*weights, rows_of(batch)], on_host)
    first = sum(  # samples are numbered across all ranks; those of a sequence have the same
        int(count) for rank, (*_, count) in zip(group.ranks, told)
        if mesh.index(rank, a.row_axes) < mesh.index(a.ranks.rank, a.row_axes)
        and not any(mesh.coordinates(rank)[axis] for axis in a.context)
    )  # fmt: skip
    parts = [replace(part, rows=tuple(first + row for row in part.rows)) for part in own]
    return Dealt(parts, weights, [everyone for *everyone, _ in told])


def positive(total: float) -> float:
    """A weight to divide by: of what weighs nothing, 1."""
    return total if total > 0 else 1.0
