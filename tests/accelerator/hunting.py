"""Leaves out one call after the other on all ranks, and looks for whoever notices."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

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

    @property
    def found(self) -> bool:
        return bool(self.report or self.wrong)


def hunt(sites: Sequence[Mutation], ways: Sequence[Way], ranks: int = 2) -> list[Fate]:
    """The fate of each, over all ways until one finds it."""
    by_rank = spawn(_on_rank, sites, ways, ranks=ranks, check=False, timeout=1500)
    return [max(fates, key=_told) for fates in zip(*by_rank)]


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
    fates = [_fate(site, ways) for site in sites]
    current().reset()  # what was found is no fault of this run
    return fates


def _fate(site: Mutation, ways: Sequence[Way]) -> Fate:
    best = Fate(site)
    for way in ways:
        simulation = current()
        simulation.reset()
        wrong = ""
        with left_out(site) as watch:
            try:
                value = way()
                if not value < NEAR:
                    wrong = "NaN" if math.isnan(value) else f"{value:.1e} apart"
            except Exception as error:
                wrong = f"{type(error).__name__}: {error}".split("\n")[0]
            simulation.settle()
        if watch.count:
            reports = simulation.reports()
            told = str(reports[0]) if reports else ""
            best = max(best, Fate(site, way.__name__, True, told, wrong), key=_told)
        # all ranks go on alike, so that none is left alone in a collective
        if _somebody(best.found):
            break
    simulation.reset()
    return best


def _somebody(found: bool) -> bool:
    import torch.distributed as dist

    everybody: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(everybody, found)
    return any(everybody)
