"""Bugs of updates inside the step: another version of the weights than the table names."""

from __future__ import annotations

from typing import Any

from schedlang.pipeline.timeline.table import Kind
from schedlang.runtime import program
from schedlang.runtime.pipeline import weight_versions
from schedlang.runtime.pipeline.weight_versions import WeightVersions
from tests.zoo.bug import ALIAS, CONSTANT, FREEZE, SKIP, Patch, Site, bug


def backward_reads(patch: Patch, version: Any) -> None:
    """Backwards find version(newest, named) in place of the one that their row names."""
    plain = WeightVersions._install

    def show(self: Any, wanted: int) -> None:
        back = self._at < len(self._rows) and self._rows[self._at].kind is Kind.B
        plain(self, version(self.newest, wanted) if back else wanted)

    patch.setattr(WeightVersions, "_install", show)


@bug("P26", "pipeline", FREEZE, "stale", credit="PipeDream without its stash")
def backward_at_the_newest(patch: Patch, site: Site) -> None:
    """What autograd saved lies in the old weights, and what it reads itself in the newest."""
    backward_reads(patch, lambda newest, named: newest)


@bug("P27", "pipeline", ALIAS, "stale")
def updated_in_place(patch: Patch, site: Site) -> None:
    """The optimizer writes into weights that a later backward still reads."""
    plain = WeightVersions._step

    def step(self: Any, made: int) -> None:
        last, self._last = self._last, {}
        plain(self, made)
        self._last = last
        self._kept[made - 1] = [p.data for p in self.parameters]

    patch.setattr(WeightVersions, "_step", step)


@bug("P28", "pipeline", ALIAS, "stale, not kept")
def kept_without_need(patch: Patch, site: Site) -> None:
    """Weights are updated in new storages, and a backward reads those of its forward."""
    plain = WeightVersions._step

    def step(self: Any, made: int) -> None:
        for parameter in self.parameters:
            parameter.data = parameter.data.clone()
        plain(self, made)

    patch.setattr(WeightVersions, "_step", step)


@bug("P29", "pipeline", CONSTANT, "stale")
def a_share_of_the_whole_step(patch: Patch, site: Site) -> None:
    """A microbatch is weighed in the whole step, not in its own update."""
    plain = weight_versions.sum_update_weights

    def totals(everyone: Any, made: Any) -> dict[int, float]:
        found = plain(everyone, made)
        return dict.fromkeys(found, sum(found.values()))

    patch.setattr(program, "sum_update_weights", totals)


@bug("P30", "pipeline", SKIP, "stale")
def last_update_lost(patch: Patch, site: Site) -> None:
    """The pipeline is drained, and the last of its updates is not made."""
    plain = WeightVersions._step

    def step(self: Any, made: int) -> None:
        update = self.update
        if self._at == len(self._rows) - 1:
            self.update = lambda made: None
        plain(self, made)
        self.update = update

    patch.setattr(WeightVersions, "_step", step)
