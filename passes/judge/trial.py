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
from torch import nn

from schedlang.passes.judge.choices import Choosing
from schedlang.passes.judge.loaded import reloaded
from schedlang.passes.judge.masks import Dropping, Drops, Finding, Met, Noting, Place, Placed
from schedlang.passes.judge.program import Make
from schedlang.passes.judge.record import Kept
from schedlang.passes.judge.subject import Judged
from schedlang.passes.verify.observe import Batch, Condition, Observation, observe
from schedlang.passes.verify.original import Sequential, rows
from schedlang.passes.verify.sides import Case, twin
from schedlang.passes.verify.spilled import unhoarded
from schedlang.runtime.comm import world as comm
from schedlang.runtime.float64 import Float64, as_float64
from schedlang.runtime.float64 import widened as wide
from schedlang.runtime.launch.pool import Pool
from schedlang.runtime.modes import ambient

Progress = Callable[..., None]
Places = Mapping[str, Sequence[Place | None]]  # by a rank's module, in the order of its calls


@dataclass(frozen=True)
class Given:
    """Arguments that every rank receives.

    `drops`  the dropout calls of the original
    `wide`   both sides run in float64 and choose freely; otherwise discrete choices are recorded
    `aside`  ranks print on standard error
    """

    make: Make
    original: nn.Module
    conditions: tuple[Condition, ...]
    drops: Drops
    wide: bool
    aside: bool = True

    @property
    def modes(self) -> tuple[Any, ...]:
        """Modes that every step runs under, besides the dropout mode."""
        return (Float64(),) if self.wide else ()

    @contextlib.contextmanager
    def ready(self, record: Kept) -> Iterator[tuple[Placed, Callable[[Condition], Judged]]]:
        """Yield this rank's dropout mode, and a function that makes the program for a condition."""
        lines = contextlib.redirect_stdout(sys.stderr) if self.aside else contextlib.nullcontext()
        # a compiled region does not reach the dropout mode
        stance = "force_eager" if self.drops.sites else "default"
        with lines, torch.compiler.set_stance(stance):
            places = self._find_places(record) if self.drops.sites else {}
            dropping = Placed(self.drops.seed, record.met.off(self.drops))

            def made(condition: Condition) -> Judged:
                def begin(step: int) -> None:
                    dropping.begin(places.get(self.drops.number(condition, step), {}))

                return Judged(self.make, self.original, condition, record, begin)

            yield dropping, made

    def _find_places(self, record: Kept) -> dict[int, Places]:
        """Run every batch once without dropout, and find the places of this rank's dropout."""
        found: dict[int, Places] = {}
        judged: Judged | None = None
        others: set[str] = set()
        for condition, step, batch in _all_steps(self.conditions):
            number = self.drops.number(condition, step)
            if number in found:
                continue
            finding = Finding(self.drops.of(number))
            with ambient(*self.modes, finding):
                judged = judged or Judged(self.make, self.original, condition, record)
                finding.asked = judged
                judged.derive(batch)
            found[number] = finding.found
            others |= {site for site, _ in finding.others}
        assert judged is not None
        met, unknown = set(), {}
        for every in found.values():
            for site, places in every.items():
                met |= {place[0] for place in places if place is not None}
                if None in places:
                    unknown[site] = judged.original_module(site) or "?"
        sites, each, more = zip(*comm.all_gather_object((met, unknown, others)))
        joined = {site: meant for one in each for site, meant in one.items()}
        record.met = Met(frozenset().union(*sites), joined, frozenset().union(*more))
        return found


AGAIN = "it is computed again with another state of the generator: another mask"


def _unequal_generators(states: Sequence[Mapping[tuple[str, int, bytes], bytes]]) -> dict[str, str]:
    """Find modules whose ranks drop the same places from generators in different states."""
    ranks: dict[tuple[str, int, bytes], dict[bytes, int]] = {}
    for rank, drawn in enumerate(states):
        for key, state in drawn.items():
            ranks.setdefault(key, {}).setdefault(state, rank)
    said = "ranks {} have the same of it, and draw from generators in other states: other masks"
    return {
        key[0]: said.format(", ".join(map(str, first.values())))
        for key, first in ranks.items()
        if len(first) > 1
    }


def _all_steps(conditions: Sequence[Condition]) -> Iterator[tuple[Condition, int, Batch]]:
    return ((one, step, batch) for one in conditions for step, batch in enumerate(one.batches))


@dataclass(frozen=True)
class Trial:
    """A program and its original, and the conditions under which both train.

    case        the original at the start of training, in float64 (`wide`) or in a low dtype
    conditions  the training runs, under the names that ranks use
    """

    case: Case
    make: Make
    world: int
    conditions: tuple[Condition, ...]
    pool: Pool
    wide: bool
    aside: bool = False
    drops: Drops = Drops("", 0, {})

    @property
    def modes(self) -> tuple[Any, ...]:
        """Modes of the original's runs; its dropout mode draws masks that ranks apply in part."""
        return (*((Float64(),) if self.wide else ()), Dropping(self.drops.seed, self.drops.off))

    @property
    def exact(self) -> Trial:
        """The same trial in float64, with the weights that the model has now."""
        case = self.case.with_model(as_float64(self.case.plan.model.model))
        conditions = [
            replace(one, batches=tuple(wide(dict(b)) for b in one.batches))
            for one in self.conditions
        ]
        return replace(self, case=case, conditions=tuple(conditions), wide=True)

    def on_ranks(self, part: Callable[..., Any], *more: Any, **options: Any) -> list[Any]:
        """Call a function with a `Given` first on all ranks; return the results by rank."""
        module = self.case.plan.model.model
        task = Given(self.make, module, self.conditions, self.drops, self.wide, self.aside)
        found: list[Any] = self.pool.run(part, self.world, task, *more, **options)
        return found

    def ran(self, folder: str, progress: Progress) -> tuple[Trial, Observation, Kept]:
        """Train on ranks, with dropout where the places of the masks are known.

        If some rank's dropout calls vary from step to step, train once more without any dropout.
        The returned trial says which modules drop. Large tensors are written to files in `folder`.
        """
        known = replace(self, drops=self._record_dropout(folder))
        seen, record = known._train_on_ranks(progress)
        if record.stray:
            known = replace(known, drops=replace(known.drops, off=frozenset(known.drops.sites)))
            stray = dict.fromkeys(record.stray, "?")
            seen, record = known._train_on_ranks(progress)
            record.met = replace(record.met, unknown={**record.met.unknown, **stray})
        off = record.met.off(known.drops)
        return replace(known, drops=replace(known.drops, off=off)), seen, record

    def _record_dropout(self, folder: str) -> Drops:
        """Record the inputs of the original's dropout calls in every batch, with dropout off."""
        batches: list[Batch] = []
        numbers: dict[tuple[str, int], int] = {}
        sites: dict[str, None] = {}
        others: dict[tuple[str, str], None] = {}
        for condition, step, batch in _all_steps(self.conditions):
            known = (k for k, one in enumerate(batches) if one is batch)
            number = next(known, len(batches))
            numbers[condition.name, step] = number
            if number < len(batches):
                continue
            batches.append(batch)
            noting = Noting()
            with ambient(*self.modes[:-1], noting):
                Sequential(twin(self.case), loss=self.case.loss).derive(batch, range(rows(batch)))
            torch.save(noting.drops, f"{folder}/{number}")
            sites |= dict.fromkeys(drop.site for drop in noting.drops)
            others |= dict.fromkeys(sorted(noting.others))
        return Drops(folder, self.case.seed, numbers, tuple(sites), tuple(others))

    def _train_on_ranks(self, progress: Progress) -> tuple[Observation, Kept]:
        steps = sum(len(condition.batches) for condition in self.conditions)
        done = itertools.count(1)
        stage = f"{self.world} rank{'s' * (self.world > 1)}"

        def heard(rank: int, message: object) -> None:
            if rank == 0:
                progress(stage, min(next(done), steps), steps)

        progress(stage, 0, steps)
        found: tuple[Observation, Kept] = self.on_ranks(_train, on_progress=heard)[0]
        return found


def _train(task: Given) -> tuple[Observation, Kept] | None:
    """Train on one rank; only rank 0 returns its observation, and what all ranks chose."""
    unhoarded()
    record, choosing = Kept(folder=task.drops.folder), Choosing()
    made: list[Judged] = []
    with task.ready(record) as (dropping, program), ambient(*task.modes, dropping):

        def subject(condition: Condition) -> Judged:
            made.clear()
            made.append(program(condition))
            return made[0]

        with contextlib.nullcontext() if task.wide else ambient(choosing):
            seen = observe(
                subject, task.conditions, keep=comm.rank() == 0, folder=task.drops.folder
            )
        record.chosen = choosing.everyone()
        record.loaded = reloaded(made[0], step=task.wide)
    again = {made[0].original_module(site) or site for site in dropping.again}
    calls = dropping.calls
    asked = calls.low, sorted({*calls.left.values()}), calls.strided
    everyone = comm.all_gather_object((dropping.stray, again, dropping.drawn, *asked))
    for rank, (stray, again, _, low, left, strided) in enumerate(everyone):
        record.stray |= stray
        record.masks |= dict.fromkeys(again, AGAIN)
        record.low |= low if task.wide else set()
        record.strided |= strided
        for work in left:
            record.unwaited.setdefault(work, []).append(rank)
    record.masks |= _unequal_generators([drawn for _, _, drawn, *_ in everyone])
    sys.stdout.flush()
    return (seen, record) if comm.rank() == 0 else None
