"""Memory of each kind of rank over a step, by class, without a GPU and without values.

A step of the very program that would run is played on the meta device, and every storage in it is
watched.  Of a pipeline a few microbatches are played, and what their operations hold, free and need
for a while is laid along the whole order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from schedlang.memory import CLASSES, STATE, Moment, RankMemory
from schedlang.passes.costs.memory import RankClass
from schedlang.passes.costs.rehearsal import Rehearsal, Run, in_order
from schedlang.passes.costs.rehearse import rehearse
from schedlang.passes.preparing.prepare import Prepared
from schedlang.plan import Plan

if TYPE_CHECKING:
    from schedlang.passes.laying.dryrun import Loss
    from schedlang.runtime.storage.footprint import Levels

BEFORE, AFTER = "before", "sums and update"


def estimate(
    plan: Plan, batch: Mapping[str, Any], loss: Loss | None, prepared: Prepared
) -> tuple[RankMemory, ...]:
    """What each kind of rank holds, in the order of their first rank; optimizer: AdamW's moments.

    `batch` is that of a whole step, `prepared` what is known of the plan.  Microbatches count as
    if all were as large as the first.  Raises what the model raises where it cannot be played.
    """
    return held(plan, prepared, rehearse(plan, batch, loss, prepared))


def held(plan: Plan, prepared: Prepared, played: Rehearsal) -> tuple[RankMemory, ...]:
    """The same of steps that were played already."""
    return tuple(_memory(plan, prepared, one, played) for one in played.classes)


# -- along the whole order ---------------------------------------------------------------------


def _memory(plan: Plan, prepared: Prepared, one: RankClass, rehearsal: Rehearsal) -> RankMemory:
    """The played operations in the order of this rank's place; what it holds for others besides."""
    staged, played = prepared.staged, rehearsal.of[one]
    level = played.start + _lodging(one)
    moments = [Moment(BEFORE, _plain(level), _plain(level))]

    def then(what: str, run: Run) -> None:
        nonlocal level
        more = level - run.before
        passing = run.passing + int(more[len(STATE) :].sum())
        moments.append(Moment(what, _plain(run.most + more), _plain(run.end + more), passing))
        level = run.end + more

    for op, run in in_order(plan, staged, one.place, played, rehearsal.parked):
        then(str(op), run)
    for run in played.rest:
        then(AFTER, run)
    scale = [_ratio(getattr(one, name), getattr(played.of, name)) for name in STATE]
    return RankMemory(
        one.ranks, one.first, one.place, tuple(_scaled(m, scale) for m in moments), played.host,
        played.left,
    )  # fmt: skip


def _lodging(one: RankClass) -> Levels:
    """What a rank holds of another one's state, all the time."""
    import numpy as np

    found: Levels = np.zeros(len(CLASSES), dtype=np.int64)
    found[CLASSES.index("optimizer")] = one.peer
    return found


def _ratio(mine: int, other: int) -> float:
    return mine / other if other else 1.0


def _scaled(moment: Moment, scale: Sequence[float]) -> Moment:
    """The same on a rank with larger or smaller slices of the state."""

    def of(levels: tuple[int, ...]) -> tuple[int, ...]:
        state = (round(size * factor) for size, factor in zip(levels, scale))
        return (*state, *levels[len(scale) :])

    return moment if all(factor == 1 for factor in scale) else Moment(
        moment.what, of(moment.most), of(moment.end), moment.passing
    )  # fmt: skip


def _plain(levels: Levels) -> tuple[int, ...]:
    return tuple(int(size) for size in levels)
