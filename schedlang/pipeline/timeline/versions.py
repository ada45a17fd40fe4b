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
    versions: Column = np.ones(timeline.microbatches, dtype=np.int32)
    for stage in _stages(timeline):
        versions[stage.microbatch[stage.back]] = stage.newest[stage.back] + 1
    return versions


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
        for microbatch, version in zip(stage.microbatch[stage.back], stage.newest[stage.back] + 1):
            first = groups.setdefault(int(microbatch), (int(version), stage.index))
            if first[0] != version:
                raise TimelineError(
                    f"microbatch {microbatch} goes into update {first[0]} of stage {first[1]} and"
                    f" into update {version} of stage {stage.index}: the same on all stages"
                )


def weight_copies(timeline: Timeline) -> NDArray[np.int64]:
    """Return the most versions of its weights that each stage holds at a time; 1 where none is
    kept."""
    counts = np.ones(timeline.stages, dtype=np.int64)
    for stage in _stages(timeline):
        counts[stage.index] = stage.copies()
    return counts


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
        versions = self.version[steps]
        if not np.array_equal(versions, np.arange(1, len(versions) + 1)):
            self.refuse(f"makes the versions {versions.tolist()}, not 1, 2, .. in this order")
        if self.back.any() and (not steps.any() or self.newest[self.back].max() == len(versions)):
            self.refuse("has a backward that no update follows")
        if len(np.unique(self.newest[self.back])) != len(versions):
            self.refuse("has an update without a backward before it")
        ahead = ~steps & ((self.version > self.newest) | (self.version < 0))
        if ahead.any():
            row = int(np.argmax(ahead))
            self.refuse(
                f"reads version {self.version[row]} for microbatch {self.microbatch[row]}, when"
                f" version {self.newest[row]} is the newest"
            )
        self.check_kept(~steps)

    def check_kept(self, reads: NDArray[np.bool_]) -> None:
        forward = np.flatnonzero(self.kind == Kind.F)
        read_version = np.zeros(int(self.microbatch.max(initial=0)) + 1, dtype=np.int32)
        read_version[self.microbatch[forward]] = self.version[forward]
        changed = self.back & (self.version != read_version[self.microbatch])
        late = reads & (self.version != self.newest)
        if changed.any() and late.any():
            row = int(np.argmax(changed))
            self.refuse(
                f"reads version {self.version[row]} in a backward of microbatch"
                f" {self.microbatch[row]} and another one in its forward: that is for stages all of"
                " whose rows read the newest weights"
            )

    def refuse(self, problem: str) -> None:
        raise TimelineError(f"stage {self.index} {problem}")

    def copies(self) -> int:
        steps = np.flatnonzero(self.kind == Kind.STEP)
        rows = len(self.kind)
        starts = np.concatenate([[0], steps])
        ends = np.concatenate([steps, [rows]])  # the newest version is always held
        reads = self.kind != Kind.STEP
        np.maximum.at(ends, self.version[reads], np.flatnonzero(reads))
        changes = np.zeros(rows + 2, dtype=np.int64)
        np.add.at(changes, starts, 1)
        np.add.at(changes, ends, -1)
        return int(np.cumsum(changes).max(initial=1))


def _stages(timeline: Timeline) -> Iterator[_Stage]:
    rows = np.flatnonzero(np.isin(timeline.kind, (*READING_KINDS, Kind.STEP)))
    order = np.lexsort((rows, timeline.stage[rows], timeline.replica[rows]))
    rows = rows[order]
    key = timeline.replica[rows] * timeline.stages + timeline.stage[rows]
    for part in np.split(rows, np.flatnonzero(np.diff(key)) + 1):
        if len(part):
            kind, version = timeline.kind[part], timeline.version[part]
            steps = (kind == Kind.STEP).astype(np.int64)
            newest = np.cumsum(steps) - steps
            index = int(timeline.stage[part[0]])
            yield _Stage(index, kind, timeline.microbatch[part], version, newest)
