"""A chain of stages on ranks, with times: what list scheduling and searches lay out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from schedlang.pipeline.cost import Number
from schedlang.pipeline.schedules.greedy import Jobs, listed
from schedlang.pipeline.schedules.lay import lay
from schedlang.pipeline.timeline import Kind, Timeline

F, I, W = range(3)  # noqa: E741  (the literature's letter for the input gradient)
Urgency = Callable[[int, int, int], Number]  # of (kind, stage, microbatch); the smallest first


@dataclass(frozen=True)
class Chain:
    """Stages and where they are, and what their operations take and hold.

    homes   the rank of every stage
    times   [kind][stage]; kinds are F and B, or F, I and W
    gains   [kind][stage]: activations made, in microbatches of one rank's share; freed: negative
    comm    delay from one rank to another
    """

    ranks: int
    homes: tuple[int, ...]
    times: tuple[tuple[Number, ...], ...]
    gains: tuple[tuple[Number, ...], ...]
    comm: Number = 0

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.homes)

    def listed(
        self,
        micro: int,
        urgency: Urgency,
        *,
        in_flight: int | None = None,
        limit: Number | None = None,
    ) -> Timeline | None:
        """The order of list scheduling, None if it gets stuck under the limit.

        in_flight   how many microbatches may be between their first F and the end of their last
                    backward at once
        limit       the most activations that a rank may hold
        """
        every = [
            (kind, stage, microbatch)
            for kind in range(len(self.times))
            for stage in range(self.stages)
            for microbatch in range(micro)
        ]
        jobs = Jobs(
            [self.homes[s] for _, s, _ in every],
            [self.times[k][s] for k, s, _ in every],
            [urgency(*one) for one in every],
            [self._needs(micro, in_flight, *one) for one in every],
            [self.gains[k][s] for k, s, _ in every],
            self.comm,
        )
        rows = listed(jobs, self.ranks, None if limit is None else [limit] * self.ranks)
        return None if rows is None else self.timeline(rows, micro)

    def timeline(self, rows: Sequence[Sequence[int]], micro: int) -> Timeline:
        """The timeline of rows of jobs (kind * stages + stage) * micro + microbatch."""
        split = len(self.times) == 3
        names = np.array([Kind.F, Kind.I, Kind.W] if split else [Kind.F, Kind.B], np.int32)
        parts = [np.divmod(np.array(row, np.int64), self.stages * micro) for row in rows]
        return lay([names[kind] for kind, _ in parts], [unit for _, unit in parts], micro)

    def _needs(
        self, micro: int, in_flight: int | None, kind: int, stage: int, microbatch: int
    ) -> list[int]:
        def number(kind: int, stage: int, microbatch: int) -> int:
            return (kind * self.stages + stage) * micro + microbatch

        if kind == W:
            return [number(I, stage, microbatch)]
        found = [number(F, stage, microbatch)] if kind == I else []
        before = stage - 1 if kind == F else stage + 1
        if 0 <= before < self.stages:
            found.append(number(kind, before, microbatch))
        if kind == F and stage == 0 and in_flight is not None and microbatch >= in_flight:
            found.append(number(I, 0, microbatch - in_flight))
        return found
