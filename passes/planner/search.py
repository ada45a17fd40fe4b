"""Search for the quickest setting that fits: best-first search, pruned by lower bounds.

`schedlang tune` uses this file.  It opens groups of placements, evaluates their candidates (the
most promising first), and can say what other limits would cost.
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
    ChainTimes,
    bytes_floor,
    replica_floor,
    step_bounds,
)
from schedlang.passes.planner.evaluation import EvaluatedSetting, Evaluator
from schedlang.passes.planner.heterogeneous import bounding_job, evaluator_of
from schedlang.passes.planner.limits import setting_values
from schedlang.passes.planner.reasons import (
    KINDS,
    BestByKind,
    RejectedSetting,
    compare_with_best,
    describe_smallest,
)
from schedlang.passes.planner.search_space import (
    AXIS_ORDERS,
    Candidates,
    Floats,
    Ints,
    Job,
    check_pinned_orders,
    concatenate_candidates,
    iter_placements,
    list_candidates,
    microbatch_rows,
)
from schedlang.passes.planner.values import Chain, Placement, Setting

Profiles = Callable[[Placement], Chain | Refusal | None]
Progress = Callable[[int, int], None]  # candidates done, of all that are known
NO_LIMITS = Limits()
TRIES_PER_KIND = 60  # candidates evaluated for the best of another kind
MAX_MOVES = 60  # moves of a unit from stage to stage, on the best
BOUND_COLUMNS = ("floors", "hopes", "beside", "after", "looks")


@dataclass(frozen=True)
class Counts:
    """Numbers of candidates, by outcome.

    all      candidates that keep the hard rules
    large    candidates whose lower bound of bytes is too large already
    cut      candidates that were split into stages, but not priced
    priced   candidates with a price
    refused  placements that the model does not have
    """

    all: int = 0
    large: int = 0
    cut: int = 0
    priced: int = 0
    refused: int = 0

    @property
    def pruned(self) -> int:
        """Candidates that were never evaluated."""
        return self.all - self.large - self.cut - self.priced


@dataclass(frozen=True)
class SearchResult:
    """The best setting so far.

    best         None while nothing fits
    floor        lower bound: no setting takes fewer seconds, as far as is known
    done         whether the search has ended: `best` is the optimum
    attribution  words for the planner that gave the best, where the search is that of a named
                 planner
    rejected     the best of other kinds, each with the reason why it is not the best
    refused      placements that the model does not have, each with its refusal, the first of each
                 code
    """

    best: EvaluatedSetting | None
    floor: float
    counts: Counts
    rejected: tuple[RejectedSetting, ...] = ()
    refused: tuple[tuple[Placement, Refusal], ...] = ()
    done: bool = False
    attribution: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        """Share by which the best may still be too slow."""
        if self.best is None:
            return np.inf
        return max(0.0, self.best.least / self.floor - 1) if self.floor > 0 else np.inf


def search(
    profiles: Profiles,
    job: Job,
    limits: Limits = NO_LIMITS,
    progress: Progress | None = None,
    *,
    moves: int = MAX_MOVES,
) -> Iterator[SearchResult]:
    """Search for the quickest setting that fits; each yielded result is better than the one before.

    `profiles` gives the chain of a placement, or None or a refusal where the model cannot be placed
    so.  The last result is `done` and repeats the best.  The best is the optimum over all
    candidates, each split into stages so that its slowest stage is as quick as possible, with the
    fewest recomputed units.  After that the dynamic programme splits the best into stages too, and
    up to `moves` moves of a unit between stages are tried on both.  The best is None where nothing
    fits.  Raises Refusal S109 for a pinned order that cannot be priced.
    """
    check_pinned_orders(limits)
    filler = evaluator_of(profiles, job, limits)
    bound = bounding_job(job, limits)
    if bound is not job:  # the evaluator for unequal nodes tries orders of axes itself
        usual = limits.filter_admitted("axes", map("-".join, AXIS_ORDERS))[:1]
        limits = replace(limits, pinned={**limits.pinned, "axes": tuple(usual)})
    return _Search(profiles, bound, limits, progress, moves, filler).run()


@dataclass
class _Opened:
    """Candidates whose placements split tensors in the same way and which may fit, with bounds."""

    ways: Candidates
    clocks: Sequence[ChainTimes]
    floors: Floats
    hopes: Floats  # estimated seconds: the order of evaluation
    beside: Floats  # seconds that replicas send while the pipeline runs
    after: Floats  # seconds that replicas send after the pipeline
    looks: Ints  # 0: not evaluated, 1: evaluated once, 2: final (priced, or too large)

    def unlike(self, setting: Setting, name: str) -> NDArray[np.bool_]:
        """Find the candidates whose value of `name` differs from the setting's."""
        mine, ways = setting_values(setting)[name], self.ways
        if name == "order":
            values = np.array(ways.names)[ways.order]
        elif name == "axes":
            values = np.array(["-".join(order) for order in AXIS_ORDERS])[ways.axes]
        elif hasattr(ways, name):
            values = getattr(ways, name)
        else:
            values = np.array([getattr(one.placement, name) for one in ways.chains])[ways.one]
        found: NDArray[np.bool_] = np.not_equal(values, mine)
        return found


def _opened(ways: Candidates, clocks: Sequence[ChainTimes], job: Job, with_order: bool) -> _Opened:
    """Compute bounds of candidates: for their order of the axes if `laid`, else for any order."""
    beside, after = replica_floor(ways, job, with_order)
    floors, hopes = (
        np.maximum(one, beside) + after for one in step_bounds(ways, clocks, with_order)
    )
    return _Opened(ways, clocks, floors, hopes, beside, after, np.zeros(len(ways), dtype=np.int64))


@dataclass
class _Search:
    """State of one search."""

    profiles: Profiles
    job: Job
    limits: Limits
    progress: Progress | None
    moves: int
    filler: Evaluator
    opened: list[_Opened] = field(default_factory=list)
    best: EvaluatedSetting | None = None
    nearest: EvaluatedSetting | None = None
    seen: BestByKind = field(default_factory=BestByKind)
    refused: dict[str, tuple[Placement, Refusal]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(vars(Counts()), 0))

    def run(self) -> Iterator[SearchResult]:
        """Open all placements, and evaluate the most promising candidate of each group that splits
        tensors in the same way; then all candidates in all orders of axes; then the best of other
        kinds."""
        for _, some in groupby(
            iter_placements(self.job, self.limits), lambda one: replace(one, offload="")
        ):
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
        """Open all candidates of placements that differ in what is offloaded, with any rows.

        More rows need more bytes: after the first count of rows without a fitting candidate, larger
        counts have none either.
        """
        found, clocks = list[Candidates](), list[ChainTimes]()
        for rows in microbatch_rows(self.job, some[0], self.limits):
            chains = self._chains([replace(one, rows=rows) for one in some])
            mine = list_candidates(self.job, chains[0], self.limits) if chains else None
            if mine is None:
                continue
            every = mine.for_chains(chains)
            needed = bytes_floor(every, self.job)
            fits = needed <= self.job.cluster.memory
            each = every.count_axis_orders(np.arange(len(every)))
            self.counts["all"] += int(each.sum())
            self.counts["large"] += int(each[~fits].sum())
            if not fits.any():
                self._note(every, needed)
                break
            known = dict[bool, dict[object, Floats]]()
            at = [known.setdefault(one.placement.offloads_activations, {}) for one in chains]
            clocks += [ChainTimes(*pair) for pair in zip(chains, repeat(self.job), at)]
            found.append(every.select(np.flatnonzero(fits)))
        return _opened(concatenate_candidates(found), clocks, self.job, False) if found else None

    def _chains(self, some: list[Placement]) -> list[Chain]:
        """Profile placements that differ in offloading alone; empty where the first has no
        chain."""
        chain = self.profiles(some[0])
        if isinstance(chain, Chain):
            return [replace(chain, placement=one) for one in some]
        self.counts["refused"] += len(some)
        if chain is not None:
            self.refused.setdefault(chain.diagnostics[0].code, (some[0], chain))
        return []

    def _laid(self, one: _Opened) -> _Opened:
        """Expand candidates that may beat the best to every order of their axes.

        The other candidates keep one order: they are needed for reasons only.
        """
        promising = one.floors < self._worst
        if not promising.any():
            return one
        rows, every = one.ways.in_all_axis_orders(np.flatnonzero(promising))
        others = np.flatnonzero(~promising)
        bounds = (getattr(one, name)[others] for name in BOUND_COLUMNS)
        rest = _Opened(one.ways.select(others), one.clocks, *bounds)
        more = _opened(every, one.clocks, self.job, True)
        first = every.axes == one.ways.axes[rows]
        more.looks = np.where(first, one.looks[rows], 0)
        both = (np.concatenate([getattr(more, n), getattr(rest, n)]) for n in BOUND_COLUMNS)
        return _Opened(every.concatenate(rest.ways), one.clocks, *both)

    def _note(self, found: Candidates, needed: Floats) -> None:
        """Keep the candidate that needs the fewest bytes, of candidates that are all too large."""
        at = int(needed.argmin())
        if self.nearest is None or needed[at] < self.nearest.needs:
            self.nearest = EvaluatedSetting(found.setting(at), 0.0, float(needed[at]))

    def _glance(self, one: _Opened) -> Iterator[SearchResult]:
        """Evaluate the most promising candidate of a group."""
        at = int(one.hopes.argmin())
        if one.floors[at] < self._worst and one.looks[at] < 2:
            yield from self._better(self._try(one, at, self._worst), 0.0)

    # -- candidates --------------------------------------------------------------------------------

    def _descend(self) -> Iterator[SearchResult]:
        """Evaluate all candidates that may be better than the best, the most promising first."""
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
        """Sort the candidates of `masks` that may beat `worst`, the most promising first; with
        floors."""
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

    def _move(self) -> Iterator[SearchResult]:
        """Move units between stages of the best, as split so far and as the programme splits it."""
        if self.best is not None and self.moves:
            chain = self.profiles(self.best.setting.placement)
            assert isinstance(chain, Chain)
            even, cut = (
                self.best,
                self.filler.split_by_programme(clock := ChainTimes(chain, self.job), self.best),
            )
            for one in (even,) if cut is even else (even, cut):
                yield from self._better(self.filler.move_units(clock, one, self.moves), self._worst)

    def _others(self) -> None:
        """Search briefly for the best settings that differ from the best in one name each."""
        if self.best is None:
            return
        mine, counts = setting_values(self.best.setting), dict(self.counts)
        for name in KINDS:
            known = [
                one.least
                for (kind, value), one in self.seen.fit.items()
                if kind == name and value != mine[name]
            ]
            worst, left = min(known, default=np.inf), TRIES_PER_KIND
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

    def _try(self, one: _Opened, at: int, worst: float) -> EvaluatedSetting:
        """Evaluate one candidate, if it may beat `worst`; its bounds hold for any order of the
        axes."""
        sums = float(one.beside[at]), float(one.after[at])
        clock = one.clocks[one.ways.one[at]]
        filled = self.filler.evaluate(clock, one.ways.setting(at), worst, *sums)
        self.counts["cut"] -= int(one.looks[at] == 1)
        self.counts["cut" if filled.priced is None else "priced"] += 1
        one.looks[at] = max(1, one.looks[at])
        room = self.job.cluster.memory if filled.room is None else filled.room
        if filled.priced is not None or filled.needs > room:
            one.looks[at] = 2
            self.seen.note(filled)
        return filled

    def _better(self, filled: EvaluatedSetting, floor: float) -> Iterator[SearchResult]:
        """Keep a result where it is better than the best, and yield it."""
        if filled.priced is not None and filled.least < self._worst:
            self.best = filled
            yield self._found(floor, False)

    def _found(self, floor: float, done: bool) -> SearchResult:
        memory = self.job.cluster.memory
        others = self.seen.list_rejected(self.best, memory)
        if self.best is None and self.nearest is not None and not others:
            others = (describe_smallest(self.nearest, memory),)
        refused = tuple(self.refused.values())
        return SearchResult(self.best, floor, Counts(**self.counts), others, refused, done)


# -- other limits ----------------------------------------------------------------------------------


def explain_rejection(
    profiles: Profiles, job: Job, asked: Limits, best: SearchResult, limits: Limits = NO_LIMITS
) -> RejectedSetting:
    """Search under other limits, and say why that result is not the best of all.

    `asked` binds in addition to the `limits` under which `best` was found.
    """
    *_, last = search(profiles, job, asked.combined_with(limits))
    return compare_with_best(
        best.best, last.best or _nearest(last), job.cluster.memory, asked.text()
    )


def _nearest(found: SearchResult) -> EvaluatedSetting | None:
    """Return the setting that needs the fewest bytes, of settings that do not fit."""
    large = [one.filled for one in found.rejected if one.filled is not None]
    return min(large, key=lambda one: one.needs, default=None)
