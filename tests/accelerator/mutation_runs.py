"""Mutation testing: leave out one call after the other on all ranks; some run must notice it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from schedlang.runtime.launch.pool import RankDied
from schedlang.testing.accelerator import current, spawn
from tests.accelerator.mutations import Mutation, without_call

Variant = Callable[[], float]  # trains, and returns its largest error
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Outcome:
    """The outcome of one mutation."""

    site: Mutation
    way: str = ""  # the variant that found it
    reached: bool = False
    report: str = ""  # the first, if there was any
    wrong: str = ""  # a value or an error, if there was no report
    ended: bool = False  # by an error

    @property
    def found(self) -> bool:
        return bool(self.report or self.wrong)


def run_mutations(
    sites: Sequence[Mutation], variants: Sequence[Variant], ranks: int = 2, backend: str = "simccl"
) -> list[Outcome]:
    """Return the outcome of each mutation; run variants until one finds it."""
    by_rank = spawn(
        _on_rank, sites, variants, ranks=ranks, backend=backend, check=False, timeout=1500
    )
    return [max(outcomes, key=_severity) for outcomes in zip(*by_rank)]


class RankFailed(Exception):
    """Ends a rank at which a call was left out, because other ranks may wait for it."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(str(outcome))
        self.fate = outcome

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.fate,)


def run_separately(
    sites: Sequence[Mutation], variants: Sequence[Variant], ranks: int = 2
) -> list[Outcome]:
    """Do the same in a new world for each: a message read wrongly ends a rank, or hangs it."""
    return [_run_separately(site, variants, ranks) for site in sites]


def _run_separately(site: Mutation, variants: Sequence[Variant], ranks: int) -> Outcome:
    best = Outcome(site)
    for variant in variants:
        try:
            outcomes = spawn(
                _outcome_or_raise, site, variant, ranks=ranks, check=False, timeout=100
            )
        except RankDied as error:
            if not isinstance(error.cause, RankFailed):
                raise
            outcomes = [error.cause.fate]
        best = max(best, *outcomes, key=_severity)
        if best.report:
            break
    return best


def _outcome_or_raise(site: Mutation, variant: Variant) -> Outcome:
    outcome = _outcome(site, [variant], itertools.count(), meet=False)
    if outcome.ended:
        raise RankFailed(outcome)
    current().reset()
    return outcome


KnownCalls = Collection[tuple[str, str]]  # calls by their function and text


def check_outcomes(
    outcomes: Sequence[Outcome], redundant: KnownCalls, unreached: KnownCalls
) -> None:
    """Assert that each mutation is reported, or is listed as known; no list has an entry too
    many."""
    names = {(outcome.site.function, outcome.site.text) for outcome in outcomes}
    unfound = {}
    for outcome in outcomes:
        if not outcome.found:
            call = (outcome.site.function, outcome.site.text)
            unfound[call] = outcome.reached
            assert call in (redundant if outcome.reached else unreached), (
                f"{outcome.site} is not missed"
            )
    listed = {call_listed for call_listed in (*redundant, *unreached) if call_listed in names}
    assert listed == unfound.keys(), f"found after all: {listed - unfound.keys()}"
    for outcome in outcomes:
        assert outcome.report or not outcome.wrong, (
            f"{outcome.site}: {outcome.wrong}, and no report"
        )


def _severity(outcome: Outcome) -> tuple[bool, bool, bool]:
    return bool(outcome.report), outcome.found, outcome.reached


def _on_rank(sites: Sequence[Mutation], variants: Sequence[Variant]) -> list[Outcome]:
    counter = itertools.count()
    outcomes = [_outcome(site, variants, counter) for site in sites]
    current().reset()  # reports of mutations are no errors of this run
    return outcomes


def _outcome(
    site: Mutation, variants: Sequence[Variant], counter: Iterator[int], meet: bool = True
) -> Outcome:
    best = Outcome(site)
    for variant in variants:
        simulation = current()
        simulation.reset()
        wrong, ended = "", False
        with without_call(site) as watch:
            try:
                value = variant()
                if not value < TOLERANCE:
                    wrong = "NaN" if math.isnan(value) else f"{value:.1e} apart"
            except Exception as error:
                wrong, ended = f"{type(error).__name__}: {error}".split("\n")[0], True
            simulation.settle()
        if watch.count or ended:
            reports = simulation.reports()
            report = str(reports[0]) if reports else ""
            outcome = Outcome(site, variant.__name__, bool(watch.count), report, wrong, ended)
            best = max(best, outcome, key=_severity)
        # all ranks go on together, so that none waits alone in a collective
        if meet and _any_rank(best.found, next(counter)):
            break
    simulation.reset()
    return best


def _any_rank(is_found: bool, index: int) -> bool:
    """Return whether any rank found it; by the store, as a mutation may break the groups."""
    store: Any = dist.distributed_c10d._get_default_store()
    key = f"hunted {index}"
    store.add(f"{key} found", int(is_found))
    if store.add(f"{key} here", 1) == dist.get_world_size():
        store.set(f"{key} all", "1")
    store.get(f"{key} all")
    return bool(store.add(f"{key} found", 0))
