"""Run both sides of a verdict: the original in this process, the program on its ranks.

Both sides drop the same elements. To find them, both sides first run every batch without dropout,
and each rank looks up the inputs of its dropout calls in the inputs of the original's.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.passes.judge.discrete_choices import ChoiceRecorder
from schedlang.passes.judge.dropout_masks import (
    DropoutByMasks,
    DropoutRecorder,
    MaskPlace,
    OriginalDropout,
    PlaceFinder,
    RankDropout,
    RankDropoutSites,
    UnknownDropout,
    WithoutDropout,
    covers_all,
)
from schedlang.passes.judge.program import Make
from schedlang.passes.judge.record import RunRecord
from schedlang.passes.judge.reduction_dtype import find_reductions
from schedlang.passes.judge.state_loading import check_loading
from schedlang.passes.judge.step_draws import (
    EndStates,
    SeededSequential,
    differing_seeds,
    unequal_draws,
)
from schedlang.passes.judge.subject import ProgramSubject
from schedlang.passes.verify.mapped_tensors import limit_malloc_cache
from schedlang.passes.verify.observe import Batch, Condition, Observation, observe
from schedlang.passes.verify.original import count_rows
from schedlang.passes.verify.proof_case import Case, copy_original
from schedlang.runtime.comm import world as comm
from schedlang.runtime.float64 import Float64, as_float64, to_float64
from schedlang.runtime.launch.pool import Pool
from schedlang.runtime.modes import enter_modes

MOST_TRIED = 8  # modules that are examined one by one
Progress = Callable[..., None]
# by a rank's module, in the order of its calls
PlacesByModule = Mapping[str, Sequence[MaskPlace | None]]


@dataclass(frozen=True)
class RankTask:
    """Arguments that every rank receives.

    drops    the dropout calls of the original
    float64  both sides run in float64 and choose freely; otherwise discrete choices are recorded
    quiet    ranks print on standard error
    """

    make: Make
    original: nn.Module
    conditions: tuple[Condition, ...]
    drops: OriginalDropout
    float64: bool
    quiet: bool = True

    @property
    def modes(self) -> tuple[Any, ...]:
        """Modes that every step runs under, besides the dropout mode."""
        return (Float64(),) if self.float64 else ()

    @contextlib.contextmanager
    def prepare(
        self, record: RunRecord
    ) -> Iterator[tuple[RankDropout, Callable[[Condition], ProgramSubject]]]:
        """Yield this rank's dropout mode, and a function that makes the program for a condition."""
        lines = contextlib.redirect_stdout(sys.stderr) if self.quiet else contextlib.nullcontext()
        # a compiled region does not reach the dropout mode
        stance = "force_eager" if self.drops.sites else "default"
        with lines, torch.compiler.set_stance(stance):
            places = self._find_places(record) if self.drops.sites else {}
            dropping = RankDropout(
                self.drops.seed, record.dropout_sites.disabled_modules(self.drops)
            )

            def made(condition: Condition) -> ProgramSubject:
                def begin(step: int) -> None:
                    dropping.calls.keeps = record.examines_reductions(condition.name, step)
                    dropping.begin(places.get(self.drops.batch_number(condition, step), {}))

                return ProgramSubject(self.make, self.original, condition, record, begin)

            yield dropping, made

    def _find_places(self, record: RunRecord) -> dict[int, PlacesByModule]:
        """Run every batch once without dropout, and find the places of this rank's dropout."""
        places_by_batch: dict[int, PlacesByModule] = {}
        subject: ProgramSubject | None = None
        others: set[str] = set()
        for condition, step, batch in _all_steps(self.conditions):
            number = self.drops.batch_number(condition, step)
            if number in places_by_batch:
                continue
            finder = PlaceFinder(self.drops.read_batch(number))
            with enter_modes(*self.modes, finder):
                subject = subject or ProgramSubject(self.make, self.original, condition, record)
                finder.names = subject
                subject.forward_backward(batch)
            places_by_batch[number] = finder.found
            others |= {site for site, _ in finder.others}
        assert subject is not None
        found_sites, unknown = set(), {}
        for site_places in places_by_batch.values():
            for site, places in site_places.items():
                found_sites |= {place[0] for place in places if place is not None}
                if None in places:
                    unknown[site] = subject.original_module(site) or "?"
        sites, unknown_names, other_sites = zip(
            *comm.all_gather_object((found_sites, unknown, others))
        )
        joined = {site: original for names in unknown_names for site, original in names.items()}
        record.dropout_sites = RankDropoutSites(
            frozenset().union(*sites),
            joined,
            frozenset().union(*other_sites),
            self._find_excess(places_by_batch) if joined and self.float64 else frozenset(),
        )
        return places_by_batch

    def _find_excess(self, places_by_batch: Mapping[int, PlacesByModule]) -> frozenset[str]:
        """Return modules that drop more than the original does, if that changes the first step.

        All elements that the original drops must be found elsewhere on ranks.
        """
        condition = self.conditions[0]
        number = self.drops.batch_number(condition, 0)
        places = places_by_batch[number]
        ranks = comm.all_gather_object(places)
        if not covers_all(self.drops.read_batch(number), ranks):
            return frozenset()

        def gradients(mode: Any) -> dict[str, Tensor]:
            with enter_modes(*self.modes, mode):
                subject = ProgramSubject(self.make, self.original, condition, RunRecord())
                subject.forward_backward(condition.batches[0])
                return subject.local_gradients()

        before = gradients(WithoutDropout())

        def changed(sites: Sequence[str]) -> bool:
            after = gradients(UnknownDropout(self.drops.seed, places, sites))
            equal = before.keys() == after.keys() and all(
                torch.allclose(after[name], value, rtol=1e-6) for name, value in before.items()
            )
            return not all(comm.all_gather_object(equal))

        sites = sorted({n for found in ranks for n, calls in found.items() if None in calls})
        if not changed(sites):
            return frozenset()
        if len(sites) > MOST_TRIED:
            return frozenset(sites)
        return frozenset(site for site in sites if changed([site]))


def _unequal_draws(task: RankTask, record: RunRecord) -> dict[str, list[int]]:
    """Return the generators that ranks draw from less or more often than the original."""
    unequal: dict[str, list[int]] = {}
    for condition in task.conditions:
        expected = task.drops.drawn[task.drops.batch_number(condition, 0)]
        ranks = comm.all_gather_object(record.drawn.get(condition.name, {}))
        unequal |= unequal_draws(expected, ranks)
    return unequal


OTHER_MASK = "it is computed again with another state of the generator: another mask"


def _unequal_generators(states: Sequence[Mapping[tuple[str, int, bytes], bytes]]) -> dict[str, str]:
    """Find modules whose ranks drop the same places from generators in different states."""
    ranks: dict[tuple[str, int, bytes], dict[bytes, int]] = {}
    for rank, rank_states in enumerate(states):
        for key, state in rank_states.items():
            ranks.setdefault(key, {}).setdefault(state, rank)
    template = "ranks {} have the same of it, and draw from generators in other states: other masks"
    return {
        key[0]: template.format(", ".join(map(str, first_ranks.values())))
        for key, first_ranks in ranks.items()
        if len(first_ranks) > 1
    }


def _all_steps(conditions: Sequence[Condition]) -> Iterator[tuple[Condition, int, Batch]]:
    return ((run, step, batch) for run in conditions for step, batch in enumerate(run.batches))


@dataclass(frozen=True)
class Trial:
    """A program and its original, and the conditions under which both train.

    case        the original at the start of training, in float64 (`float64`) or in a low dtype
    conditions  the training runs, under the names that ranks use
    """

    case: Case
    make: Make
    world: int
    conditions: tuple[Condition, ...]
    pool: Pool
    float64: bool
    quiet: bool = False
    drops: OriginalDropout = OriginalDropout("", 0, {})

    @property
    def modes(self) -> tuple[Any, ...]:
        """Modes of the original's runs; its dropout mode draws masks that ranks apply in part."""
        return (
            *((Float64(),) if self.float64 else ()),
            DropoutByMasks(self.drops.seed, self.drops.off),
        )

    def of_step(self, condition: Condition, step: int) -> Trial:
        """Return a trial of one step's batch alone, from the initial weights."""
        run = replace(condition, batches=condition.batches[step : step + 1])
        return replace(self, conditions=(run,), quiet=True)

    @property
    def in_float64(self) -> Trial:
        """The same trial in float64, with the weights that the model has now."""
        case = self.case.with_model(as_float64(self.case.plan.model.model))
        conditions = [
            replace(run, batches=tuple(to_float64(dict(b)) for b in run.batches))
            for run in self.conditions
        ]
        return replace(self, case=case, conditions=tuple(conditions), float64=True)

    def run_on_ranks(self, part: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """Call a function with a `RankTask` first on all ranks; return the results by rank."""
        module = self.case.plan.model.model
        task = RankTask(self.make, module, self.conditions, self.drops, self.float64, self.quiet)
        results: list[Any] = self.pool.run(part, self.world, task, *args, **options)
        return results

    def train(self, folder: str, progress: Progress) -> tuple[Trial, Observation, RunRecord]:
        """Train on ranks, with dropout where the places of the masks are known.

        If some rank's dropout calls vary from step to step, train once more without any dropout.
        The returned trial says which modules drop. Large tensors are written to files in `folder`.
        """
        trial = replace(self, drops=self._record_dropout(folder))
        observation, record = trial._train_on_ranks(progress)
        if record.irregular_modules or record.simulation is not None and trial.drops.sites:
            trial = replace(trial, drops=replace(trial.drops, off=frozenset(trial.drops.sites)))
            names = trial.drops.sites if record.simulation else record.irregular_modules
            irregular = dict.fromkeys(names, "?")
            observation, record = trial._train_on_ranks(progress)
            record.dropout_sites = replace(
                record.dropout_sites, unknown={**record.dropout_sites.unknown, **irregular}
            )
        off = record.dropout_sites.disabled_modules(trial.drops)
        return replace(trial, drops=replace(trial.drops, off=off)), observation, record

    def _record_dropout(self, folder: str) -> OriginalDropout:
        """Record the inputs of the original's dropout calls in every batch, with dropout off."""
        batches: list[Batch] = []
        numbers: dict[tuple[str, int], int] = {}
        drawn: dict[int, EndStates] = {}
        sites: dict[str, None] = {}
        others: dict[tuple[str, str], None] = {}
        still: set[str] | None = None
        for condition, step, batch in _all_steps(self.conditions):
            same_batch = (k for k, earlier in enumerate(batches) if earlier is batch)
            number = next(same_batch, len(batches))
            numbers[condition.name, step] = number
            if number < len(batches):
                continue
            batches.append(batch)
            recorder = DropoutRecorder()
            with enter_modes(*self.modes[:-1], recorder):
                original = SeededSequential(
                    copy_original(self.case), loss=self.case.loss, follow=False
                )
                original.forward_backward(batch, range(count_rows(batch)))
            torch.save(recorder.drops, f"{folder}/{number}")
            drawn[number] = original.drawn
            sites |= dict.fromkeys(drop.site for drop in recorder.drops)
            others |= dict.fromkeys(sorted(recorder.others))
            evaluating = {n for n, m in original.module.named_modules() if not m.training}
            still = evaluating if still is None else still & evaluating
        facts = tuple(sites), tuple(others), frozenset(still or ())
        return OriginalDropout(folder, self.case.seed, numbers, *facts, drawn=drawn)

    def drops_in_evaluation(self) -> bool:
        """Return whether the original would drop something in evaluation."""
        mode = DropoutByMasks(self.drops.seed, self.drops.off)
        original = SeededSequential(copy_original(self.case), loss=self.case.loss, follow=False)
        with enter_modes(*self.modes[:-1], mode):
            original.eval_step(self.conditions[0].batches[0])
        return bool(mode.evaluated)

    def _train_on_ranks(self, progress: Progress) -> tuple[Observation, RunRecord]:
        steps = sum(len(condition.batches) for condition in self.conditions)
        counter = itertools.count(1)
        stage = f"{self.world} rank{'s' * (self.world > 1)}"

        def heard(rank: int, message: object) -> None:
            if rank == 0:
                progress(stage, min(next(counter), steps), steps)

        progress(stage, 0, steps)
        result: tuple[Observation, RunRecord] = self.run_on_ranks(_train, on_progress=heard)[0]
        return result


def _train(task: RankTask) -> tuple[Observation, RunRecord] | None:
    """Train on one rank; only rank 0 returns its observation, and what all ranks chose."""
    limit_malloc_cache()
    record, recorder = RunRecord(folder=task.drops.folder), ChoiceRecorder()
    made: list[ProgramSubject] = []
    with task.prepare(record) as (dropping, program), enter_modes(*task.modes, dropping):

        def subject(condition: Condition) -> ProgramSubject:
            made.clear()
            made.append(program(condition))
            return made[0]

        with contextlib.nullcontext() if task.float64 else enter_modes(recorder):
            observation = observe(
                subject, task.conditions, keep=comm.rank() == 0, folder=task.drops.folder
            )
        record.choices = recorder.gather()
        record.loaded = check_loading(made[0], step=task.float64)
    record.unequal_draws = _unequal_draws(task, record)
    record.other_seeds = differing_seeds(
        task.drops.generators, comm.all_gather_object(record.seeds)
    )
    recomputed, evaluated = (
        {made[0].original_module(site) or site for site in sites}
        for sites in (dropping.unequal_recomputations, dropping.evaluated)
    )
    calls = dropping.calls
    reduced = find_reductions(calls.reductions, record, comm.rank())
    call_facts = calls.low_dtypes, sorted({*calls.unwaited.values()}), calls.strided, reduced
    rank_facts = comm.all_gather_object(
        (dropping.irregular_modules, recomputed, dropping.generator_states, evaluated, call_facts)
    )
    for rank, (irregular, recomputed, _, evaluated, call_facts) in enumerate(rank_facts):
        low_dtypes, unwaited, strided, reductions = call_facts
        record.irregular_modules |= irregular
        record.evaluated |= evaluated
        record.masks |= dict.fromkeys(recomputed, OTHER_MASK)
        record.low_dtypes |= low_dtypes if task.float64 else set()
        record.strided |= strided
        for name, found in reductions.items():
            record.reductions.setdefault(name, set()).update(found)
        for call in unwaited:
            record.unwaited.setdefault(call, []).append(rank)
    record.masks |= _unequal_generators([states for _, _, states, *_ in rank_facts])
    sys.stdout.flush()
    return (observation, record) if comm.rank() == 0 else None
