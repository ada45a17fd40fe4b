"""Injected bugs of asynchronous pipelines: a weight version other than the table names."""

from __future__ import annotations

from typing import Any

from schedlang.pipeline.timeline.table import Kind
from schedlang.runtime import program
from schedlang.runtime.pipeline import weight_versions
from schedlang.runtime.pipeline.weight_versions import WeightVersions
from tests.zoo.bug import ALIAS, CONSTANT, FREEZE, SKIP, Patch, Site, bug


def backward_reads(patch: Patch, version: Any) -> None:
    """Make backward read version(newest, requested) instead of the version in its row."""
    original = WeightVersions._install

    def show(self: Any, requested: int) -> None:
        is_backward = self._at < len(self._rows) and self._rows[self._at].kind is Kind.B
        original(self, version(self.newest, requested) if is_backward else requested)

    patch.setattr(WeightVersions, "_install", show)


@bug("P26", "pipeline", FREEZE, "stale", credit="PipeDream without its stash")
def backward_at_the_newest(patch: Patch, site: Site) -> None:
    """Saved activations belong to the old weights, but backward reads the newest weights."""
    backward_reads(patch, lambda newest, requested: newest)


@bug("P27", "pipeline", ALIAS, "stale")
def updated_in_place(patch: Patch, site: Site) -> None:
    """The optimizer writes into weights that a later backward still reads."""
    original = WeightVersions._step

    def step(self: Any, version: int) -> None:
        last, self._last = self._last, {}
        original(self, version)
        self._last = last
        self._kept[version - 1] = [p.data for p in self.parameters]

    patch.setattr(WeightVersions, "_step", step)


@bug("P28", "pipeline", ALIAS, "stale, not kept")
def updated_out_of_place(patch: Patch, site: Site) -> None:
    """Weights are updated in new storages, and a backward reads those of its forward."""
    original = WeightVersions._step

    def step(self: Any, version: int) -> None:
        for parameter in self.parameters:
            parameter.data = parameter.data.clone()
        original(self, version)

    patch.setattr(WeightVersions, "_step", step)


@bug("P29", "pipeline", CONSTANT, "stale")
def weight_of_the_full_step(patch: Patch, site: Site) -> None:
    """A microbatch gets its weight in the full step, not in its own update."""
    original = weight_versions.sum_update_weights

    def totals(weights: Any, update: Any) -> dict[int, float]:
        totals_ = original(weights, update)
        return dict.fromkeys(totals_, sum(totals_.values()))

    patch.setattr(program, "sum_update_weights", totals)


@bug("P30", "pipeline", SKIP, "stale")
def last_update_lost(patch: Patch, site: Site) -> None:
    """The last update after the pipeline is drained is skipped."""
    original = WeightVersions._step

    def step(self: Any, version: int) -> None:
        update = self.update
        if self._at == len(self._rows) - 1:
            self.update = lambda version: None
        original(self, version)
        self.update = update

    patch.setattr(WeightVersions, "_step", step)
