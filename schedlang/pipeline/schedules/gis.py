"""GIS and GIS-H, interleaved zero bubble: several stages on each rank, weight gradients put off."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

from schedlang.pipeline.schedules.interleaved import depth_first, rounds
from schedlang.pipeline.schedules.lay import laid, weave
from schedlang.pipeline.schedules.registry import Order, Problem, Size, times
from schedlang.pipeline.timeline import Timeline


def _gis(size: Size) -> Timeline:
    """Rounds of p through a rank's chunks; half the warm-up of 1F1B-I; W after r further I."""
    return _grouped(size, size.ranks)


def _gis_h(size: Size) -> Timeline:
    """Rounds of half as many: less is held, and ranks wait as a round comes by again."""
    return _grouped(size, _group(size))


def _grouped(size: Size, group: int) -> Timeline:
    sizes, rows = rounds(size.micro, group), []
    for rank in range(size.ranks):
        forward, backward = depth_first(rank, size, sizes)
        warmup = size.ranks - 1 - rank + (size.chunks - 1) * sizes[0]
        rows.append(weave(forward, backward, min(warmup, len(forward)), rank))
    return laid(rows, size.micro)


def _group(size: Size) -> int:
    """The largest round from p/2 to p that the memory allows; p/2 if none is given."""
    least = (size.ranks + 1) // 2
    if size.memory is None:
        return least
    fits = [g for g in range(least, size.ranks + 1) if _held(size, g) <= size.memory]
    return max(fits, default=least)


def _held(size: Size, group: int) -> Fraction:
    """min((v-1) g + p, v m) stage activations, of 1/v each; g the first round."""
    first = rounds(size.micro, group)[0]
    most = (size.chunks - 1) * first + size.ranks
    return Fraction(min(most, size.chunks * size.micro), size.chunks)


def _problem(size: Size) -> Problem | None:
    least = _held(size, _group(size))
    if size.memory is None or least <= size.memory:
        return None
    return f"a rank of GIS-H holds {float(least):.3g} microbatches", f"memory={ceil(least)}"


def _gis_idle(size: Size) -> Fraction | None:
    """(p-1) (F + I - min(F, W)) / v for m >= p; the paper bounds it by (p-1) (F + I) / v."""
    f, i, w = times(size)
    if size.micro < size.ranks and size.chunks > 1:
        return None
    slots = (size.ranks - 1) * (f + i) - (min(size.micro, size.ranks) - 1) * min(f, w)
    return slots / size.chunks


def _gis_h_idle(size: Size) -> Fraction | None:
    """For equal times, p - 1 slots, (p-g) (v-1) for the smaller rounds, 2p - 3g - 1 for g < 2p/3.

    A slot is F / v. There are several rounds, all of g.
    """
    f, i, w = times(size)
    p, g = size.ranks, _group(size)
    if not f == i == w or size.micro % g or size.micro == g or size.chunks == 1:
        return None
    slots = p - 1 + (p - g) * (size.chunks - 1) + max(0, 2 * p - 3 * g - 1)
    return slots * f / size.chunks


ORDERS = (
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
        alone=True,
        bubble=_gis_idle,
        peak=lambda size: _held(size, size.ranks),
    ),
    Order(
        "GIS-H",
        "Wan et al., PipeOffload, 2025 (2503.01328), §3; the round is chosen by `memory`",
        _gis_h,
        problem=_problem,
        chunks=None,
        default_chunks=2,
        bubble=_gis_h_idle,
        peak=lambda size: _held(size, _group(size)),
    ),
)
