"""A pipeline's step as it ran, beside its timeline under the costs that were measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from schedlang.timeline import Kind, Timeline, Timing, timing
from schedlang.timeline.needs import WORK, dependencies

if TYPE_CHECKING:
    from schedlang.runtime.staging.watch import Ran

Floats = NDArray[np.float64]
WAITED = 2e-5  # seconds from which on an operation has waited for its inputs


@dataclass(frozen=True, eq=False)
class Measured:
    """One step: planned rows, and when each had its turn, started and ended, in seconds."""

    timeline: Timeline
    turn: Floats
    start: Floats
    end: Floats

    @cached_property
    def times(self) -> Timing:
        """What was measured, from the first operation of all ranks on."""
        zero = self.start.min(initial=np.inf) if len(self.start) else 0.0
        none = np.zeros(self.timeline.ranks, dtype=np.int64)
        return Timing(
            self.timeline, self.start - zero, self.end - zero, None, none, none.astype(np.float64)
        )

    @cached_property
    def costs(self) -> Floats:
        """For each row the mean time of its kind at its stage."""
        t, took = self.timeline, self.end - self.start
        key = (t.kind.astype(np.int64) * t.stages + t.stage) * t.replicas + t.replica
        count = np.maximum(np.bincount(key), 1)
        mean: Floats = (np.bincount(key, took) / count)[key]
        return mean

    @cached_property
    def transfer(self) -> float:
        """The median time between the end of a value's maker and its arrival, where one waited."""
        t = self.timeline
        made, used = dependencies(t)
        apart = t.rank[made] != t.rank[used]
        latest = np.full(len(t), -np.inf)
        np.maximum.at(latest, used[apart], self.end[made[apart]])
        waited = np.isfinite(latest) & (self.start - self.turn > WAITED) & (latest >= self.turn)
        return max(0.0, float(np.median((self.start - latest)[waited]))) if waited.any() else 0.0

    @cached_property
    def planned(self) -> Timing:
        """The same timeline, simulated with the means of what was measured."""
        return timing(self.timeline, self.costs, self.transfer)

    def means(self) -> dict[tuple[str, int], float]:
        """Mean seconds of each kind of operation at each stage."""
        t = self.timeline
        pairs = zip(t.kind.tolist(), t.stage.tolist(), self.costs.tolist())
        work = {(Kind(kind).name, stage): cost for kind, stage, cost in pairs if Kind(kind) in WORK}
        return dict(sorted(work.items(), key=lambda item: (Kind[item[0][0]], item[0][1])))

    def to_json(self) -> dict[str, Any]:
        """Figures, and the means that the simulated ones come from; seconds."""
        return {
            "micro": self.timeline.microbatches, "slices": self.timeline.slices,
            "measured": _figures(self.times), "simulated": _figures(self.planned),
            "transfer": self.transfer,
            "means": [
                {"kind": kind, "stage": stage, "seconds": cost}
                for (kind, stage), cost in self.means().items()
            ],
        }  # fmt: skip

    def text(self) -> str:
        """One line for people."""
        real, ideal = self.times, self.planned
        return (
            f"bubble {float(real.bubble):.1%} measured, {float(ideal.bubble):.1%} simulated   "
            f"step of the pipeline {float(real.makespan) * 1e3:.1f} ms measured, "
            f"{float(ideal.makespan) * 1e3:.1f} ms simulated"
        )


def _figures(times: Timing) -> dict[str, float]:
    return {
        "makespan": float(times.makespan), "rank_span": float(times.rank_span),
        "makespan_bubble": float(times.bubble), "bubble": float(times.span_bubble),
    }  # fmt: skip


def measured(timeline: Timeline, ran: Sequence[Sequence[Ran]]) -> Measured:
    """From what each place of a pipeline noted of one step, in the order of its rows.

    Rows that are not noted (parked activations, updates) stand where the row before them ended.
    """
    t = timeline.compute()
    turn, start, end = (np.zeros(len(t)) for _ in range(3))
    for rank in range(t.ranks):
        notes, last = list(ran[rank]), 0.0
        for row, op in zip(range(int(t.starts[rank]), int(t.starts[rank + 1])), t.rows(rank)):
            if notes and notes[0].op == op:
                _, turn[row], start[row], end[row] = notes.pop(0)
            else:
                assert op.kind not in (Kind.F, Kind.B, Kind.I, Kind.W), f"{op} was not noted"
                turn[row] = start[row] = end[row] = last
            last = end[row]
        assert not notes, f"{notes[0].op} was noted and not planned"
    return Measured(t, turn, start, end)


def settled(timeline: Timeline, steps: Sequence[Sequence[Sequence[Ran]]]) -> Measured:
    """The median step by its time, of several: [place][step]."""
    found = [measured(timeline, one) for one in zip(*steps)]
    return sorted(found, key=lambda one: float(one.times.makespan))[len(found) // 2]
