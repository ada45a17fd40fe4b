"""Versions of a stage's weights: each row runs with the version that it reads, updates make the
next.

Tensors that a forward saved for its backward lie in the storages of the version that it read, or
are the parameters themselves. So an update writes into new storages if a later row reads the old
version (weight stashing, PipeDream), and a row of another version gets its storages installed in
the parameters. If no later row reads the old version, an update writes in place, and a backward
reads the newest weights (PipeMare); the version counters are restored, because autograd would
refuse that backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.pipeline.timeline.table import Kind, Op, Timeline
from schedlang.pipeline.timeline.versions import READING_KINDS, update_versions
from schedlang.runtime.storage.offloaded_gradients import drop_gradients


class WeightVersions:
    """The weights of this rank's one stage during a step.

    `update(n)` reduces the accumulated gradients and runs the optimizer on `parameters`, which
    makes version n. Gradients of an update are dropped before those of the next; those of the last
    stay. `made[microbatch]` is the version to which the gradients of a microbatch contribute.
    """

    def __init__(
        self,
        timeline: Timeline,
        rank: int,
        parameters: Sequence[nn.Parameter],
        update: Callable[[int], None],
    ) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.update = update
        rows = [op for op in timeline.rows(rank) if op.kind in (*READING_KINDS, Kind.STEP)]
        assert len({op.stage for op in rows}) == 1, "one stage on each rank"
        self._last = {op.version: k for k, op in enumerate(rows) if op.kind in READING_KINDS}
        self._rows = rows
        self.made: list[int] = update_versions(timeline).tolist()
        self.newest = self._installed = self._at = 0
        self._kept: dict[int, list[Tensor]] = {}
        self.begin()

    def begin(self) -> None:
        """Start a step: the present weights are version 0."""
        self._install(self.newest)  # a failed step may have left another version installed
        self._kept.clear()
        self.newest = self._installed = self._at = 0

    @property
    def stored_count(self) -> int:
        """Number of versions that are stored now."""
        return 1 + sum(version != self.newest for version in self._kept)

    def prepare(self, op: Op) -> None:
        """Prepare for a row: install the version that it reads, or make the next one."""
        if op.kind not in (*READING_KINDS, Kind.STEP):
            return
        assert self._rows[self._at] == op, f"{op} instead of {self._rows[self._at]}"
        self._install(self.newest if op.kind is Kind.STEP else op.version)
        for version in [v for v in self._kept if self._last.get(v, -1) < self._at]:
            if version not in (self.newest, self._installed):
                del self._kept[version]
        if op.kind is Kind.STEP:
            self._step(op.version)
        self._at += 1

    def finish(self) -> None:
        """Keep only the newest weights, after the last row."""
        assert self._at == len(self._rows), "the step has not been run to its end"
        self._install(self.newest)
        self._kept.clear()

    def _install(self, version: int) -> None:
        """Put a version into the parameters; if the newest was there, store it."""
        if version == self._installed:
            return
        if self._installed == self.newest:
            self._kept[self.newest] = [p.data for p in self.parameters]
        for parameter, value in zip(self.parameters, self._kept[version]):
            parameter.data = value
        self._installed = version

    def _step(self, version: int) -> None:
        assert version == self.newest + 1, f"version {version} after {self.newest}"
        if self._last.get(self.newest, -1) > self._at:
            values = [p.data for p in self.parameters]
            self._kept[self.newest] = values
            for parameter, value in zip(self.parameters, values):
                parameter.data = value.clone()
        else:
            self._kept.pop(self.newest, None)
        addresses = [p.data_ptr() for p in self.parameters]
        with _unsafe_preserve_version_counter(tuple(self.parameters)):
            self.update(version)
        if addresses != [p.data_ptr() for p in self.parameters]:
            raise _replaced_tensors()
        self.newest = self._installed = version
        if self._at < len(self._rows) - 1:
            drop_gradients(self.parameters)


def sum_update_weights(
    rank_weights: Sequence[Sequence[float]], versions: Sequence[int]
) -> dict[int, float]:
    """Return the total weight of the microbatches of each update, from the weights on each
    replica."""
    total: dict[int, float] = {}
    for weights in rank_weights:
        for microbatch, weight in enumerate(weights):
            total[versions[microbatch]] = total.get(versions[microbatch], 0.0) + weight
    return total


def _replaced_tensors() -> Refusal:
    return Refusal.of(
        "S625",
        "the optimizer replaces the tensors of the weights",
        notes=("later backwards would not use its update",),
        helps=(
            "use an optimizer that updates in place (torch's own do)",
            'or a synchronous order: `pipeline(order="1F1B")`',
        ),
    )
