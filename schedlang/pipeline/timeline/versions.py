"""Versions of weights in a timeline: the update of each microbatch, and the versions to keep."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from schedlang.pipeline.timeline.table import Column, Kind, Rows, Timeline, TimelineError

BACKWARD_KINDS = (Kind.B, Kind.I, Kind.W)
READING_KINDS = (Kind.F, *BACKWARD_KINDS)


def update_versions(timeline: Timeline) -> Column:
    """Return the version that each microbatch's gradients make, the same on every stage (from 1).

    Raises TimelineError as `check_versions` does.
    """
    check_versions(timeline)
    found: Column = np.ones(timeline.microbatches, dtype=np.int32)
    for stage in _stages(timeline):
        found[stage.microbatch[stage.back]] = stage.newest[stage.back] + 1
    return found


def check_versions(timeline: Timeline) -> None:
    """Raise TimelineError unless every version that is read has been made, and can be kept.

    Updates of a stage are numbered from 1 in the order of its rows, each sums at least one
    microbatch, none is left over, and each microbatch goes into the same update on every stage. A
    backward reads the version that its forward read, which is kept for it, unless the whole stage
    keeps nothing: then all its rows read the newest weights. A step of synchronous gradients (no
    STEP rows) has version 0 everywhere.
    """
    if not timeline.stale:
        return
    groups: dict[int, tuple[int, int]] = {}
    for stage in _stages(timeline):
        stage.check()
        for microbatch, made in zip(stage.microbatch[stage.back], stage.newest[stage.back] + 1):
            known = groups.setdefault(int(microbatch), (int(made), stage.index))
            if known[0] != made:
                raise TimelineError(
                    f"microbatch {microbatch} goes into update {known[0]} of stage {known[1]} and"
                    f" into update {made} of stage {stage.index}: the same on all stages"
                )


def weight_copies(timeline: Timeline) -> NDArray[np.int64]:
    """Return the most versions of its weights that each stage holds at a time; 1 where none is
    kept."""
    most = np.ones(timeline.stages, dtype=np.int64)
    for stage in _stages(timeline):
        most[stage.index] = stage.copies()
    return most


@dataclass(frozen=True)
class _Stage:
    """The rows of one stage that read or make versions, in their order.

    `newest` is the last version made before each row.
    """

    index: int
    kind: Column
    microbatch: Column
    version: Column
    newest: Rows

    @property
    def back(self) -> NDArray[np.bool_]:
        return np.isin(self.kind, BACKWARD_KINDS)

    def check(self) -> None:
        steps = self.kind == Kind.STEP
        made = self.version[steps]
        if not np.array_equal(made, np.arange(1, len(made) + 1)):
            self.refuse(f"makes the versions {made.tolist()}, not 1, 2, .. in this order")
        if self.back.any() and (not steps.any() or self.newest[self.back].max() == len(made)):
            self.refuse("has a backward that no update follows")
        if len(np.unique(self.newest[self.back])) != len(made):
            self.refuse("has an update without a backward before it")
        ahead = ~steps & ((self.version > self.newest) | (self.version < 0))
        if ahead.any():
            at = int(np.argmax(ahead))
            self.refuse(
                f"reads version {self.version[at]} for microbatch {self.microbatch[at]}, when"
                f" version {self.newest[at]} is the newest"
            )
        self.check_kept(~steps)

    def check_kept(self, reads: NDArray[np.bool_]) -> None:
        forward = np.flatnonzero(self.kind == Kind.F)
        of = np.zeros(int(self.microbatch.max(initial=0)) + 1, dtype=np.int32)
        of[self.microbatch[forward]] = self.version[forward]
        moved = self.back & (self.version != of[self.microbatch])
        late = reads & (self.version != self.newest)
        if moved.any() and late.any():
            at = int(np.argmax(moved))
            self.refuse(
                f"reads version {self.version[at]} in a backward of microbatch"
                f" {self.microbatch[at]} and another one in its forward: that is for stages all of"
                " whose rows read the newest weights"
            )

    def refuse(self, what: str) -> None:
        raise TimelineError(f"stage {self.index} {what}")

    def copies(self) -> int:
        steps = np.flatnonzero(self.kind == Kind.STEP)
        rows = len(self.kind)
        born = np.concatenate([[0], steps])
        dies = np.concatenate([steps, [rows]])  # the newest version is always held
        reads = self.kind != Kind.STEP
        np.maximum.at(dies, self.version[reads], np.flatnonzero(reads))
        held = np.zeros(rows + 2, dtype=np.int64)
        np.add.at(held, born, 1)
        np.add.at(held, dies, -1)
        return int(np.cumsum(held).max(initial=1))


def _stages(timeline: Timeline) -> Iterator[_Stage]:
    rows = np.flatnonzero(np.isin(timeline.kind, (*READING_KINDS, Kind.STEP)))
    order = np.lexsort((rows, timeline.stage[rows], timeline.replica[rows]))
    rows = rows[order]
    place = timeline.replica[rows] * timeline.stages + timeline.stage[rows]
    for part in np.split(rows, np.flatnonzero(np.diff(place)) + 1):
        if len(part):
            kind, version = timeline.kind[part], timeline.version[part]
            steps = (kind == Kind.STEP).astype(np.int64)
            newest = np.cumsum(steps) - steps
            index = int(timeline.stage[part[0]])
            yield _Stage(index, kind, timeline.microbatch[part], version, newest)
