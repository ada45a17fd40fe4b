"""The search for the quickest setting that fits: best first, pruned by bounds from below.

* What was found so far, and what was rejected.
* The search: groups of placements opened, then all ways, the most promising first.
* What other limits would cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, repeat

import numpy as np
from numpy.typing import NDArray

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.limits import Limits
from schedlang.passes.planner.bounds import (
    Clock,
    bytes_floor,
    seconds_bounds,
    sums_floor,
)
from schedlang.passes.planner.fill import Filled, Filler
from schedlang.passes.planner.limits import told
from schedlang.passes.planner.reasons import KINDS, Rejected, Seen, against, nearest
from schedlang.passes.planner.space import (
    LAYS,
    Floats,
    Ints,
    Job,
    Ways,
    check,
    groups,
    joined,
    rows_of,
    ways,
)
from schedlang.passes.planner.unlike import filler_of, job_bound
from schedlang.passes.planner.values import Chain, Placement, Setting

Profiles = Callable[[Placement], Chain | Refusal | None]
Progress = Callable[[int, int], None]  # ways done, of all that are known
ANY = Limits()
LOOKS = 60  # at ways, for the best of another kind
MOVES = 60  # of a unit from stage to stage, for the best
BOUNDS = ("floors", "hopes", "beside", "after", "looks")


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
    bound = job_bound(job, limits)
    if bound is not job:  # a filler on unlike nodes tries orders of axes itself
        usual = limits.admitted("axes", map("-".join, LAYS))[:1]
        limits = replace(limits, pinned={**limits.pinned, "axes": tuple(usual)})
    return _Search(profiles, bound, limits, progress, moves, filler).run()


@dataclass
class _Opened:
    """The ways of placements that split tensors alike and that may fit, with their bounds."""

    ways: Ways
    clocks: Sequence[Clock]
    floors: Floats
    hopes: Floats  # what they may take, by which they are looked at in turn
    beside: Floats  # seconds that replicas send while the pipeline runs
    after: Floats  # and after it
    looks: Ints  # 1 of those that were looked at, 2 where no other is needed: priced, or too large

    def unlike(self, setting: Setting, name: str) -> NDArray[np.bool_]:
        """Find those that have another value of a name than a setting."""
        mine, ways = told(setting)[name], self.ways
        if name == "order":
            values = np.array(ways.names)[ways.order]
        elif name == "axes":
            values = np.array(["-".join(order) for order in LAYS])[ways.axes]
        elif hasattr(ways, name):
            values = getattr(ways, name)
        else:
            values = np.array([getattr(one.placement, name) for one in ways.chains])[ways.one]
        found: NDArray[np.bool_] = np.not_equal(values, mine)
        return found


def _opened(ways: Ways, clocks: Sequence[Clock], job: Job, laid: bool) -> _Opened:
    """Ways with their bounds: of one order of the axes, or of any where they are not `laid`."""
    beside, after = sums_floor(ways, job, laid)
    floors, hopes = (np.maximum(one, beside) + after for one in seconds_bounds(ways, clocks, laid))
    return _Opened(ways, clocks, floors, hopes, beside, after, np.zeros(len(ways), dtype=np.int64))


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
        """Open all placements, and look at the most promising way of those that split tensors
        alike; then at all ways, in all orders of axes; then the best of other kinds."""
        for _, some in groupby(groups(self.job, self.limits), lambda one: replace(one, offload="")):
            opened = self._open(list(some))
            if opened is not None:
                self.opened.append(opened)
                yield from self._glance(opened)
        turns = sorted(range(len(self.opened)), key=lambda at: self.opened[at].hopes.min())
        for at in turns:
            self.opened[at] = self._laid(self.opened[at])
            yield from self._glance(self.opened[at])
        yield from self._descend()
        yield from self._move()
        self._others()
        yield self._found(self._worst, True)

    # -- placements ------------------------------------------------------------------------------

    def _open(self, some: list[Placement]) -> _Opened | None:
        """All ways of placements that differ in what lies on hosts, with any rows; more rows need
        more bytes, so those after the first without any way that fits have none either."""
        found, clocks = list[Ways](), list[Clock]()
        for rows in rows_of(self.job, some[0], self.limits):
            chains = self._chains([replace(one, rows=rows) for one in some])
            mine = ways(self.job, chains[0], self.limits) if chains else None
            if mine is None:
                continue
            every = mine.over(chains)
            needed = bytes_floor(every, self.job)
            fits = needed <= self.job.cluster.memory
            each = every.often(np.arange(len(every)))
            self.counts["all"] += int(each.sum())
            self.counts["large"] += int(each[~fits].sum())
            if not fits.any():
                self._note(every, needed)
                break
            known = dict[bool, dict[object, Floats]]()
            at = [known.setdefault(one.placement.parked, {}) for one in chains]
            clocks += [Clock(*pair) for pair in zip(chains, repeat(self.job), at)]
            found.append(every.at(np.flatnonzero(fits)))
        return _opened(joined(found), clocks, self.job, False) if found else None

    def _chains(self, some: list[Placement]) -> list[Chain]:
        """The chains of placements that differ in what lies on hosts alone; none where there is
        none of the first."""
        chain = self.profiles(some[0])
        if isinstance(chain, Chain):
            return [replace(chain, placement=one) for one in some]
        self.counts["refused"] += len(some)
        if chain is not None:
            self.refused.setdefault(chain.diagnostics[0].code, (some[0], chain))
        return []

    def _laid(self, one: _Opened) -> _Opened:
        """The same with those that may be better than the best in every order of their axes; the
        others have one, for reasons."""
        open_ = one.floors < self._worst
        if not open_.any():
            return one
        rows, every = one.ways.laid(np.flatnonzero(open_))
        shut = np.flatnonzero(~open_)
        bounds = (getattr(one, name)[shut] for name in BOUNDS)
        rest = _Opened(one.ways.at(shut), one.clocks, *bounds)
        more = _opened(every, one.clocks, self.job, True)
        first = every.axes == one.ways.axes[rows]
        more.looks = np.where(first, one.looks[rows], 0)
        both = (np.concatenate([getattr(more, n), getattr(rest, n)]) for n in BOUNDS)
        return _Opened(every.and_(rest.ways), one.clocks, *both)

    def _note(self, found: Ways, needed: Floats) -> None:
        """Keep of ways that are all too large the one that needs least, if all are."""
        at = int(needed.argmin())
        if self.nearest is None or needed[at] < self.nearest.needs:
            self.nearest = Filled(found.setting(at), 0.0, float(needed[at]))

    def _glance(self, one: _Opened) -> Iterator[Found]:
        """Look at the most promising way of some placements."""
        at = int(one.hopes.argmin())
        if one.floors[at] < self._worst and one.looks[at] < 2:
            yield from self._better(self._try(one, at, self._worst), 0.0)

    # -- ways --------------------------------------------------------------------------------------

    def _descend(self) -> Iterator[Found]:
        """Try all ways that may be better than the best, the most promising first."""
        order, floors = self._in_turn([one.looks < 2 for one in self.opened], self._worst)
        left = np.minimum.accumulate(floors[::-1])[::-1]
        for done, (one, at) in enumerate(order):
            if left[done] >= self._worst:
                break
            if self.progress is not None:
                self.progress(done, len(floors))
            if floors[done] < self._worst:
                yield from self._better(self._try(one, at, self._worst), float(left[done]))

    def _in_turn(
        self, masks: list[NDArray[np.bool_]], worst: float
    ) -> tuple[Iterator[tuple[_Opened, int]], Floats]:
        """Ways of a mask that may be better than the worst, and their bounds, the most promising
        first."""
        some = self.opened
        each = [np.flatnonzero(mask & (one.floors < worst)) for mask, one in zip(masks, some)]
        hopes, floors, at, whose = (
            np.concatenate([np.zeros(0), *found])
            for found in (
                [one.hopes[at] for one, at in zip(some, each)],
                [one.floors[at] for one, at in zip(some, each)],
                each,
                [np.full(len(at), k) for k, at in enumerate(each)],
            )
        )
        order = np.argsort(hopes, kind="stable")
        turns = zip(whose[order].astype(int).tolist(), at[order].astype(int).tolist())
        return ((some[k], place) for k, place in turns), floors[order]

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
            masks = [one.unlike(self.best.setting, name) & (one.looks < 2) for one in self.opened]
            for (one, at), floor in zip(*self._in_turn(masks, worst)):
                if not left:
                    break
                if floor < worst:
                    filled = self._try(one, at, worst)
                    worst = min(worst, filled.least) if filled.priced is not None else worst
                    left -= 1
        self.counts = counts

    @property
    def _worst(self) -> float:
        return np.inf if self.best is None else self.best.least

    def _try(self, one: _Opened, at: int, worst: float) -> Filled:
        """Fill one way in, if it may beat the worst; its bounds hold for any order of the axes."""
        sums = float(one.beside[at]), float(one.after[at])
        clock = one.clocks[one.ways.one[at]]
        filled = self.filler.filled(clock, one.ways.setting(at), worst, *sums)
        self.counts["cut"] -= int(one.looks[at] == 1)
        self.counts["cut" if filled.priced is None else "priced"] += 1
        one.looks[at] = max(1, one.looks[at])
        room = self.job.cluster.memory if filled.room is None else filled.room
        if filled.priced is not None or filled.needs > room:
            one.looks[at] = 2
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
            others = (nearest(self.nearest, memory),)
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
