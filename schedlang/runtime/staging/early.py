"""Sums of gradients that begin when a stage has ended its last backward, beside other stages'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from schedlang.runtime.summing.gradient import Bucket, Sum, begin


@dataclass
class EarlySums:
    """Splits the sums of a step in those of one stage, and the rest, which wait for its end.

    stages   parameter -> the stages of this rank that hold it
    A parameter is summed early where one stage of this rank holds it and its first sum is its only
    one.  All ranks of a group have the same stages in the same order, so they agree.
    """

    parameters: Mapping[str, nn.Parameter]
    sums: Sequence[Sum]
    stages: Mapping[str, frozenset[int]]
    _running: list[tuple[Bucket, Any]] = field(default_factory=list)
    _ended: int | None = None

    def __post_init__(self) -> None:
        times: dict[str, int] = {}
        for one in self.sums:
            for name in one.names:
                # copies of a stage end on their ranks in orders of their own
                times[name] = times.get(name, 0) + (2 if one.kind == "tied" else 1)
        self._early = {n for n, k in times.items() if k == 1 and len(self.stages[n]) == 1}

    @property
    def rest(self) -> list[Sum]:
        """The sums that are left for the end of the step."""
        return self._of(lambda name: name not in self._early)

    def before(self, stage: int, last: bool) -> None:
        """An operation of a stage is about to run; `last`: it ends the stage's backwards."""
        if self._ended is not None:
            self._start(self._ended)
        self._ended = stage if last else None

    def finish(self) -> None:
        """Begin what is left of the early ones, and wait for all."""
        if self._ended is not None:
            self._start(self._ended)
            self._ended = None
        for bucket, work in self._running:
            if work is not None:
                work.wait()
            bucket.unpack()
        self._running = []

    def _start(self, stage: int) -> None:
        mine = self._of(lambda name: name in self._early and stage in self.stages[name])
        self._running += begin(self.parameters, mine)

    def _of(self, wanted: Any) -> list[Sum]:
        kept = [replace(one, names=tuple(filter(wanted, one.names))) for one in self.sums]
        return [one for one in kept if one.names]
