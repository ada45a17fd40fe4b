"""Places of dropout: both sides run every batch with nothing dropped, and they are looked up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from schedlang.passes.judge.layouts import Table
from schedlang.passes.judge.masks import Drops, Finding, Met, Noting, Place
from schedlang.passes.judge.program import Make
from schedlang.passes.judge.subject import Judged, Kept
from schedlang.passes.verify.observe import Batch, Condition
from schedlang.passes.verify.original import Sequential, rows
from schedlang.passes.verify.sides import Case, twin
from schedlang.report import Gap
from schedlang.runtime.comm import world as comm
from schedlang.runtime.float64 import Float64
from schedlang.runtime.modes import ModeOrFactory, ambient

MASKS = "masks that differ between copies, or are alike where they should not be"
T = TypeVar("T")


def places_of(
    make: Make,
    original: nn.Module,
    table: Table,
    told: Sequence[Condition],
    kept: Kept,
    drops: Drops,
    modes: Sequence[ModeOrFactory] = (Float64,),
) -> dict[int, Mapping[str, Sequence[Place | None]]]:
    """Run every batch once with nothing dropped, and find what this rank drops from, by batch."""
    found: dict[int, Mapping[str, Sequence[Place | None]]] = {}
    judged: Judged | None = None
    others: set[str] = set()
    for condition in told:
        for step, batch in enumerate(condition.batches):
            number = drops.numbers[condition.name, step]
            if number in found:
                continue
            finding = Finding(drops.of(number))
            with ambient(*modes, finding):
                judged = judged or Judged(make, original, table, condition, kept)
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
    kept.met = Met(frozenset().union(*sites), joined, frozenset().union(*more))
    return found


def noted_drops(
    case: Case,
    told: Sequence[Condition],
    folder: str,
    modes: Sequence[ModeOrFactory] = (Float64,),
) -> Drops:
    """Keep what the original drops from in each of all batches, with nothing dropped."""
    batches: list[Batch] = []
    numbers: dict[tuple[str, int], int] = {}
    sites: dict[str, None] = {}
    others: dict[tuple[str, str], None] = {}
    for condition in told:
        for step, batch in enumerate(condition.batches):
            known = (k for k, one in enumerate(batches) if one is batch)
            number = next(known, len(batches))
            numbers[condition.name, step] = number
            if number < len(batches):
                continue
            batches.append(batch)
            noting = Noting()
            with ambient(*modes, noting):
                Sequential(twin(case), loss=case.loss).derive(batch, range(rows(batch)))
            torch.save(noting.drops, f"{folder}/{number}")
            sites |= dict.fromkeys(drop.site for drop in noting.drops)
            others |= dict.fromkeys(sorted(noting.others))
    return Drops(folder, case.seed, numbers, tuple(sites), tuple(others))


def dropped_alike(drops: Drops, run: Callable[[Drops], tuple[T, Kept]]) -> tuple[Drops, T, Kept]:
    """Run ranks; once more with no dropout where they do not draw alike from step to step."""
    seen, kept = run(drops)
    if kept.stray:
        drops = replace(drops, off=frozenset(drops.sites))
        stray = dict.fromkeys(kept.stray, "?")
        seen, kept = run(drops)
        kept.met = replace(kept.met, unknown={**kept.met.unknown, **stray})
    return replace(drops, off=kept.met.off(drops)), seen, kept


def of_dropout(drops: Drops, kept: Kept) -> Iterator[Gap]:
    """Yield what of dropout and other random numbers is not compared."""
    for name in sorted(kept.met.unknown):
        said = f"dropout of `{name}` (its part of the whole is not known)"
        yield Gap(said, "dropout that is wrong there")
    for site, function in drops.others:
        said = f"random numbers of `{site or 'the model'}` (`{function}` stands still)"
        yield Gap(said, "random numbers that are used wrongly")
    if drops.sites and kept.compiled:
        yield Gap("compiled regions (they drop, and run eagerly)", "what compiling breaks")
    if drops.sites:
        yield Gap("masks of its own (the original's are given)", MASKS)
