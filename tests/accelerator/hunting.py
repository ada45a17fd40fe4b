"""Leaves out one call after the other on all ranks, and looks for whoever notices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from schedlang.testing.accelerator import current, spawn
from tests.accelerator.mutants import Site, left_out

Way = Callable[[], float]  # trains somehow, and returns how far it is from what is right
NEAR = 1e-6


@dataclass(frozen=True)
class Fate:
    """What became of a mutation."""

    site: Site
    way: str = ""  # by which it was found
    reached: bool = False
    report: str = ""  # the first, if there was any
    wrong: str = ""  # a value or an error, if there was no report

    @property
    def found(self) -> bool:
        return bool(self.report or self.wrong)


def hunt(sites: Sequence[Site], ways: Sequence[Way], ranks: int = 2) -> list[Fate]:
    """The fate of each, over all ways until one finds it."""
    by_rank = spawn(_on_rank, sites, ways, ranks=ranks, check=False, timeout=1500)
    return [max(fates, key=_told) for fates in zip(*by_rank)]


def _told(fate: Fate) -> tuple[bool, bool, bool]:
    return bool(fate.report), fate.found, fate.reached


def _on_rank(sites: Sequence[Site], ways: Sequence[Way]) -> list[Fate]:
    fates = [_fate(site, ways) for site in sites]
    current().reset()  # what was found is no fault of this run
    return fates


def _fate(site: Site, ways: Sequence[Way]) -> Fate:
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
