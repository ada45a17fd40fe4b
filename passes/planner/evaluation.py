"""Evaluation of one candidate: its stages, and the fewest recomputed units with which it fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from schedlang.ir.limits import Limits
from schedlang.passes.partition.stage_partition import (
    ROUNDS,
    PartitionProblem,
    StageOption,
    find_partition,
)
from schedlang.passes.planner.bounds import ChainTimes, pipeline_floor
from schedlang.passes.planner.critical_path import count_in_flight, stage_ranks
from schedlang.passes.planner.limits import satisfies_limits
from schedlang.passes.planner.price import collective_seconds, peak_bytes, price, units_by_stage
from schedlang.passes.planner.search_space import Floats, Ints, Job
from schedlang.passes.planner.values import Chain, Price, Setting

MAX_PROGRAMME = 1_000_000  # maximum of ranks * units ** 2: a larger programme takes too long
UnitCounts = tuple[int, ...]
MAX_DISTANCE = 16  # largest distance, in stages, over which a unit is moved


@dataclass(frozen=True)
class EvaluatedSetting:
    """An evaluated setting.

    least   lower bound of its seconds; its price where it has one
    needs   bytes of its fullest rank; `room` the memory of that rank, where ranks are not equal
    priced  None where no price was needed: the setting is too slow by its bound, or does not fit
    """

    setting: Setting
    least: float
    needs: float
    priced: Price | None = None
    room: float | None = None


def evaluation_key(one: EvaluatedSetting) -> tuple[bool, float, float]:
    """Return a sort key, smaller is better: settings that fit by time, others by how full they
    are."""
    return one.priced is None, one.least, one.needs / (one.room or np.inf)


@dataclass(frozen=True)
class Evaluator:
    """Evaluates candidates of one job; caches how many units must be recomputed."""

    job: Job
    limits: Limits = Limits()
    _least: dict[object, tuple[list[tuple[int, ...]], float]] = field(
        default_factory=dict, init=False
    )

    def evaluate(
        self,
        clock: ChainTimes,
        way: Setting,
        worst: float = np.inf,
        beside: float = 0.0,
        after: float = 0.0,
    ) -> EvaluatedSetting:
        """Split a candidate into stages, find what must be recomputed, and price it if it may beat
        `worst`.

        `beside` and `after` are lower bounds of the seconds that its replicas send: while the
        pipeline runs, and after it.
        """
        chain = clock.chain
        cut, span = clock.split_stages(way)
        least = max(span, beside) + after
        if least >= worst:
            return EvaluatedSetting(cut, least, 0.0)
        key = replace(cut, axes=())
        if key not in self._least:  # the same for all orders of the axes
            held = RecomputeBytes(chain, self.job, cut)
            self._least[key] = self._some(held), held.fullest
        some, fullest = self._least[key]
        found = []
        for again in some:
            full, one = replace(cut, again=again), None
            low = max(pipeline_floor(clock, full), beside) + after if again else least
            if low < worst:
                one = price(chain, full, self.job.cluster, self.job.recipe)
                low, fullest, worst = one.seconds, one.peak, min(worst, one.seconds)
            found.append(EvaluatedSetting(full, low, fullest, one))
        return min(found, key=evaluation_key, default=EvaluatedSetting(cut, least, fullest))

    def _some(self, held: RecomputeBytes) -> list[UnitCounts]:
        """Numbers of recomputed units that may be the quickest.

        These are the fewest with which all ranks fit; and with offloaded activations also all
        units, because then only their inputs are offloaded.
        """
        memory, bounds = self.job.cluster.memory, self._bounds(held.cut)
        found, every = held.fewest_recomputed(memory, *bounds), np.array(held.cut.cuts)
        if found is None:
            return []
        both = [found]
        if (
            held.cut.placement.offloads_activations
            and bounds[2]
            and (held.bytes(every) <= memory).all()
        ):
            both.append(every)
        return [tuple(one.tolist()) if one.any() else () for one in both]

    def split_by_programme(self, clock: ChainTimes, filled: EvaluatedSetting) -> EvaluatedSetting:
        """Split into stages by the dynamic programme, each with what it must recompute, if that is
        quicker.

        Settings with several stages on a rank, and chains that are too long, stay as they are.
        """
        setting, chain = filled.setting, clock.chain
        if setting.chunks > 1 or setting.pp * chain.length**2 > MAX_PROGRAMME:
            return filled
        found = find_partition(self._problem(clock, setting), ROUNDS)
        if found is None or found.units == setting.cuts:
            return filled
        one = self.evaluate(clock, replace(setting, cuts=found.units, again=()), filled.least)
        return filled if one.priced is None or one.least >= filled.least else one

    def _problem(self, clock: ChainTimes, setting: Setting) -> PartitionProblem:
        """The stages of a setting as a problem for the programme; bytes are approximated by sums
        over units."""
        chain, recipe, cluster = clock.chain, self.job.recipe, self.job.cluster
        counts = [run.count for run in chain.runs]
        sizes = (recipe.moments + recipe.master, recipe.gradient, recipe.parameter)
        each = sum(z / setting.dp if setting.zero > at else z for at, z in enumerate(sizes))
        units = [run.unit for run in chain.runs]
        spares = [max(0.0, one.kept - one.input) for one in units]
        rows = [(one.numel * each, one.kept, spare) for one, spare in zip(units, spares)]
        sums = np.repeat(np.vstack([clock.times(setting), np.array(rows).T]), counts, axis=1)
        ahead, back, again, state, kept, spare = np.pad(sums.cumsum(1), ((0, 0), (1, 0)))
        flying = count_in_flight(
            setting.order, setting.pp, setting.micro, 1, slices=setting.placement.slices
        )[0].tolist()[::-1]
        room = cluster.memory - max(one.peak for one in units)

        def menu(first: int, last: int, devices: range, after: int) -> Iterator[StageOption]:
            over = state[last] - state[first] + flying[after] * (kept[last] - kept[first]) - room
            often = int(np.searchsorted(spare, spare[first] + over / flying[after]))
            if (many := max(first, often)) <= last:
                more = again[many] - again[first]
                yield StageOption(ahead[last] - ahead[first], back[last] - back[first] + more)

        link, ends = setting.stride("pp"), np.repeat([one.output for one in units], counts)
        sends = [
            collective_seconds(cluster, "send", float(size), setting.pp, link) for size in ends
        ]
        return PartitionProblem(
            len(ends),
            menu,
            setting.passes,
            setting.pp,
            stages=setting.pp,
            send=lambda unit, device: sends[unit - 1],
        )

    def move_units(
        self, clock: ChainTimes, filled: EvaluatedSetting, moves: int
    ) -> EvaluatedSetting:
        """Try up to `moves` moves of a unit between stages, and keep each that makes a step
        quicker.

        A rank that must recompute much so gets fewer units than the others.  Of several stages on a
        rank, the stages that no other rank waits for recompute more.
        """
        best, moved = filled, True
        while moved:
            moved = False
            for one in self._near(clock, best):
                if not moves:
                    return best
                moves -= 1
                if one.priced is not None and one.least < best.least * (1 - 1e-6):
                    best, moved = one, True
                    break
        return best

    def _near(self, clock: ChainTimes, best: EvaluatedSetting) -> Iterator[EvaluatedSetting]:
        """Evaluate settings with one unit more or less on some stages, or recomputed there."""
        setting, job = best.setting, self.job
        for again in _shifts(setting):
            one = replace(setting, again=again if any(again) else ())
            priced = price(clock.chain, one, job.cluster, job.recipe)
            if priced.peak <= job.cluster.memory and satisfies_limits(self.limits, one):
                yield EvaluatedSetting(one, priced.seconds, priced.peak, priced)
        for cuts in neighbour_splits(setting.cuts):
            yield self.evaluate(clock, replace(setting, cuts=cuts, again=()), best.least)

    def _bounds(self, cut: Setting) -> tuple[bool, bool, bool]:
        """Return whether no unit, some units, all units may be recomputed."""
        none, some, every = (self.limits.admits("again", name) for name in ("none", "some", "all"))
        return none, some, every


def _shifts(setting: Setting) -> Iterator[tuple[int, ...]]:
    """Numbers of recomputed units: one less on a stage, and possibly one more on another of its
    rank."""
    rank = stage_ranks(setting.order, setting.pp, setting.chunks)
    free = (
        setting.chunks > 1 or setting.placement.offloads_activations
    )  # otherwise fewer would not fit
    for one in np.flatnonzero(setting.again) if free else ():
        others = [at for at in np.flatnonzero(rank == rank[one]) if at != one]
        for other in (None, *others):
            shifted = list(setting.again)
            shifted[one] -= 1
            if other is not None:
                shifted[other] += 1
            if other is None or shifted[other] <= setting.cuts[other]:
                yield tuple(shifted)


def neighbour_splits(cuts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield splits with one unit moved from one stage to another, small distances first."""
    stages = range(len(cuts))
    for far in range(1, min(len(cuts), MAX_DISTANCE + 1)):
        for one in stages:
            for other in (one - far, one + far):
                if cuts[one] > 1 and other in stages:
                    moved = list(cuts)
                    moved[one] -= 1
                    moved[other] += 1
                    yield tuple(moved)


@dataclass
class RecomputeBytes:
    """Bytes of the ranks of a split, as a function of how many units each stage recomputes."""

    chain: Chain
    job: Job
    cut: Setting
    fullest: float = field(default=0.0)

    def fewest_recomputed(
        self, memory: float | Floats, none: bool, some: bool, every: bool
    ) -> Ints | None:
        """Find the fewest units of each stage to recompute so that all ranks fit; None where none
        do.

        The more units of a run are recomputed, the less a rank holds; but the first recomputed unit
        brings its activations back in addition to what is saved.  So the ends of runs are tried
        from the first on, and then the number is found by bisection before the first end that fits,
        for all ranks at once.  Of several stages on a rank the first is filled first: its
        activations are held longest.
        """
        cuts, rank = (
            np.array(self.cut.cuts),
            stage_ranks(self.cut.order, self.cut.pp, self.cut.chunks),
        )
        free = self.bytes(np.zeros_like(cuts))
        if none and (free <= memory).all():
            return np.zeros_like(cuts)
        if not some:
            self.fullest = float(self.bytes(cuts).max())
            return cuts if every and self.fullest <= memory else None
        ends = self._ends(rank)
        low, high = np.zeros_like(free, dtype=np.int64), np.where(free <= memory, 0, -1)
        needs = free
        for end in ends.T:
            if (high >= 0).all():
                break
            held = self.bytes(self._spread(end, rank, cuts))
            needs = np.minimum(needs, held)
            low = np.where((high < 0) & (held > memory), end, low)
            high = np.where((high < 0) & (held <= memory), end, high)
        self.fullest = float(needs.max())
        if (high < 0).any():
            return None
        while (unfinished := high - low > 1).any():  # high fits, low does not
            middle = np.where(unfinished, (low + high) // 2, high)
            fits = self.bytes(self._spread(middle, rank, cuts)) <= memory
            high, low = (
                np.where(unfinished & fits, middle, high),
                np.where(unfinished & ~fits, middle, low),
            )
        return self._permitted(self._spread(high, rank, cuts), none, every)

    def _ends(self, rank: Ints) -> Ints:
        """Units of each place up to the end of each of its runs [places, runs], in order."""
        made, _ = units_by_stage(self.chain, self.cut.cuts)
        ends: list[list[int]] = [[] for _ in range(self.cut.pp)]
        for stage, runs in enumerate(made.astype(np.int64).tolist()):
            mine = ends[rank[stage]]
            for count in filter(None, runs):
                mine.append((mine[-1] if mine else 0) + count)
        longest = max(map(len, ends))
        return np.array([mine + mine[-1:] * (longest - len(mine)) for mine in ends])

    def _permitted(self, found: Ints, none: bool, every: bool) -> Ints | None:
        """Adjust the number found where recomputing no unit, or all units, is not permitted."""
        if not found.any() and not none:
            found[0] = 1
        if (found == np.array(self.cut.cuts)).all() and not every:
            return None
        return found

    def _spread(self, often: Ints, rank: Ints, cuts: Ints) -> Ints:
        """Distribute a number of units of each rank over its stages."""
        found, left = np.zeros_like(cuts), often.copy()
        for stage in range(len(cuts)):
            found[stage] = min(cuts[stage], left[rank[stage]])
            left[rank[stage]] -= found[stage]
        return found

    def bytes(self, again: Ints) -> Floats:
        """Bytes of the rank of each place at its fullest moment."""
        made, more = units_by_stage(self.chain, self.cut.cuts, tuple(again.tolist()))
        return np.array(peak_bytes(self.chain, self.cut, self.job.recipe, made, more))
