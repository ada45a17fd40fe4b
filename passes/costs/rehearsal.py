"""What was played of a step on each kind of rank, laid along the order of a whole step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from schedlang.memory import CLASSES, STATE
from schedlang.passes.costs.memory import RankClass
from schedlang.plan import Plan
from schedlang.timeline import Kind

if TYPE_CHECKING:
    from schedlang.passes.cutting.staging import Staged
    from schedlang.runtime.storage.footprint import Levels
    from schedlang.runtime.storage.work import Work
    from schedlang.timeline import Op

LODGES = {Kind.HOLD: 1, Kind.GIVE: -1}  # what a partner does


@dataclass(frozen=True)
class Played:
    """What the operations of a few microbatches did on one rank, in the order in which they ran.

    ops   by what tells them apart but for the microbatch: what was held before, at most, and after
    rest  what ran after them, likewise
    parked  by stage the bytes of a microbatch that a partner holds for a while
    """

    of: RankClass
    start: Levels
    ops: Mapping[Any, Sequence[Run]]
    rest: Sequence[Run]
    host: int
    left: tuple[str, ...]
    parked: Mapping[int, int]


class Run(NamedTuple):
    """Bytes by class before something ran, at most while it did, and afterwards; at most of what
    is no state; and what it did."""

    before: Levels
    most: Levels
    end: Levels
    passing: int
    work: Work


@dataclass(frozen=True)
class Rehearsal:
    """The classes of ranks, and what was played of the one that stands for each.

    parked  by stage the bytes that a microbatch's forward parks on a partner
    """

    classes: tuple[RankClass, ...]
    of: Mapping[RankClass, Played]
    parked: Mapping[int, int]


def key(staged: Staged, place: int | None, op: Op) -> tuple[Any, ...]:
    """Equal for operations of alike stages that differ in their microbatch alone."""
    from schedlang.timeline import TRANSFERS

    stages = staged.stages_at(place or 0)
    to = op.peer - op.stage if op.kind in TRANSFERS else 0
    return op.kind, stages.index(op.stage), op.slice, to


# -- along the whole order ---------------------------------------------------------------------


def in_order(
    plan: Plan, staged: Staged, place: int | None, played: Played, parked: Mapping[int, int]
) -> Iterator[tuple[Op, Run]]:
    """Each operation of a place in a whole step, with what was played for it.

    `parked`: by stage what a partner holds of it for a while.
    """
    rows = _rows(plan, staged, place)
    often = Counter(key(staged, place, op) for op in rows if op.kind not in LODGES)
    turns: Counter[Any] = Counter()
    lodgers = {
        (stage, kind): _lodged(size * sign, played.start)
        for stage, size in parked.items()
        for kind, sign in LODGES.items()
    }
    for op in rows:
        if op.kind in LODGES:
            yield op, lodgers[op.stage, op.kind]
            continue
        alike = key(staged, place, op)
        runs = played.ops.get(alike)
        if runs is not None:
            yield op, runs[_turn(turns[alike], often[alike], len(runs))]
        turns[alike] += 1


def _lodged(size: int, before: Levels) -> Run:
    """A partner's activations come (or go, below zero)."""
    from schedlang.runtime.storage.work import Work

    end = before.copy()
    end[CLASSES.index("activations")] += size
    passing = int(before[len(STATE) :].sum()) + max(size, 0)
    return Run(before, end if size > 0 else before, end, passing, Work())


def _rows(plan: Plan, staged: Staged, place: int | None) -> list[Op]:
    """What a place runs in a whole step, with what it sends and gathers."""
    from schedlang.passes.preparing.gathers import gathers_by_rows
    from schedlang.timeline import with_gathers, with_transfers

    made = with_transfers(staged.timeline.with_edges(staged.cut.edges), plan.ahead)
    if gathers_by_rows(plan, staged):
        made = with_gathers(made)
    return list(made.rows(place or 0))


def _turn(turn: int, often: int, played: int) -> int:
    """Which of the played ones stands for one of many: the first, the last, or one between."""
    if turn == 0 or played == 1:
        return 0
    return played - 1 if turn == often - 1 else min(turn, max(1, played - 2))
