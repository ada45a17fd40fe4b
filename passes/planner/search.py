"""Search for the quickest setting that fits: best-first search, pruned by lower bounds.

`schedlang tune` uses this file.  It opens groups of placements, evaluates their candidates (the
most promising first), and can say what other limits would cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, groupby

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
BOUND_COLUMNS = ("floors", "hopes", "beside", "after", "looks", "laid", "final")


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
    evaluated    all that the search has evaluated, from which one with less memory continues
    """

    best: EvaluatedSetting | None
    floor: float
    counts: Counts
    rejected: tuple[RejectedSetting, ...] = ()
    refused: tuple[tuple[Placement, Refusal], ...] = ()
    done: bool = False
    attribution: tuple[str, ...] = ()
    evaluated: _Search | None = field(default=None, repr=False, compare=False)

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
    before: SearchResult | None = None,
) -> Iterator[SearchResult]:
    """Search for the quickest setting that fits; each yielded result is better than the one before.

    `profiles` gives the chain of a placement, or None or a refusal where the model cannot be placed
    so.  The last result is `done` and repeats the best.  The best is the optimum over all
    candidates, each split into stages so that its slowest stage is as quick as possible, with the
    fewest recomputed units.  After that the dynamic programme splits the best into stages too, and
    up to `moves` moves of a unit between stages are tried on both.  The best is None where nothing
    fits.  `before` is the result of the same search with more memory: no setting is quicker with
    less, so what it has evaluated is not evaluated again.  Raises Refusal S109 for a pinned order
    that cannot be priced.
    """
    check_pinned_orders(limits)
    evaluator = evaluator_of(profiles, job, limits)
    bound = bounding_job(job, limits)
    if bound is job and before is not None and before.evaluated is not None:
        return before.evaluated.with_less_memory(job, evaluator, progress).run()
    if bound is not job:  # the evaluator for unequal nodes tries orders of axes itself
        usual = limits.filter_admitted("axes", map("-".join, AXIS_ORDERS))[:1]
        limits = replace(limits, pinned={**limits.pinned, "axes": tuple(usual)})
    return _Search(profiles, bound, limits, progress, moves, evaluator).run()


@dataclass
class _Opened:
    """Candidates whose placements split tensors in the same way and which may fit, with bounds.

    final  number and result of the evaluation of a candidate that has `looks` 2; else None
    """

    ways: Candidates
    clocks: Sequence[ChainTimes]
    floors: Floats
    hopes: Floats  # estimated seconds: the order of evaluation
    beside: Floats  # seconds that replicas send while the pipeline runs
    after: Floats  # seconds that replicas send after the pipeline
    looks: Ints  # 0: not evaluated, 1: evaluated once, 2: final (priced, or too large)
    laid: NDArray[np.bool_]  # whether all orders of the axes are candidates
    final: NDArray[np.object_]

    def unlike(self, setting: Setting, name: str) -> NDArray[np.bool_]:
        """Find the candidates whose value of `name` differs from the setting's."""
        best_value, pool = setting_values(setting)[name], self.ways
        if name == "order":
            values = np.array(pool.names)[pool.order]
        elif name == "axes":
            values = np.array(["-".join(order) for order in AXIS_ORDERS])[pool.axes]
        elif hasattr(pool, name):
            values = getattr(pool, name)
        else:
            values = np.array([getattr(chain.placement, name) for chain in pool.chains])[pool.one]
        mask: NDArray[np.bool_] = np.not_equal(values, best_value)
        return mask


def _opened(pool: Candidates, clocks: Sequence[ChainTimes], job: Job, with_order: bool) -> _Opened:
    """Compute bounds of candidates: for their order of the axes if `laid`, else for any order."""
    during, after = replica_floor(pool, job, with_order)
    floors, hopes = (
        np.maximum(seconds, during) + after for seconds in step_bounds(pool, clocks, with_order)
    )
    looks, laid, final = (np.full(len(pool), value) for value in (0, with_order, None))
    return _Opened(pool, clocks, floors, hopes, during, after, looks, laid, final)


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
    numbers: Iterator[int] = field(default_factory=count)  # of evaluations, in their order
    refused: dict[str, tuple[Placement, Refusal]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(vars(Counts()), 0))

    def run(self) -> Iterator[SearchResult]:
        """Open all placements, and evaluate the most promising candidate of each group that splits
        tensors in the same way; then all candidates in all orders of axes; then the best of other
        kinds."""
        if not self.opened:
            yield from self._open_all()
        elif self.best is not None:  # of what was evaluated with more memory
            yield self._found(0.0, False)
        order = sorted(range(len(self.opened)), key=lambda index: self.opened[index].hopes.min())
        for index in order:
            self.opened[index] = self._laid(self.opened[index])
            yield from self._glance(self.opened[index])
        yield from self._descend()
        yield from self._move()
        self._others()
        yield self._found(self._worst, True)

    def with_less_memory(self, job: Job, filler: Evaluator, progress: Progress | None) -> _Search:
        """Continue with less memory: bounds stay, and so do settings that still fit."""
        known = replace(
            self,
            job=job,
            progress=progress,
            filler=filler,
            opened=[],
            best=None,
            seen=BestByKind(),
            counts=dict(self.counts),
        )
        for group in self.opened:
            copied = {name: getattr(group, name).copy() for name in BOUND_COLUMNS}
            known.opened.append(replace(group, **copied))
        finals = [
            (group.final[index], group, index)
            for group in known.opened
            for index in np.flatnonzero(group.looks == 2).tolist()
        ]
        for (_, result), group, index in sorted(finals, key=lambda final: final[0][0]):
            known._keep_if_it_fits(result, group, index)
        return known

    def _keep_if_it_fits(self, result: EvaluatedSetting, group: _Opened, index: int) -> None:
        """Keep what was evaluated with more memory, or let it be evaluated again."""
        if result.priced is None or result.needs <= self.job.cluster.memory:
            self.seen.note(result)
            if result.priced is not None and result.least < self._worst:
                self.best = result
            return
        group.looks[index], group.final[index] = 1, None
        self.counts["priced"] -= 1
        self.counts["cut"] += 1

    # -- placements ------------------------------------------------------------------------------

    def _open_all(self) -> Iterator[SearchResult]:
        """Open all placements, and evaluate the most promising candidate of each group."""
        for _, placements in groupby(
            iter_placements(self.job, self.limits), lambda placement: replace(placement, offload="")
        ):
            opened = self._open(list(placements))
            if opened is not None:
                self.opened.append(opened)
                yield from self._glance(opened)

    def _open(self, placements: list[Placement]) -> _Opened | None:
        """Open all candidates of placements that differ in what is offloaded, with any rows.

        More rows need more bytes: after the first count of rows without a fitting candidate, larger
        counts have none either.
        """
        kept, clocks = list[Candidates](), list[ChainTimes]()
        for rows in microbatch_rows(self.job, placements[0], self.limits):
            chains = self._chains([replace(one, rows=rows) for one in placements])
            candidates = list_candidates(self.job, chains[0], self.limits) if chains else None
            if candidates is None:
                continue
            expanded = candidates.for_chains(chains)
            needed = bytes_floor(expanded, self.job)
            fits = needed <= self.job.cluster.memory
            order_counts = expanded.count_axis_orders(np.arange(len(expanded)))
            self.counts["all"] += int(order_counts.sum())
            self.counts["large"] += int(order_counts[~fits].sum())
            if not fits.any():
                self._note(expanded, needed)
                break
            first_clocks = dict[bool, ChainTimes]()
            for chain in chains:  # an offloaded optimizer changes no unit's time
                hosted, clock = chain.placement.offloads_activations, ChainTimes(chain, self.job)
                clocks.append(replace(first_clocks.setdefault(hosted, clock), chain=chain))
            kept.append(expanded.select(np.flatnonzero(fits)))
        return _opened(concatenate_candidates(kept), clocks, self.job, False) if kept else None

    def _chains(self, placements: list[Placement]) -> list[Chain]:
        """Profile placements that differ in offloading alone; empty where the first has no
        chain."""
        chain = self.profiles(placements[0])
        if isinstance(chain, Chain):
            return [replace(chain, placement=placement) for placement in placements]
        self.counts["refused"] += len(placements)
        if chain is not None:
            self.refused.setdefault(chain.diagnostics[0].code, (placements[0], chain))
        return []

    def _laid(self, group: _Opened) -> _Opened:
        """Expand candidates that may beat the best to every order of their axes.

        The other candidates keep one order: they are needed for reasons only.
        """
        promising = (group.floors < self._worst) & ~group.laid
        if not promising.any():
            return group
        rows, candidates = group.ways.in_all_axis_orders(np.flatnonzero(promising))
        other_rows = np.flatnonzero(~promising)
        bounds = (getattr(group, name)[other_rows] for name in BOUND_COLUMNS)
        rest = _Opened(group.ways.select(other_rows), group.clocks, *bounds)
        expanded = _opened(candidates, group.clocks, self.job, True)
        unchanged = candidates.axes == group.ways.axes[rows]
        expanded.looks = np.where(unchanged, group.looks[rows], 0)
        expanded.final[unchanged] = group.final[rows][unchanged]
        known_floors = np.where(unchanged, group.floors[rows], 0.0)
        expanded.floors = np.maximum(expanded.floors, known_floors)
        columns = (np.concatenate([getattr(expanded, n), getattr(rest, n)]) for n in BOUND_COLUMNS)
        return _Opened(candidates.concatenate(rest.ways), group.clocks, *columns)

    def _note(self, candidates: Candidates, needed: Floats) -> None:
        """Keep the candidate that needs the fewest bytes, of candidates that are all too large."""
        index = int(needed.argmin())
        if self.nearest is None or needed[index] < self.nearest.needs:
            self.nearest = EvaluatedSetting(candidates.setting(index), 0.0, float(needed[index]))

    def _glance(self, group: _Opened) -> Iterator[SearchResult]:
        """Evaluate the most promising candidate of a group."""
        index = int(group.hopes.argmin())
        if group.floors[index] < self._worst and group.looks[index] < 2:
            yield from self._better(self._try(group, index, self._worst), 0.0)

    # -- candidates --------------------------------------------------------------------------------

    def _descend(self) -> Iterator[SearchResult]:
        """Evaluate all candidates that may be better than the best, the most promising first."""
        order, floors = self._in_turn([group.looks < 2 for group in self.opened], self._worst)
        bounds = np.minimum.accumulate(floors[::-1])[::-1]
        for step, (group, index) in enumerate(order):
            if bounds[step] >= self._worst:
                break
            if self.progress is not None:
                self.progress(step, len(floors))
            if floors[step] < self._worst:
                yield from self._better(self._try(group, index, self._worst), float(bounds[step]))

    def _in_turn(
        self, masks: list[NDArray[np.bool_]], worst: float
    ) -> tuple[Iterator[tuple[_Opened, int]], Floats]:
        """Sort the candidates of `masks` that may beat `worst`, the most promising first; with
        floors."""
        groups = self.opened
        rows = [np.flatnonzero(mask & (group.floors < worst)) for mask, group in zip(masks, groups)]
        hopes, floors, index, group_of = (
            np.concatenate([np.zeros(0), *columns])
            for columns in (
                [group.hopes[index] for group, index in zip(groups, rows)],
                [group.floors[index] for group, index in zip(groups, rows)],
                rows,
                [np.full(len(index), k) for k, index in enumerate(rows)],
            )
        )
        order = np.argsort(hopes, kind="stable")
        pairs = zip(group_of[order].astype(int).tolist(), index[order].astype(int).tolist())
        return ((groups[k], candidate) for k, candidate in pairs), floors[order]

    def _move(self) -> Iterator[SearchResult]:
        """Move units between stages of the best, as split so far and as the programme splits it."""
        if self.best is not None and self.moves:
            chain = self.profiles(self.best.setting.placement)
            assert isinstance(chain, Chain)
            even, cut = (
                self.best,
                self.filler.split_by_programme(clock := ChainTimes(chain, self.job), self.best),
            )
            for fit in (even,) if cut is even else (even, cut):
                yield from self._better(self.filler.move_units(clock, fit, self.moves), self._worst)

    def _others(self) -> None:
        """Search briefly for the best settings that differ from the best in one name each."""
        if self.best is None:
            return
        best_values, counts = setting_values(self.best.setting), dict(self.counts)
        for name in KINDS:
            seconds = [
                one.least
                for (kind, value), one in self.seen.fit.items()
                if kind == name and value != best_values[name]
            ]
            worst, tries = min(seconds, default=np.inf), TRIES_PER_KIND
            masks = [one.unlike(self.best.setting, name) & (one.looks < 2) for one in self.opened]
            for (one, index), floor in zip(*self._in_turn(masks, worst)):
                if not tries:
                    break
                if floor < worst:
                    result = self._try(one, index, worst)
                    worst = min(worst, result.least) if result.priced is not None else worst
                    tries -= 1
        self.counts = counts

    @property
    def _worst(self) -> float:
        return np.inf if self.best is None else self.best.least

    def _try(self, group: _Opened, index: int, worst: float) -> EvaluatedSetting:
        """Evaluate one candidate, if it may beat `worst`; its bounds hold for any order of the
        axes."""
        sums = float(group.beside[index]), float(group.after[index])
        clock = group.clocks[group.ways.one[index]]
        result = self.filler.evaluate(clock, group.ways.setting(index), worst, *sums)
        self.counts["cut"] -= int(group.looks[index] == 1)
        self.counts["cut" if result.priced is None else "priced"] += 1
        group.looks[index] = max(1, group.looks[index])
        room = self.job.cluster.memory if result.room is None else result.room
        if result.priced is not None or result.needs > room:
            group.looks[index], group.final[index] = 2, (next(self.numbers), result)
            self.seen.note(result)
        else:  # too slow, also for another worst and with less memory
            group.floors[index] = max(group.floors[index], result.least)
        return result

    def _better(self, result: EvaluatedSetting, floor: float) -> Iterator[SearchResult]:
        """Keep a result where it is better than the best, and yield it."""
        if result.priced is not None and result.least < self._worst:
            self.best = result
            yield self._found(floor, False)

    def _found(self, floor: float, done: bool) -> SearchResult:
        memory = self.job.cluster.memory
        rejected = self.seen.list_rejected(self.best, memory)
        if self.best is None and self.nearest is not None and not rejected:
            rejected = (describe_smallest(self.nearest, memory),)
        refused = tuple(self.refused.values())
        known = self if done else None
        counts = Counts(**self.counts)
        return SearchResult(self.best, floor, counts, rejected, refused, done, evaluated=known)


# -- other limits ----------------------------------------------------------------------------------


def explain_rejection(
    profiles: Profiles, job: Job, question: Limits, best: SearchResult, limits: Limits = NO_LIMITS
) -> RejectedSetting:
    """Search under other limits, and say why that result is not the best of all.

    `question` binds in addition to the `limits` under which `best` was found.
    """
    *_, last = search(profiles, job, question.combined_with(limits))
    return compare_with_best(
        best.best, last.best or _nearest(last), job.cluster.memory, question.text()
    )


def _nearest(result: SearchResult) -> EvaluatedSetting | None:
    """Return the setting that needs the fewest bytes, of settings that do not fit."""
    large = [candidate.filled for candidate in result.rejected if candidate.filled is not None]
    return min(large, key=lambda candidate: candidate.needs, default=None)
