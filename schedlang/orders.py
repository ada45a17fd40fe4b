"""Orders of a pipeline's operations: one short generator each, with its paper and closed form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from schedlang.timeline import Column, Kind, Timeline, chain

Ints = NDArray[np.int64]


class OrderError(ValueError):
    """An order that does not exist for these sizes: why, and what would be legal."""

    def __init__(self, reason: str, legal: str) -> None:
        super().__init__(f"{reason}; {legal}")
        self.reason, self.legal = reason, legal


@dataclass(frozen=True)
class Order:
    """A named order. `rows(rank, ranks, micro, chunks)` gives forwards, backwards and warm-up.

    `bubble(ranks, micro, chunks)` is the closed form of the idle share at unit cost (F=1, B=2);
    `peak(ranks, micro, chunks)` the largest number of live (stage, microbatch) activations.
    """

    name: str
    aliases: tuple[str, ...]
    rows: Callable[[int, int, int, int], tuple[Ints, Ints, int]]
    problem: Callable[[int, int, int], tuple[str, str] | None]
    bubble: Callable[[int, int, int], float]
    peak: Callable[[int, int, int], int]


def order(name: str, ranks: int, micro: int, chunks: int = 1) -> Timeline:
    """The compute operations of every rank under a named order.

    `name` in any case, torch's class names included; `micro` microbatches, `chunks` stages per
    rank, stage s on rank s modulo ranks. Raises OrderError for sizes that the order does not have.
    """
    found = find(name)
    if ranks < 1 or micro < 1 or chunks < 1:
        raise OrderError(
            f"a pipeline of {ranks} ranks, {micro} microbatches and {chunks} chunks is empty",
            "each of them is at least 1",
        )
    problem = found.problem(ranks, micro, chunks)
    if problem is not None:
        raise OrderError(*problem)
    parts = [_merge(*found.rows(rank, ranks, micro, chunks)) for rank in range(ranks)]
    kind, unit = (np.concatenate([part[k] for part in parts]) for k in (0, 1))
    rank = np.repeat(np.arange(ranks), 2 * micro * chunks)
    none = np.zeros_like(rank, dtype=np.int32)
    stage, microbatch = (x.astype(np.int32) for x in np.divmod(unit, micro))
    return Timeline(
        rank.astype(np.int32),
        kind,
        stage,
        none,
        microbatch,
        none,
        none,
        none - 1,
        ranks=ranks,
        edges=chain(ranks * chunks),
    )


def find(name: str) -> Order:
    """The order of this name or alias, in any case."""
    for known in ORDERS:
        if name.lower() in (known.name.lower(), *(a.lower() for a in known.aliases)):
            return known
    raise OrderError(f"there is no order `{name}`", "orders: " + ", ".join(o.name for o in ORDERS))


def _merge(forward: Ints, backward: Ints, warmup: int) -> tuple[Column, Ints]:
    """`warmup` forwards, then one forward and one backward in turn, then the other backwards."""
    total = len(forward)
    k = np.arange(total)
    place_f = np.where(k < warmup, k, 2 * k - warmup)
    place_b = np.where(k < total - warmup, warmup + 2 * k + 1, total + k)
    kind, unit = np.empty(2 * total, np.int32), np.empty(2 * total, np.int64)
    kind[place_f], unit[place_f] = Kind.F, forward
    kind[place_b], unit[place_b] = Kind.B, backward
    return kind, unit


# operations are numbered stage * micro + microbatch below


def _gpipe(rank: int, ranks: int, micro: int, chunks: int) -> tuple[Ints, Ints, int]:
    """All forwards, then all backwards. Huang et al., GPipe, 2019 (1811.06965).

    bubble (p-1)/(m+p-1); live activations m. Backwards run first in, first out.
    """
    units = rank * micro + np.arange(micro)
    return units, units, micro


def _one_f_one_b(rank: int, ranks: int, micro: int, chunks: int) -> tuple[Ints, Ints, int]:
    """Backward as soon as possible. PipeDream-flush, Narayanan et al. 2021 (2006.09503); DAPPLE.

    bubble (p-1)/(m+p-1); live activations min(p-r, m) on rank r.
    """
    units = rank * micro + np.arange(micro)
    return units, units, min(ranks - 1 - rank, micro)


def _interleaved(rank: int, ranks: int, micro: int, chunks: int) -> tuple[Ints, Ints, int]:
    """1F1B over several chunks per rank, depth first. Narayanan et al. 2021 (2104.04473), §2.2.

    bubble (p-1)/(v m + p-1); live activations min(2(p-1-r) + (v-1)p + 1, v m) of 1/v rank each.
    Microbatches go through the chunks in groups of p (of m // (m // p) where p does not divide m).
    """
    group = micro // max(1, micro // ranks)
    k = np.arange(micro * chunks)
    chunk = (k // group) % chunks
    microbatch = (k // (group * chunks)) * group + k % group
    forward = (chunk * ranks + rank) * micro + microbatch
    backward = ((chunks - 1 - chunk) * ranks + rank) * micro + microbatch
    warmup = min(2 * (ranks - 1 - rank) + (chunks - 1) * group, micro * chunks)
    return forward, backward, warmup


def _one_chunk(ranks: int, micro: int, chunks: int) -> tuple[str, str] | None:
    if chunks == 1:
        return None
    return (
        f"this order runs one stage per rank, not {chunks}",
        f'chunks=1, or order="Interleaved1F1B", chunks={chunks}',
    )


def _rounds(ranks: int, micro: int, chunks: int) -> tuple[str, str] | None:
    if chunks == 1:
        return "Interleaved1F1B needs several stages per rank", 'chunks=2, or order="1F1B"'
    rounds = max(1, micro // ranks)
    if micro % rounds == 0:
        return None
    lower, upper = (micro // ranks) * ranks, (micro // ranks + 1) * ranks
    return (
        f"{micro} microbatches do not split into {rounds} equal groups for {ranks} ranks",
        f"micro={lower} or micro={upper}",
    )


def _idle(ranks: int, micro: int, chunks: int) -> float:
    return (ranks - 1) / (chunks * micro + ranks - 1)


ORDERS: tuple[Order, ...] = (
    Order("GPipe", ("ScheduleGPipe",), _gpipe, _one_chunk, _idle, lambda p, m, v: m),
    Order("1F1B", ("Schedule1F1B",), _one_f_one_b, _one_chunk, _idle, lambda p, m, v: min(p, m)),
    Order(
        "Interleaved1F1B",
        ("ScheduleInterleaved1F1B",),
        _interleaved,
        _rounds,
        _idle,
        lambda p, m, v: min(2 * (p - 1) + (v - 1) * (m // max(1, m // p)) + 1, v * m),
    ),
)
