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
from schedlang.passes.planner.bounds import ChainTimes, critical_floor, pipeline_floor
from schedlang.passes.planner.critical_path import count_in_flight, stage_ranks, stages_on_ranks
from schedlang.passes.planner.limits import satisfies_limits
from schedlang.passes.planner.price import collective_seconds, peak_bytes, price
from schedlang.passes.planner.search_space import Floats, Ints, Job
from schedlang.passes.planner.stage_contents import units_by_stage
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


def evaluation_key(evaluated: EvaluatedSetting) -> tuple[bool, float, float]:
    """Return a sort key, smaller is better: settings that fit by time, others by how full they
    are."""
    return evaluated.priced is None, evaluated.least, evaluated.needs / (evaluated.room or np.inf)


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
        setting: Setting,
        worst: float = np.inf,
        during: float = 0.0,
        after: float = 0.0,
    ) -> EvaluatedSetting:
        """Split a candidate into stages, find what must be recomputed, and price it if it may beat
        `worst`.

        `during` and `after` are lower bounds of the seconds that its replicas send: while the
        pipeline runs, and after it.
        """
        chain = clock.chain
        cut, span = clock.split_stages(setting)
        least = max(span, during) + after
        if least < worst:
            least = max(least, critical_floor(clock, cut) + after)
        if least >= worst:
            return EvaluatedSetting(cut, least, 0.0)
        key = replace(cut, axes=())
        if key not in self._least:  # the same for all orders of the axes
            usage = RecomputeBytes(chain, self.job, cut)
            self._least[key] = self._some(usage), usage.fullest
        options, fullest = self._least[key]
        evaluated = []
        for again in options:
            recomputed, priced = replace(cut, again=again), None
            floor = max(pipeline_floor(clock, recomputed), during) + after if again else least
            if floor < worst:
                priced = price(chain, recomputed, self.job.cluster, self.job.recipe)
                floor, fullest, worst = priced.seconds, priced.peak, min(worst, priced.seconds)
            evaluated.append(EvaluatedSetting(recomputed, floor, fullest, priced))
        return min(evaluated, key=evaluation_key, default=EvaluatedSetting(cut, least, fullest))

    def _some(self, usage: RecomputeBytes) -> list[UnitCounts]:
        """Numbers of recomputed units that may be the quickest.

        These are the fewest with which all ranks fit; and with offloaded activations also all
        units, because then only their inputs are offloaded.
        """
        memory, bounds = self.job.cluster.memory, self._bounds(usage.cut)
        fewest, all_units = usage.fewest_recomputed(memory, *bounds), np.array(usage.cut.cuts)
        if fewest is None:
            return []
        options = [fewest]
        if (
            usage.cut.placement.offloads_activations
            and bounds[2]
            and (usage.bytes(all_units) <= memory).all()
        ):
            options.append(all_units)
        return [tuple(counts.tolist()) if counts.any() else () for counts in options]

    def split_by_programme(self, clock: ChainTimes, result: EvaluatedSetting) -> EvaluatedSetting:
        """Split into stages by the dynamic programme, each with what it must recompute, if that is
        quicker.

        Settings with several stages on a rank, and chains that are too long, stay as they are.
        """
        setting, chain = result.setting, clock.chain
        if setting.chunks > 1 or setting.pp * chain.length**2 > MAX_PROGRAMME:
            return result
        partition = find_partition(self._problem(clock, setting), ROUNDS)
        if partition is None or partition.units == setting.cuts:
            return result
        tried = self.evaluate(clock, replace(setting, cuts=partition.units, again=()), result.least)
        return result if tried.priced is None or tried.least >= result.least else tried

    def _problem(self, clock: ChainTimes, setting: Setting) -> PartitionProblem:
        """The stages of a setting as a problem for the programme; bytes are approximated by sums
        over units."""
        chain, recipe, cluster = clock.chain, self.job.recipe, self.job.cluster
        counts = [run.count for run in chain.runs]
        sizes = (recipe.moments + recipe.master, recipe.gradient, recipe.parameter)
        param_bytes = sum(z / setting.dp if setting.zero > k else z for k, z in enumerate(sizes))
        units = [run.unit for run in chain.runs]
        spares = [max(0.0, u.kept - u.input) for u in units]
        rows = [(u.numel * param_bytes, u.kept, spare) for u, spare in zip(units, spares)]
        sums = np.repeat(np.vstack([clock.times(setting), np.array(rows).T]), counts, axis=1)
        fwd, bwd, recomputed, state, kept, spare = np.pad(sums.cumsum(1), ((0, 0), (1, 0)))
        in_flight = count_in_flight(
            setting.order, setting.pp, setting.micro, 1, slices=setting.placement.slices
        )[0].tolist()[::-1]
        room = cluster.memory - max(u.peak for u in units)

        def menu(begin: int, end: int, devices: range, after: int) -> Iterator[StageOption]:
            excess = state[end] - state[begin] + in_flight[after] * (kept[end] - kept[begin]) - room
            needed = int(np.searchsorted(spare, spare[begin] + excess / in_flight[after]))
            if (reached := max(begin, needed)) <= end:
                extra = recomputed[reached] - recomputed[begin]
                yield StageOption(fwd[end] - fwd[begin], bwd[end] - bwd[begin] + extra)

        link, ends = setting.stride("pp"), np.repeat([u.output for u in units], counts)
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
        self, clock: ChainTimes, result: EvaluatedSetting, moves: int
    ) -> EvaluatedSetting:
        """Try up to `moves` moves of a unit between stages, and keep each that makes a step
        quicker.

        A rank that must recompute much so gets fewer units than the others.  Of several stages on a
        rank, the stages that no other rank waits for recompute more.
        """
        best, moved = result, True
        while moved:
            moved = False
            for neighbour in self._near(clock, best):
                if not moves:
                    return best
                moves -= 1
                if neighbour.priced is not None and neighbour.least < best.least * (1 - 1e-6):
                    best, moved = neighbour, True
                    break
        return best

    def _near(self, clock: ChainTimes, best: EvaluatedSetting) -> Iterator[EvaluatedSetting]:
        """Evaluate settings with one unit more or less on some stages, or recomputed there."""
        setting, job = best.setting, self.job
        for again in _shifts(setting):
            candidate = replace(setting, again=again if any(again) else ())
            priced = price(clock.chain, candidate, job.cluster, job.recipe)
            if priced.peak <= job.cluster.memory and satisfies_limits(self.limits, candidate):
                yield EvaluatedSetting(candidate, priced.seconds, priced.peak, priced)
        for cuts in neighbour_splits(setting.cuts):
            yield self.evaluate(clock, replace(setting, cuts=cuts, again=()), best.least)

    def _bounds(self, cut: Setting) -> tuple[bool, bool, bool]:
        """Return whether no unit, some units, all units may be recomputed."""
        none, some, all_ = (self.limits.admits("again", name) for name in ("none", "some", "all"))
        return none, some, all_


def _shifts(setting: Setting) -> Iterator[tuple[int, ...]]:
    """Numbers of recomputed units: one less on a stage, and possibly one more on another of its
    rank."""
    rank = stage_ranks(setting.order, setting.pp, setting.chunks)
    free = (
        setting.chunks > 1 or setting.placement.offloads_activations
    )  # otherwise fewer would not fit
    for stage in np.flatnonzero(setting.again) if free else ():
        peers = [peer for peer in np.flatnonzero(rank == rank[stage]) if peer != stage]
        for other in (None, *peers):
            shifted = list(setting.again)
            shifted[stage] -= 1
            if other is not None:
                shifted[other] += 1
            if other is None or shifted[other] <= setting.cuts[other]:
                yield tuple(shifted)


def neighbour_splits(cuts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield splits with one unit moved from one stage to another, small distances first."""
    stages = range(len(cuts))
    for distance in range(1, min(len(cuts), MAX_DISTANCE + 1)):
        for source in stages:
            for target in (source - distance, source + distance):
                if cuts[source] > 1 and target in stages:
                    split = list(cuts)
                    split[source] -= 1
                    split[target] += 1
                    yield tuple(split)


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

        The bytes of every number of units of a rank are counted at once, and each rank takes the
        first number that fits: more of equal units need less, but the first recomputed unit brings
        its activations back in addition to what is saved.  Of several stages on a rank the first
        is filled first: its activations are held longest.
        """
        cuts = np.array(self.cut.cuts)
        free = self.bytes(np.zeros_like(cuts)) if none else np.full(self.cut.pp, np.inf)
        if (free <= memory).all():
            return np.zeros_like(cuts)
        if not some:
            self.fullest = float(self.bytes(cuts).max())
            return cuts if every and self.fullest <= memory else None
        choices = self._choices()
        rank_bytes = self.bytes(choices)
        self.fullest = float(rank_bytes.min(0).max())
        fits = rank_bytes <= memory
        if not fits.any(0).all():
            return None
        ranks = stage_ranks(self.cut.order, self.cut.pp, self.cut.chunks)
        counts = choices[fits.argmax(0)[ranks], np.arange(len(cuts))]
        return self._permitted(counts, none, every)

    def _choices(self) -> Ints:
        """List recomputed units of each stage [numbers, stages] where each rank recomputes 0, 1, ..
        units, at most all of its own."""
        on_rank = stages_on_ranks(self.cut.order, self.cut.pp, self.cut.chunks)
        cuts = np.array(self.cut.cuts)[on_rank]
        ends = cuts.cumsum(1)
        numbers = np.arange(int(ends[:, -1].max()) + 1)[:, None, None]
        choices = np.zeros((len(numbers), len(self.cut.cuts)), dtype=np.int64)
        choices[:, on_rank] = np.clip(numbers - ends + cuts, 0, cuts)
        return choices

    def _permitted(self, counts: Ints, none: bool, every: bool) -> Ints | None:
        """Adjust the number found where recomputing no unit, or all units, is not permitted."""
        if not counts.any() and not none:
            counts[0] = 1
        if (counts == np.array(self.cut.cuts)).all() and not every:
            return None
        return counts

    def bytes(self, again: Ints) -> Floats:
        """Bytes of the rank of each place at its fullest moment [..., places], for recomputed units
        of each stage [..., stages]."""
        counts, recomputed = units_by_stage(self.chain, self.cut.cuts, again)
        return peak_bytes(self.chain, self.cut, self.job.recipe, counts, recomputed)
