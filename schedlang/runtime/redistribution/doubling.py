"""Doubling: whole tensors for all ranks, in rounds of blocks of ranks that grow.

In a round each rank gets what its block, of twice as many ranks, holds and it does not: recursive
doubling, as Thakur, Rabenseifner and Gropp have it ("Optimization of Collective Communication
Operations in MPICH", 2005), of any layout.  What a rank holds only grows, so each element comes to
it once: in no more bytes than by one route, and in messages that grow as the world's logarithm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from schedlang.runtime.redistribution.route import Route, TensorLayout, kinds_of, route
from schedlang.runtime.redistribution.sharding import (
    NOWHERE,
    Array,
    Part,
    Parts,
    Sharding,
    distinct,
    everywhere,
)


def rounds_of(source: Mapping[Any, TensorLayout], sizes: Sequence[int]) -> tuple[Route, ...]:
    """Return the rounds by which all ranks of the world get all of some tensors.

    What ranks are given they put at its place in the whole, where their own parts are already: each
    round sends from there.  What no rank holds does not come.

    sizes   of the axes of the ranks' mesh, the slowest first: blocks are runs of ranks along them
    """
    known: dict[Any, list[Sharding]] = {}
    steps = {name: rounds(lying.sharding, sizes, known) for name, lying in source.items()}
    done = list[Route]()
    for k in range(max(map(len, steps.values()), default=1) - 1):
        some = [name for name, each in steps.items() if each[k] is not each[k + 1]]
        before, after = (
            {name: TensorLayout(steps[name][at], source[name].itemsize) for name in some}
            for at in (k, k + 1)
        )
        if some:
            done.append(route(kinds_of(before, after), math.prod(sizes), gaps=True))
    return tuple(done)


def rounds(
    sharding: Sharding, sizes: Sequence[int], known: dict[Any, list[Sharding]]
) -> list[Sharding]:
    """Spreads of what ranks hold before the first round and after each, at its place in the whole.

    A round in which what blocks hold are no parts that are disjoint or equal changes nothing; the
    last gives all of the tensor.
    """
    if sharding.key not in known:
        every = everywhere(sharding.shape, range(len(sharding.of)), len(sharding.of))
        total = sharding.sizes[sharding.copies > 0].sum()
        found, block = list[Sharding](), 1
        for factor in (1, *_factors(sizes)):
            block *= factor
            one = _of_blocks(sharding, block)
            apart = one.sizes.sum() == total
            more = apart and (not found or one.key != found[-1].key)
            found.append(one if more else found[-1])
        found[-1] = every if found[-1].key == every.key else found[-1]
        known[sharding.key] = [*found, every]
    return known[sharding.key]


def _factors(sizes: Sequence[int]) -> Iterator[int]:
    """The prime factors of all axes, of the quickest first."""
    for size in reversed(sizes):
        factor = 2
        while size > 1:
            while size % factor == 0:
                yield factor
                size //= factor
            factor += 1


def _of_blocks(sharding: Sharding, block: int) -> Sharding:
    """Each rank with all that its block of ranks holds, or the least part around that."""
    of = np.full(len(sharding.of), NOWHERE, np.int32)
    known: dict[tuple[int, ...], int] = {}
    for low in range(0, len(of), block):
        held = distinct(sharding.of[low : low + block])
        if some := tuple(held[held != NOWHERE].tolist()):
            of[low : low + block] = known.setdefault(some, len(known))
    parts = [_around(sharding.parts, list(some)) for some in known]
    return Sharding(sharding.shape, Parts.of(parts, len(sharding.shape)), of)


def _around(parts: Parts, some: list[int]) -> Part:
    """The least part around some, with each element at its place in the whole."""
    return tuple(
        _joined(rows[np.isin(rows[:, 0], numbers[some])])
        for numbers, rows in zip(parts.numbers.T, parts.cells)
    )


def _joined(rows: Array) -> tuple[tuple[int, int, int], ...]:
    """Cells of one dim, neighbours as one."""
    order = np.argsort(rows[:, 2], kind="stable")
    starts = rows[order, 2]
    ends = np.maximum.accumulate(starts + rows[order, 3])
    first = np.flatnonzero(np.concatenate([[True], starts[1:] > ends[:-1]])[: len(starts)])
    last = np.append(first[1:], len(starts))[: len(first)] - 1
    return tuple((s, s, e - s) for s, e in zip(starts[first].tolist(), ends[last].tolist()))
