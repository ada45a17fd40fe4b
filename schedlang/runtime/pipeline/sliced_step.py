"""A step whose microbatches are cut along their sequences: each slice runs as a microbatch does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from schedlang.runtime.pipeline.flight import Work
from schedlang.runtime.pipeline.stage import Forwarded, Stage
from schedlang.runtime.pipeline.step import Result, Step
from schedlang.runtime.sequence_pipelining.carry import Carried
from schedlang.runtime.sequence_pipelining.slices import Slices, joined, whole_loss
from schedlang.runtime.tracing.graph import Token
from schedlang.runtime.weights import Number


class _Slice:
    """The values that one slice takes of earlier ones and owes to them; see flight.Carried."""

    def __init__(self, carried: Carried, index: int) -> None:
        self.carried, self.index = carried, index

    def leaves(self) -> Sequence[torch.Tensor]:
        return self.carried.leaves(self.index)

    def roots(self) -> tuple[Sequence[Any], Sequence[torch.Tensor]]:
        return self.carried.roots(self.index)

    def returned(self) -> None:
        self.carried.free(self.index)


class SlicedStep(Step):
    """Slices of a microbatch run forward in order and backward in reverse; their losses add up."""

    def __init__(self, pipe: Any, batches: Any, *rest: Any) -> None:
        super().__init__(pipe, batches, *rest)
        self.slices: Slices = pipe.slices
        self.parts = self.slices.of_all(batches)
        self.carried: dict[Work, Carried] = defaultdict(Carried)
        self.made: dict[int, list[tuple[torch.Tensor | None, Any]]] = defaultdict(list)

    def run(
        self, stage: Stage, work: Work, received: Mapping[Token, torch.Tensor]
    ) -> tuple[Forwarded, Any]:
        """The forward of a stage on one slice, which sees the keys of those before it."""
        carried = self.carried[work._replace(slice=0)]
        part = self.parts[work.microbatch][work.slice]
        with self.slices.forward(part, carried) as inputs:
            return stage.forward(inputs, received, self.train), _Slice(carried, work.slice)

    def weight(self, work: Work) -> Number:
        """The share of a slice in its microbatch."""
        share: Number = self.parts[work.microbatch][work.slice].share
        weight: Number = self.scale[work.microbatch] * share
        return weight

    def finish(self, work: Work, loss: torch.Tensor | None, output: Any) -> None:
        """Put the slices together once the last one is there."""
        made, parts = self.made[work.microbatch], self.parts[work.microbatch]
        made.append((loss, output))
        if len(made) < len(parts):
            return
        losses = [value for value, _ in made if value is not None]
        whole = whole_loss(losses, parts) if losses else None
        output = joined([output for _, output in made], parts) if self.keep else None
        self.results[work.microbatch] = Result(whole, output)
        del self.made[work.microbatch]
