"""Orders with several stages on each rank: interleaved 1F1B, breadth first, interleaved ZB,
waves."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import numpy as np

from schedlang.pipeline.cost import Number
from schedlang.pipeline.schedules.list_scheduling import StageChain
from schedlang.pipeline.schedules.registry import (
    Ints,
    Order,
    Size,
    SizeProblem,
    exact_times,
    merge_backwards,
    merge_split_backwards,
    timeline_of_units,
)
from schedlang.pipeline.timeline.table import Timeline


def _interleaved(size: Size) -> Timeline:
    """Each rank runs a round of p microbatches through its chunks in turn, as in torch.

    If m > p and p does not divide m, rounds are larger than p, and as equal as possible.
    """
    sizes, rows = split_rounds(size.micro, size.ranks), []
    for rank in range(size.ranks):
        forward, backward = depth_first_units(rank, size, sizes)
        warmup = 2 * (size.ranks - 1 - rank) + (size.chunks - 1) * sizes[0]
        rows.append(merge_backwards(forward, backward, warmup))
    return timeline_of_units(rows, size.micro)


def split_rounds(micro: int, group: int) -> list[int]:
    """Split microbatches into rounds of at least `group`, as equal as possible, larger ones first.

    With smaller rounds first or last, ranks would wait for each other forever.
    """
    count = max(1, micro // group)
    size, extra = divmod(micro, count)
    return [size + 1] * extra + [size] * (count - extra)


def depth_first_units(rank: int, size: Size, sizes: list[int]) -> tuple[Ints, Ints]:
    """Return the units of a rank's forwards and backwards: each round through one chunk after
    another."""
    turn = np.repeat(np.arange(len(sizes)), sizes) * size.chunks
    order = np.argsort((turn + np.arange(size.chunks)[:, None]).ravel(), kind="stable")
    chunk, microbatch = np.divmod(order, size.micro)
    stages = chunk * size.ranks + rank, (size.chunks - 1 - chunk) * size.ranks + rank
    return stages[0] * size.micro + microbatch, stages[1] * size.micro + microbatch


def idle_time(size: Size) -> Fraction:
    """(p-1) (F + I + W) / v; if m < p, a rank waits p - m more turns for each further chunk."""
    turns = size.ranks - 1 + (size.chunks - 1) * max(0, size.ranks - size.micro)
    return turns * sum(exact_times(size), Fraction(0)) / size.chunks


def paper_span(span: Number, size: Size) -> Number:
    """Return the cost of 1F1B-I as Zero Bubble's Table 5 counts it: p transfers less.

    `span` is the simulated rank span.
    """
    return span - size.ranks * size.cost.comm


def _peak(size: Size) -> Fraction:
    """min(2(p-1) + (v-1) g + 1, v m) / v microbatches on rank 0; g is the first round's size."""
    units = 2 * (size.ranks - 1) + (size.chunks - 1) * split_rounds(size.micro, size.ranks)[0] + 1
    return Fraction(min(units, size.chunks * size.micro), size.chunks)


INTERLEAVED_ORDERS = (
    Order(
        "Interleaved1F1B",
        "Narayanan et al. 2021 (2104.04473), §2.2",
        _interleaved,
        aliases=("ScheduleInterleaved1F1B", "1F1B-I", "Interleaved"),
        chunks=None,
        default_chunks=2,
        bubble=idle_time,
        peak=_peak,
    ),
)


def _breadth_first(size: Size) -> Timeline:
    """All forwards, stage by stage, then all backwards in exactly the reverse order."""
    rows = []
    for rank in range(size.ranks):
        stages = np.arange(size.chunks) * size.ranks + rank
        units = (stages[:, None] * size.micro + np.arange(size.micro)).ravel()
        rows.append(merge_backwards(units, units[::-1], len(units)))
    return timeline_of_units(rows, size.micro)


BREADTH_FIRST_ORDERS = (
    Order(
        "BFS",
        "Lamy-Poirier, Breadth-First Pipeline Parallelism, 2022 (2211.05953)",
        _breadth_first,
        aliases=("LoopedBFS", "ScheduleLoopedBFS", "Breadth-First"),
        chunks=None,
        default_chunks=2,
        bubble=idle_time,
        peak=lambda size: Fraction(size.micro),
    ),
)


def _gis(size: Size) -> Timeline:
    """Rounds of p as in 1F1B-I, with p - 1 - r fewer warm-up forwards; W after the next r I."""
    return _grouped(size, size.ranks)


def _gis_h(size: Size) -> Timeline:
    """GIS with rounds of p/2, or more if `memory` allows: less memory, but more idle time."""
    return _grouped(size, _group(size))


def _grouped(size: Size, group: int) -> Timeline:
    sizes, rows = split_rounds(size.micro, group), []
    for rank in range(size.ranks):
        forward, backward = depth_first_units(rank, size, sizes)
        warmup = size.ranks - 1 - rank + (size.chunks - 1) * sizes[0]
        rows.append(merge_split_backwards(forward, backward, warmup, rank))
    return timeline_of_units(rows, size.micro)


def _group(size: Size) -> int:
    """Return the largest round from p/2 to p that the memory allows; p/2 if no limit is given."""
    smallest = (size.ranks + 1) // 2
    if size.memory is None:
        return smallest
    rounds = [g for g in range(smallest, size.ranks + 1) if _held(size, g) <= size.memory]
    return max(rounds, default=smallest)


def _held(size: Size, group: int) -> Fraction:
    """min((v-1) g + p, v m) stage activations, of 1/v each; g the first round."""
    first = split_rounds(size.micro, group)[0]
    count = (size.chunks - 1) * first + size.ranks
    return Fraction(min(count, size.chunks * size.micro), size.chunks)


def _too_little(size: Size) -> SizeProblem | None:
    needed = _held(size, _group(size))
    if size.memory is None or needed <= size.memory:
        return None
    return f"a rank of GIS-H holds {float(needed):.3g} microbatches", f"memory={ceil(needed)}"


def _gis_idle(size: Size) -> Fraction | None:
    """(p-1) (F + I - min(F, W)) / v for m >= p; the bound in the paper is (p-1) (F + I) / v."""
    f, i, w = exact_times(size)
    if size.micro < size.ranks and size.chunks > 1:
        return None
    slots = (size.ranks - 1) * (f + i) - (min(size.micro, size.ranks) - 1) * min(f, w)
    return slots / size.chunks


def _gis_h_idle(size: Size) -> Fraction | None:
    """(p - 1 + (p-g) (v-1) + max(0, 2p - 3g - 1)) F / v if F = I = W, for several rounds of g.

    A slot is F / v.
    """
    f, i, w = exact_times(size)
    p, g = size.ranks, _group(size)
    if not f == i == w or size.micro % g or size.micro == g or size.chunks == 1:
        return None
    slots = p - 1 + (p - g) * (size.chunks - 1) + max(0, 2 * p - 3 * g - 1)
    return slots * f / size.chunks


GROUPED_ORDERS = (
    Order(
        "GIS",
        "Wan et al., PipeOffload, 2025 (2503.01328), §3; PyTorch's ScheduleInterleavedZeroBubble",
        _gis,
        aliases=(
            "InterleavedZeroBubble",
            "ScheduleInterleavedZeroBubble",
            "Interleaved-ZB",
            "ZB-I",
        ),
        chunks=None,
        default_chunks=2,
        allows_one_stage=True,
        bubble=_gis_idle,
        peak=lambda size: _held(size, size.ranks),
    ),
    Order(
        "GIS-H",
        "Wan et al., PipeOffload, 2025 (2503.01328), §3; `memory` chooses the round",
        _gis_h,
        problem=_too_little,
        chunks=None,
        default_chunks=2,
        bubble=_gis_h_idle,
        peak=lambda size: _held(size, _group(size)),
    ),
)


FORWARD, BACKWARD = 1, 2  # durations in the paper's drawings


def zigzag_rank(stage: int, ranks: int) -> int:
    """Return the rank of a stage in a zig-zag: 0, 1, .. p-1, p-1, .. 1, 0, 0, 1, .."""
    phase = stage % (2 * ranks)
    return min(phase, 2 * ranks - 1 - phase)


def _hanayo(size: Size) -> Timeline:
    """A free rank takes a backward if one has arrived, otherwise a forward, the oldest first.

    Times are those of the paper's drawings (B = 2F, free transfers). `memory` limits the
    microbatches in flight. Without it, up to 2p - 1 are in flight if there are many.
    """
    stages = size.ranks * size.chunks
    homes = tuple(zigzag_rank(stage, size.ranks) for stage in range(stages))
    times = ((FORWARD,) * stages, (BACKWARD,) * stages)
    chain = StageChain(size.ranks, homes, times, ((1,) * stages, (-1,) * stages))
    timeline = chain.list_schedule(
        size.micro,
        lambda kind, stage, microbatch: (1 - kind) * size.micro + microbatch,
        in_flight=None if size.memory is None else int(size.memory),
    )
    assert timeline is not None, "nothing but its own inputs holds a microbatch up"
    return timeline


def _half_a_wave(size: Size) -> SizeProblem | None:
    if size.chunks % 2:
        return (
            f"a wave goes forth and back: {size.chunks} stages per rank end on the way",
            f"chunks={size.chunks - 1} or chunks={size.chunks + 1}",
        )
    if size.memory is not None and size.memory < 1:
        return "a rank holds one microbatch at least", "memory=1"
    return None


WAVE_ORDERS = (
    Order(
        "Hanayo",
        "Liu et al., Hanayo, 2023 (2308.15762), §3; W waves are 2W chunks",
        _hanayo,
        aliases=("Wave",),
        problem=_half_a_wave,
        chunks=None,
        default_chunks=2,
    ),
)
