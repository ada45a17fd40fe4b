"""Leaves out one call after the other on all ranks, and looks for whoever notices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from schedlang.runtime.launch.pool import RankDied
from schedlang.testing.accelerator import current, spawn
from tests.accelerator.mutants import Mutation, left_out

Way = Callable[[], float]  # trains somehow, and returns how far it is from what is right
NEAR = 1e-6


@dataclass(frozen=True)
class Fate:
    """What became of a mutation."""

    site: Mutation
    way: str = ""  # by which it was found
    reached: bool = False
    report: str = ""  # the first, if there was any
    wrong: str = ""  # a value or an error, if there was no report
    ended: bool = False  # by an error

    @property
    def found(self) -> bool:
        return bool(self.report or self.wrong)


def hunt(
    sites: Sequence[Mutation], ways: Sequence[Way], ranks: int = 2, backend: str = "simccl"
) -> list[Fate]:
    """The fate of each, over all ways until one finds it."""
    by_rank = spawn(_on_rank, sites, ways, ranks=ranks, backend=backend, check=False, timeout=1500)
    return [max(fates, key=_told) for fates in zip(*by_rank)]


class Broken(Exception):
    """What a rank ended with where a call was left out; others may wait for it then."""

    def __init__(self, fate: Fate) -> None:
        super().__init__(str(fate))
        self.fate = fate

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.fate,)


def hunt_apart(sites: Sequence[Mutation], ways: Sequence[Way], ranks: int = 2) -> list[Fate]:
    """The same, each in worlds of its own: messages that are misread end a rank, or hang."""
    return [_apart(site, ways, ranks) for site in sites]


def _apart(site: Mutation, ways: Sequence[Way], ranks: int) -> Fate:
    best = Fate(site)
    for way in ways:
        try:
            fates = spawn(_fate_or_end, site, way, ranks=ranks, check=False, timeout=100)
        except RankDied as error:
            if not isinstance(error.cause, Broken):
                raise
            fates = [error.cause.fate]
        best = max(best, *fates, key=_told)
        if best.report:
            break
    return best


def _fate_or_end(site: Mutation, way: Way) -> Fate:
    fate = _fate(site, [way], itertools.count(), meet=False)
    if fate.ended:
        raise Broken(fate)
    current().reset()
    return fate


Known = Collection[tuple[str, str]]  # calls by their function and text


def judge(fates: Sequence[Fate], redundant: Known, unreached: Known) -> None:
    """Each is found, by a report where values are wrong, or known with its reason; no list lies."""
    names = {(fate.site.function, fate.site.text) for fate in fates}
    left = {}
    for fate in fates:
        if not fate.found:
            known = (fate.site.function, fate.site.text)
            left[known] = fate.reached
            assert known in (redundant if fate.reached else unreached), f"{fate.site} is not missed"
    listed = {one for one in (*redundant, *unreached) if one in names}
    assert listed == left.keys(), f"found after all: {listed - left.keys()}"
    for fate in fates:
        assert fate.report or not fate.wrong, f"{fate.site}: {fate.wrong}, and no report"


def _told(fate: Fate) -> tuple[bool, bool, bool]:
    return bool(fate.report), fate.found, fate.reached


def _on_rank(sites: Sequence[Mutation], ways: Sequence[Way]) -> list[Fate]:
    turns = itertools.count()
    fates = [_fate(site, ways, turns) for site in sites]
    current().reset()  # what was found is no fault of this run
    return fates


def _fate(site: Mutation, ways: Sequence[Way], turns: Iterator[int], meet: bool = True) -> Fate:
    best = Fate(site)
    for way in ways:
        simulation = current()
        simulation.reset()
        wrong, ended = "", False
        with left_out(site) as watch:
            try:
                value = way()
                if not value < NEAR:
                    wrong = "NaN" if math.isnan(value) else f"{value:.1e} apart"
            except Exception as error:
                wrong, ended = f"{type(error).__name__}: {error}".split("\n")[0], True
            simulation.settle()
        if watch.count or ended:
            reports = simulation.reports()
            told = str(reports[0]) if reports else ""
            mine = Fate(site, way.__name__, bool(watch.count), told, wrong, ended)
            best = max(best, mine, key=_told)
        # all ranks go on alike, so that none is left alone in a collective
        if meet and _somebody(best.found, next(turns)):
            break
    simulation.reset()
    return best


def _somebody(found: bool, turn: int) -> bool:
    """Whether anybody has found it: by the store, for a mutation may have broken the groups."""
    store: Any = dist.distributed_c10d._get_default_store()
    place = f"hunted {turn}"
    store.add(f"{place} found", int(found))
    if store.add(f"{place} here", 1) == dist.get_world_size():
        store.set(f"{place} all", "1")
    store.get(f"{place} all")
    return bool(store.add(f"{place} found", 0))
