"""Places that ranks drop from: every batch is run once undropped, and they are looked up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from schedlang.passes.judge.layouts import Table
from schedlang.passes.judge.masks import Drops, Finding, Met, Place
from schedlang.passes.judge.program import Make
from schedlang.passes.judge.subject import Judged, Kept
from schedlang.passes.verify.observe import Condition
from schedlang.runtime.comm import world as comm
from schedlang.runtime.float64 import Float64
from schedlang.runtime.modes import ambient


def places_of(
    make: Make,
    original: nn.Module,
    table: Table,
    told: Sequence[Condition],
    kept: Kept,
    drops: Drops,
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
            with ambient(Float64(), finding):
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
    sites, each, more = zip(*comm.gathered((met, unknown, others)))
    joined = {site: meant for one in each for site, meant in one.items()}
    kept.met = Met(frozenset().union(*sites), joined, frozenset().union(*more))
    return found
