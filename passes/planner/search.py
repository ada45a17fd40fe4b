"""The search for the quickest setting that fits: best first, pruned by bounds from below.

* What was found so far, and what was rejected.
* The search: groups of placements opened, then all ways, the most promising first.
* What other limits would cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.limits import Limits
from schedlang.passes.planner.bounds import (
    Clock,
    bytes_floor,
    seconds_floor,
    seconds_hoped,
    sums_floor,
)
from schedlang.passes.planner.fill import Filled, Filler
from schedlang.passes.planner.limits import told
from schedlang.passes.planner.reasons import KINDS, Rejected, Seen, against
from schedlang.passes.planner.space import Floats, Ints, Job, Ways, check, groups, rows_of, ways
from schedlang.passes.planner.unlike import filler_of, job_bound
from schedlang.passes.planner.values import Chain, Placement, Setting

Profiles = Callable[[Placement], Chain | Refusal | None]
Progress = Callable[[int, int], None]  # ways done, of all that are known
ANY = Limits()
LOOKS = 60  # at ways, for the best of another kind
MOVES = 60  # of a unit from stage to stage, for the best


@dataclass(frozen=True)
class Counts:
    """Numbers of ways, by what became of them.

    all      that keep the hard rules
    large    too large by their bound already
    cut      looked at with their cuts, and no further
    priced   with a price
    refused  placements that the model does not have
    """

    all: int = 0
    large: int = 0
    cut: int = 0
    priced: int = 0
    refused: int = 0

    @property
    def pruned(self) -> int:
        """Ways that were never looked at."""
        return self.all - self.large - self.cut - self.priced


@dataclass(frozen=True)
class Found:
    """The best setting so far.

    best      None where nothing fits yet
    floor     seconds below which no setting can be, as far as is known
    done      whether the search has come to its end: `best` is the optimum
    by        whose the best is, in words, where it is that of a planner by name
    rejected  the best of other kinds, with why they are not it
    refused   placements that the model does not have, and why, the first for each code
    """

    best: Filled | None
    floor: float
    counts: Counts
    rejected: tuple[Rejected, ...] = ()
    refused: tuple[tuple[Placement, Refusal], ...] = ()
    done: bool = False
    by: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        """Share by which the best may still be too slow."""
        if self.best is None:
            return np.inf
        return max(0.0, self.best.least / self.floor - 1) if self.floor > 0 else np.inf


def search(
    profiles: Profiles,
    job: Job,
    limits: Limits = ANY,
    progress: Progress | None = None,
    *,
    moves: int = MOVES,
) -> Iterator[Found]:
    """Look for the quickest setting that fits, each found better than the one before.

    `profiles` gives the chain of a placement, or None or a refusal where the model cannot be placed
    so.  The last one that is found says `done`: it repeats the best, which is then the optimum over
    all ways, each cut so that its slowest stage is as quick as can be, and with the fewest units
    computed again; then the programme cuts its stages, and so many `moves` of a unit from stage to
    stage are tried on either.  It has no best where nothing fits.  Raises Refusal S109 for a pinned
    order that cannot be priced.
    """
    check(limits)
    filler = filler_of(profiles, job, limits)
    return _Search(profiles, job_bound(job, limits), limits, progress, moves, filler).run()


@dataclass
class _Opened:
    """The ways of one placement that may fit, with their bounds; those known that need no other
    look, since they have a price or do not fit."""

    ways: Ways
    clock: Clock
    at: Ints
    floors: Floats
    hopes: Floats  # what they may take, by which they are looked at in turn
    beside: Floats  # seconds that replicas send while the pipeline runs
    after: Floats  # and after it
    known: set[int] = field(default_factory=set)

    def unlike(self, setting: Setting, name: str) -> NDArray[np.bool_]:
        """Find those that have another value of a name than a setting."""
        mine = told(setting)[name]
        if name == "order":
            values = np.array(self.ways.names)[self.ways.order]
            found: NDArray[np.bool_] = (values != mine)[self.at]
            return found
        if hasattr(self.ways, name):
            other: NDArray[np.bool_] = np.not_equal(getattr(self.ways, name)[self.at], mine)
            return other
        return np.full(len(self.at), getattr(self.ways.chain.placement, name) != mine)


@dataclass
class _Search:
    """The state of one search."""

    profiles: Profiles
    job: Job
    limits: Limits
    progress: Progress | None
    moves: int
    filler: Filler
    opened: list[_Opened] = field(default_factory=list)
    best: Filled | None = None
    nearest: Filled | None = None
    seen: Seen = field(default_factory=Seen)
    refused: dict[str, tuple[Placement, Refusal]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(vars(Counts()), 0))

    def run(self) -> Iterator[Found]:
        """Open all placements, and look at the most promising way of each group; then all ways;
        then the best of other kinds."""
        for group in groups(self.job, self.limits):
            first = len(self.opened)
            self._open(group)
            yield from self._glance(self.opened[first:])
        yield from self._descend()
        yield from self._move()
        self._others()
        yield self._found(self._worst, True)

    # -- placements ------------------------------------------------------------------------------

    def _open(self, group: Placement) -> None:
        """All ways of a group; more rows need more bytes, so those after the first without any way
        that fits have none either."""
        for rows in rows_of(self.job, group, self.limits):
            chain = self.profiles(replace(group, rows=rows))
            if not isinstance(chain, Chain):
                self.counts["refused"] += 1
                if chain is not None:
                    code = chain.diagnostics[0].code
                    self.refused.setdefault(code, (replace(group, rows=rows), chain))
                continue
            found = ways(self.job, chain, self.limits)
            if found is None:
                continue
            self.counts["all"] += len(found)
            needed = bytes_floor(found, self.job)
            fits = np.flatnonzero(needed <= self.job.cluster.memory)
            self.counts["large"] += len(found) - len(fits)
            if not fits.size:
                self._note(found, needed)
                break
            clock, (beside, after) = Clock(chain, self.job), sums_floor(found, self.job)
            floors = np.maximum(seconds_floor(found, clock), beside) + after
            hopes = np.maximum(seconds_hoped(found, clock), beside) + after
            bounds = (floors[fits], hopes[fits], beside[fits], after[fits])
            self.opened.append(_Opened(found, clock, fits, *bounds))

    def _note(self, found: Ways, needed: Floats) -> None:
        """Keep of ways that are all too large the one that needs least, if all are."""
        at = int(needed.argmin())
        if self.nearest is None or needed[at] < self.nearest.needs:
            self.nearest = Filled(found.setting(at), 0.0, float(needed[at]))

    def _glance(self, some: list[_Opened]) -> Iterator[Found]:
        """Look at the most promising way of some placements."""
        one = min(some, key=lambda opened: opened.hopes.min(), default=None)
        if one is not None and one.floors[at := int(one.hopes.argmin())] < self._worst:
            yield from self._better(self._try(one, at, self._worst), 0.0)

    # -- ways --------------------------------------------------------------------------------------

    def _descend(self) -> Iterator[Found]:
        """Try all ways that may be better than the best, the most promising first."""
        order = list(self._in_turn())
        left = np.minimum.accumulate(np.array([f for _, _, f in order])[::-1])[::-1]
        for done, (one, at, floor) in enumerate(order):
            if left[done] >= self._worst:
                break
            if self.progress is not None:
                self.progress(done, len(order))
            if floor < self._worst and at not in one.known:
                yield from self._better(self._try(one, at, self._worst), float(left[done]))

    def _in_turn(
        self, masks: list[NDArray[np.bool_]] | None = None
    ) -> Iterator[tuple[_Opened, int, float]]:
        """Ways, or those of a mask, with their bounds, the most promising first."""
        some, none = self.opened, np.zeros(0)
        hopes, floors = (
            np.concatenate([none, *(getattr(one, name) for one in some)])
            for name in ("hopes", "floors")
        )
        whose = np.repeat(np.arange(len(some)), [len(one.at) for one in some])
        begins = np.cumsum([0, *(len(one.at) for one in some)])
        order = np.argsort(hopes, kind="stable")
        if masks is not None:
            order = order[np.concatenate([*masks, none.astype(bool)])[order]]
        for at in order.tolist():
            yield some[whose[at]], at - int(begins[whose[at]]), float(floors[at])

    def _move(self) -> Iterator[Found]:
        """Move units between the stages of the best, as it is cut and as the programme cuts it."""
        if self.best is not None and self.moves:
            chain = self.profiles(self.best.setting.placement)
            assert isinstance(chain, Chain)
            even, cut = self.best, self.filler.seeded(clock := Clock(chain, self.job), self.best)
            for one in (even,) if cut is even else (even, cut):
                yield from self._better(self.filler.improved(clock, one, self.moves), self._worst)

    def _others(self) -> None:
        """Look for the best that differ from the best in one name each, a little while."""
        if self.best is None:
            return
        mine, counts = told(self.best.setting), dict(self.counts)
        for name in KINDS:
            known = [
                one.least
                for (kind, value), one in self.seen.fit.items()
                if kind == name and value != mine[name]
            ]
            worst, left = min(known, default=np.inf), LOOKS
            masks = [one.unlike(self.best.setting, name) for one in self.opened]
            for one, at, floor in self._in_turn(masks):
                if not left:
                    break
                if floor < worst and at not in one.known:
                    filled = self._try(one, at, worst)
                    worst = min(worst, filled.least) if filled.priced is not None else worst
                    left -= 1
        self.counts = counts

    @property
    def _worst(self) -> float:
        return np.inf if self.best is None else self.best.least

    def _try(self, one: _Opened, at: int, worst: float) -> Filled:
        """Fill one way in, if it may beat the worst."""
        way, sums = one.ways.setting(int(one.at[at])), (float(one.beside[at]), float(one.after[at]))
        filled = self.filler.filled(one.clock, way, worst, *sums)
        self.counts["cut" if filled.priced is None else "priced"] += 1
        room = self.job.cluster.memory if filled.room is None else filled.room
        if filled.priced is not None or filled.needs > room:
            one.known.add(at)
            self.seen.note(filled)
        return filled

    def _better(self, filled: Filled, floor: float) -> Iterator[Found]:
        """Keep what was found, and tell of it, where it is better."""
        if filled.priced is not None and filled.least < self._worst:
            self.best = filled
            yield self._found(floor, False)

    def _found(self, floor: float, done: bool) -> Found:
        memory = self.job.cluster.memory
        others = self.seen.rejected(self.best, memory)
        if self.best is None and self.nearest is not None and not others:
            others = (against(None, self.nearest, memory, "what needs least"),)
        refused = tuple(self.refused.values())
        return Found(self.best, floor, Counts(**self.counts), others, refused, done)


# -- other limits ----------------------------------------------------------------------------------


def why(profiles: Profiles, job: Job, asked: Limits, best: Found, limits: Limits = ANY) -> Rejected:
    """The best under other limits, and why it is not the best of all.

    `asked` binds beside the `limits` under which `best` was found.
    """
    *_, last = search(profiles, job, asked.within(limits))
    return against(best.best, last.best or _nearest(last), job.cluster.memory, asked.text())


def _nearest(found: Found) -> Filled | None:
    """The setting that needs least of those that do not fit."""
    large = [one.filled for one in found.rejected if one.filled is not None]
    return min(large, key=lambda one: one.needs, default=None)
