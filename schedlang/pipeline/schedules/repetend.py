"""Repeating patterns: one microbatch laid out so that the next fits in a period later.

A repetend (Lin et al., Tessel, 2024) is the part of an order that repeats in the steady state. It
is found here as a modulo schedule: every operation of one microbatch gets a start, such that on
each rank no two of them overlap modulo the period; microbatch n starts n periods later. Warm-up and
cool-down are what remains of it at the ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from schedlang.pipeline.schedules.list_scheduling import Chain, F, I, W

OPTIONS = 4  # places that are tried for each operation


@dataclass(frozen=True)
class Repetend:
    """Starts [kind][stage] of one microbatch's operations, and the period, in ticks."""

    period: int
    starts: tuple[tuple[int, ...], ...]

    def start(self, kind: int, stage: int, microbatch: int) -> int:
        """Return the start of an operation, if every microbatch follows one period later."""
        return self.starts[kind][stage] + microbatch * self.period

    def rows(self, chain: Chain, micro: int) -> list[list[int]]:
        """The jobs of every rank, in the order of their starts."""
        rows: list[list[tuple[int, int]]] = [[] for _ in range(chain.ranks)]
        for kind in range(len(self.starts)):
            for stage, rank in enumerate(chain.homes):
                first = (kind * chain.stages + stage) * micro
                for microbatch in range(micro):
                    when = self.start(kind, stage, microbatch)
                    rows[rank].append((when, first + microbatch))
        return [[job for _, job in sorted(row)] for row in rows]


class _Draft(NamedTuple):
    """Some operations placed: per rank (phase, length) of each, and the starts, in placing order.

    `end` is when the last one's result is there; `held` the activations times the time for which
    each rank holds them, per period.
    """

    end: int
    held: tuple[float, ...]
    starts: tuple[tuple[int, int, int], ...]  # (kind, stage, start)
    taken: tuple[tuple[tuple[int, int], ...], ...]


def repetends(chain: Chain, period: int, limit: float | None, width: int) -> list[Repetend]:
    """Patterns with this period, the shortest microbatch first; `width` bounds the beam search.

    Times are whole numbers. Patterns that on average hold more than `limit` are left out.
    """
    work = [(F, stage) for stage in range(chain.stages)]
    work += [(I, stage) for stage in reversed(range(chain.stages))]
    empty: tuple[tuple[int, int], ...] = ()
    beam = [_Draft(0, (0.0,) * chain.ranks, (), (empty,) * chain.ranks)]
    for kind, stage in work:
        grown = [new for draft in beam for new in _place(chain, period, draft, kind, stage)]
        if limit is not None:
            grown = [new for new in grown if max(new.held) <= limit * period]
        grown.sort(key=lambda draft: (draft.end, max(draft.held), draft.starts))
        beam = grown[:width]
    return [_finished(chain, period, draft) for draft in beam]


def _place(chain: Chain, period: int, draft: _Draft, kind: int, stage: int) -> Iterator[_Draft]:
    """The draft with one operation more, and with the W of its rank where that was the last."""
    rank = chain.homes[stage]
    ready = draft.end
    before = stage - 1 if kind == F else stage + 1
    if 0 <= before < chain.stages and chain.homes[before] != rank:
        ready += int(chain.comm)
    length = int(chain.times[kind][stage])
    for start in _gaps(draft.taken[rank], ready, length, period)[:OPTIONS]:
        taken = list(draft.taken)
        taken[rank] = (*taken[rank], (start % period, length))
        starts = (*draft.starts, (kind, stage, start))
        end = start + length
        held = list(draft.held)
        if kind == I:
            first = next(at for k, s, at in draft.starts if (k, s) == (F, stage))
            held[rank] += float(chain.gains[F][stage]) * (start - first)
        new = _Draft(end, tuple(held), starts, tuple(taken))
        if kind == I and len(chain.times) == 3 and stage == chain.homes.index(rank):
            late = _weights(chain, period, new, rank)
            if late is not None:
                yield late
        else:
            yield new


def _weights(chain: Chain, period: int, draft: _Draft, rank: int) -> _Draft | None:
    """The draft with the weight gradients of a rank, each as early as it fits; None: one does
    not."""
    starts, held, taken = list(draft.starts), list(draft.held), list(draft.taken)
    for kind, stage, start in draft.starts:
        if kind != I or chain.homes[stage] != rank:
            continue
        length = int(chain.times[W][stage])
        ready = start + int(chain.times[I][stage])
        found = _gaps(taken[rank], ready, length, period)
        if not found:
            return None
        starts.append((W, stage, found[0]))
        taken[rank] = (*taken[rank], (found[0] % period, length))
        held[rank] -= float(chain.gains[W][stage]) * (found[0] - start)
    return _Draft(draft.end, tuple(held), tuple(starts), tuple(taken))


def _gaps(taken: tuple[tuple[int, int], ...], ready: int, length: int, period: int) -> list[int]:
    """Starts from `ready` on, within a period, at which an operation of this length fits.

    At once, right after another one, or right before one.
    """
    starts = {ready}
    for phase, other in taken:
        starts.add(ready + (phase + other - ready) % period)
        starts.add(ready + (phase - length - ready) % period)
    return sorted(
        start
        for start in starts
        if length <= period
        and all(
            (start - phase) % period >= other and (phase - start) % period >= length
            for phase, other in taken
            if other and length
        )
    )


def _finished(chain: Chain, period: int, draft: _Draft) -> Repetend:
    starts = [[0] * chain.stages for _ in chain.times]
    for kind, stage, start in draft.starts:
        starts[kind][stage] = start
    return Repetend(period, tuple(tuple(row) for row in starts))
