"""Which version of the weights every microbatch meets, where updates come inside the step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from schedlang.passes.cutting.staging import Staged
    from schedlang.timeline import Timeline

Versions = Mapping[int, int]  # stage -> version


@dataclass(frozen=True)
class Table:
    """Which weights every microbatch meets, and the update that it goes into.

    forward, backward  of each microbatch, the version that each stage reads
    made               of each microbatch, the version that its gradients make (from 1)
    stage              parameter (first name) -> its stage
    """

    forward: tuple[Versions, ...]
    backward: tuple[Versions, ...]
    made: tuple[int, ...]
    stage: Mapping[str, int]


def table_of(staged: Staged) -> Table | None:
    """The table of a plan that updates inside the step; None where every version is 0."""
    from schedlang.timeline.versions import is_stale, updates

    timeline = staged.timeline
    if not is_stale(timeline):
        return None
    made = tuple(updates(timeline).tolist())
    if max(made) == 1:
        return None  # one update a step, of all microbatches: the plain loop
    return Table(*_reads(timeline), made, _stages(staged))


def _reads(timeline: Timeline) -> tuple[tuple[Versions, ...], tuple[Versions, ...]]:
    from schedlang.timeline import Kind

    forward: list[dict[int, int]] = [{} for _ in range(timeline.microbatches)]
    backward: list[dict[int, int]] = [{} for _ in range(timeline.microbatches)]
    for rank in range(timeline.ranks):
        for op in timeline.rows(rank):
            if op.kind is Kind.F:
                forward[op.microbatch][op.stage] = op.version
            elif op.kind in (Kind.B, Kind.I):
                backward[op.microbatch][op.stage] = op.version
    return tuple(forward), tuple(backward)


def _stages(staged: Staged) -> dict[str, int]:
    if staged.axis is None:
        return {}
    cut = staged.cut
    return {name: stage for stage in range(cut.stages) for name in cut.parameters(stage)}
