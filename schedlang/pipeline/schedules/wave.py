"""Hanayo: stages in zig-zag waves over the ranks, run one forward one backward as they come."""

from __future__ import annotations

from schedlang.pipeline.schedules.chain import Chain
from schedlang.pipeline.schedules.registry import Order, Problem, Size
from schedlang.pipeline.timeline import Timeline

FORWARD, BACKWARD = 1, 2  # the paper draws a backward twice as long as a forward


def home(stage: int, ranks: int) -> int:
    """The rank of a stage in a zig-zag: 0, 1, .. p-1, p-1, .. 1, 0, 0, 1, .."""
    turn = stage % (2 * ranks)
    return min(turn, 2 * ranks - 1 - turn)


def _hanayo(size: Size) -> Timeline:
    """Each rank, when free, takes a backward if one has arrived, else a forward, oldest first.

    Times are those of the paper's drawings (B = 2F, transfers free). `memory` bounds the
    microbatches in flight; without it up to 2p - 1 of them come to be when there are many.
    """
    stages = size.ranks * size.chunks
    homes = tuple(home(stage, size.ranks) for stage in range(stages))
    times = ((FORWARD,) * stages, (BACKWARD,) * stages)
    chain = Chain(size.ranks, homes, times, ((1,) * stages, (-1,) * stages))
    made = chain.listed(
        size.micro,
        lambda kind, stage, microbatch: (1 - kind) * size.micro + microbatch,
        in_flight=None if size.memory is None else int(size.memory),
    )
    assert made is not None, "nothing but its own inputs holds a microbatch up"
    return made


def _problem(size: Size) -> Problem | None:
    if size.chunks % 2:
        return (
            f"a wave goes forth and back: {size.chunks} stages per rank end on the way",
            f"chunks={size.chunks - 1} or chunks={size.chunks + 1}",
        )
    if size.memory is not None and size.memory < 1:
        return "a rank holds one microbatch at least", "memory=1"
    return None


ORDERS = (
    Order(
        "Hanayo",
        "Liu et al., Hanayo, 2023 (2308.15762), §3; W waves are 2W chunks",
        _hanayo,
        aliases=("Wave",),
        problem=_problem,
        chunks=None,
        default_chunks=2,
    ),
)
