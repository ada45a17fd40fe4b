"""The batch of one step: dealt to ranks, and compared among them before the step runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir import pytree
from schedlang.runtime.assembly import Assembly
from schedlang.runtime.batch import Batch, Part, named_tensors, rows_of, split
from schedlang.runtime.comm import world
from schedlang.runtime.comm.agreement import Item, checksum, differences
from schedlang.runtime.comm.collectives import all_gather
from schedlang.runtime.device import has_float64
from schedlang.runtime.weights import Number, added, filled, instead, known

# ---- A batch of a whole step dealt to ranks: the microbatches of this one, and what all weigh.


@dataclass(frozen=True)
class Dealt:
    """This rank's microbatches and their weights, those of the whole batch, and of everyone.

    everyone  of each replica, the weight of each of its microbatches
    even      tells whether the parts of all ranks have the same shapes
    """

    parts: Sequence[Part]
    weights: Sequence[Number]
    everyone: Sequence[Sequence[Number]]
    even: Callable[[], bool]

    @cached_property
    def all(self) -> Number:
        """The weight of all parts together."""
        return added([one for weights in self.everyone for one in weights])

    @property
    def total(self) -> Number:
        """The weight of the whole batch; where nothing weighs anything all parts weigh 1."""
        return instead(self.all, float(sum(map(len, self.everyone))))


def dealt(a: Assembly, batch: Batch, local: bool, whole: bool = False) -> Dealt:
    """Return this rank's part of a batch: of the whole batch, or (`local`) of its own rows.

    `whole`: all ranks of a sequence get all its tokens.
    Raises Refusal S618 where `local` is neither true nor false: a word of a configuration is not.
    """
    if not isinstance(local, bool):
        raise Refusal.of(
            "S618",
            f"`local` is {local!r}",
            helps=("give True where each rank has rows of its own, else False",),
        )
    mine = _of_rows(a, batch) if local else _of_all(a, batch, whole)
    # where nothing weighs anything: the model's own loss of nothing (NaN, or 0) in every layout
    weight = mine.all
    if not isinstance(weight, Tensor) and weight > 0:
        return mine
    return replace(mine, weights=[instead(one, 1.0, weight) for one in mine.weights])


def _of_all(a: Assembly, batch: Batch, whole: bool) -> Dealt:
    shares, replicas, place = a.parts
    alone = replicas * a.micro == 1 and a.tokens is None and pytree.flat(batch)
    if alone and (count := rows_of(batch)):  # as it is, and weighed against nothing
        return Dealt([Part({**batch}, tuple(range(count)))], [1.0], [[1.0]], _alike)
    weigh: list[list[Number]]
    known = a.dealings if a.tokens is None else None
    if known is not None and (key := (id(batch), replicas)) in known:
        _, everyone, weigh, even = known[key]
        return Dealt(everyone[place], weigh[place], weigh, even)
    everyone = split(batch, shares, a.micro)
    if a.tokens is not None:
        copies = a.tokens.ranks
        everyone = [
            parts
            for share in everyone
            for parts in ([share] * copies if whole else a.by_tokens(share))
        ]
    if replicas * a.micro == 1 or (known is None and a.unweighed):
        weigh = [[1.0] * len(parts) for parts in everyone]
    else:
        weights = iter(a.weigh_all([part for parts in everyone for part in parts]))
        weigh = [[next(weights) for _ in parts] for parts in everyone]
    even = cache(lambda: len({_shapes(parts) for parts in everyone}) == 1)
    if known is not None:  # with the batch, so that no other gets its identity
        known[id(batch), replicas] = batch, everyone, weigh, even
    return Dealt(everyone[place], weigh[place], weigh, even)


def _alike() -> bool:
    return True


def _of_rows(a: Assembly, batch: Batch) -> Dealt:
    mesh = a.ranks.mesh
    (rows,) = split(batch, 1, a.micro)
    own = a.by_tokens(rows)[mesh.index(a.ranks.rank, a.context)]
    weights = a.weigh_all(own)
    group = a.ranks.group(a.replicas)
    if group.pg is None:
        return Dealt(own, weights, [weights], lambda: True)
    on_host = a.ranks.on_host(a.replicas)
    assert on_host is not None
    # what lies on the device is told there; whether any rank's does, and rows, by the host
    own_known = known(weights)
    said = weights if own_known else [0.0] * len(weights)
    shapes = crc32(repr(_shapes(own)).encode())
    told = world.all_gather_numbers(
        [*map(float, said), not own_known, shapes, rows_of(batch)], on_host
    )
    everyone: Sequence[Sequence[Number]] = [row[:-3] for row in told]
    if any(there for *_, there, _, _ in told):
        everyone = _of_device(a, weights)
        weights = list(everyone[group.rank])
    first = sum(  # samples are numbered across all ranks; those of a sequence have the same
        int(count)
        for rank, (*_, count) in zip(group.ranks, told)
        if mesh.index(rank, a.row_axes) < mesh.index(a.ranks.rank, a.row_axes)
        and not any(mesh.coordinates(rank)[axis] for axis in a.context)
    )
    parts = [replace(part, rows=tuple(first + row for row in part.rows)) for part in own]
    return Dealt(parts, weights, everyone, lambda: len({shape for *_, shape, _ in told}) == 1)


def _shapes(parts: Sequence[Part]) -> tuple[object, ...]:
    """The shapes of all that a rank is given."""
    return tuple(
        (name, value.dtype, *value.shape)
        for part in parts
        for name, value in named_tensors(part.inputs).items()
    )


def _of_device(a: Assembly, weights: Sequence[Number]) -> list[list[Tensor]]:
    """Gather the weights of each rank's parts, from device to device."""
    device = a.ranks.device
    kind = torch.float64 if has_float64(device) else torch.float32
    like = torch.empty((), dtype=kind, device=device)
    mine = torch.stack([filled(like, one) for one in weights])
    told = all_gather(mine, 0, a.ranks.group(a.replicas))
    return [list(row.unbind()) for row in told.view(-1, len(weights))]


# ---- The batch of a step and the optimizer's settings, compared among ranks before the step
# runs.


_HELPS = (
    "pass the same full batch on every rank: use the same seed for samplers and shuffling",
    "or, if each rank has its own rows, write `train_step(batch, local=True)`",
)


@dataclass(frozen=True)
class Comparing:
    """Raises the same Refusal (S652) on all ranks where their steps would differ.

    `settings` gives the optimizer's, which a scheduler may have changed; `every` step is compared,
    or the first and the first evaluation: samplers that are seeded by rank differ there.
    """

    settings: Callable[[], list[Item]]
    every: bool
    _done: set[bool] = field(default_factory=set)  # whether of steps, of evaluations

    def check(self, a: Assembly, batch: Batch, local: bool, step: int | None) -> None:
        """One small collective, of digests; under `local` ranks of the same rows are compared.

        step: None: an evaluation
        """
        if not self.every:
            if (step is None) in self._done:
                return
            self._done.add(step is None)
            if not local and _same_for_all(a, batch):
                return
        kinds = Item("batch", {name: _kind(value) for name, value in batch.items()}, helps=_HELPS)
        values = Item(
            "batch",
            {name: _value(value) for name, value in batch.items()},
            shown=False,
            helps=_HELPS,
        )
        (settings,) = self.settings()
        shapes = {} if local else {name: _shape(value) for name, value in batch.items()}
        rows = a.ranks.mesh.index(a.ranks.rank, a.replicas) if local else 0
        parts = [dict(kinds.parts), shapes, dict(values.parts), dict(settings.parts)]
        everyone = world.all_gather_object((rows, parts))
        items = (kinds, Item("batch", shapes, helps=_HELPS), values, settings)
        for place, item in enumerate(items):
            for ranks in _compared(everyone, apart=item is values):
                _check(item, {rank: everyone[rank][1][place] for rank in ranks}, step)


def _same_for_all(a: Assembly, batch: Batch) -> bool:
    """Return, on all ranks the same, whether all were given the same batch.

    Where a number and its square are on average what they are here, they are that everywhere; of 20
    bits the sums are exact.
    """
    own = crc32(repr([(name, _value(value)) for name, value in batch.items()]).encode()) >> 12
    found = torch.tensor([own, own**2], dtype=torch.float64, device=a.ranks.device)
    world.all_reduce(found, a.ranks.world.group)
    return found.tolist() == [a.ranks.mesh.world * own, a.ranks.mesh.world * own**2]


def _compared(everyone: list[tuple[int, Any]], apart: bool) -> list[list[int]]:
    """All ranks, or those that were given the same rows."""
    rows: dict[int, list[int]] = {}
    for rank, (own, _) in enumerate(everyone):
        rows.setdefault(own if apart else 0, []).append(rank)
    return list(rows.values())


def _check(item: Item, said: Mapping[int, Mapping[str, str]], step: int | None) -> None:
    title, notes = differences(item, said)
    if notes:
        when = "an evaluation" if step is None else f"step {step}"
        raise Refusal.of("S652", f"{title} in {when}", notes=tuple(notes), helps=item.helps)


def _kind(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} in {value.dim()} dims"


def _shape(value: object) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else ""


def _value(value: object) -> str:
    if isinstance(value, Tensor):
        return checksum(value)
    return repr(value) if isinstance(value, bool | int | float | str) else ""
