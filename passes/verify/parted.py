"""The original trained by parts: what `relax(batch_stats)` allows, done in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from schedlang.passes.verify.observe import Batch
from schedlang.passes.verify.original import Sequential

if TYPE_CHECKING:
    from torch import Tensor

    from schedlang.passes.partition.staging import Staged
    from schedlang.runtime.batch import Part


@dataclass(frozen=True)
class Directions:
    """Which copy of the buffers a microbatch meets, where stages are laid over ranks twice.

    of     microbatch -> the replica of the stages that it goes through; none: one for all
    homes  for each replica, buffer -> the place that keeps it: replicas at one place share it
    """

    of: tuple[int, ...] = ()
    homes: tuple[Mapping[str, int], ...] = field(default_factory=tuple)

    def copy(self, name: str, replica: int) -> int:
        """The copy of a buffer that a replica of the stages reads and writes."""
        return self.homes[replica].get(name, 0) if self.homes else 0

    def replica(self, microbatch: int) -> int:
        """The replica that a microbatch goes through."""
        return self.of[microbatch] if self.of else 0

    def apart(self, parts: Sequence[Part]) -> list[list[Part]]:
        """The microbatches of each replica, in their order."""
        found: dict[int, list[Part]] = {}
        for k, part in enumerate(parts):
            found.setdefault(self.replica(k), []).append(part)
        return list(found.values())


def directions_of(staged: Staged) -> Directions:
    """Read from the order: each microbatch goes through one replica of the stages."""
    from schedlang.passes.partition.staging import buffer_homes
    from schedlang.pipeline.timeline import Kind

    t = staged.timeline
    if staged.axis is None or t.replicas < 2:
        return Directions()
    forward = t.kind == Kind.F
    through = dict(zip(t.microbatch[forward].tolist(), t.replica[forward].tolist()))
    return Directions(tuple(through[k] for k in range(t.microbatches)), buffer_homes(staged))


class Parted(Sequential):
    """The plain loop over the microbatches of each replica, the loss being their weighed sum.

    The sequential oracle of statistics over parts: each part is a batch of its own to whatever
    looks at the batch as a whole, and each replica keeps its own buffers, as its ranks do; of
    stages laid over ranks in two directions so does each direction, and the first one evaluates.
    """

    def __init__(
        self,
        *args: Any,
        split: Callable[[Batch], Sequence[Sequence[Part]]],
        weigh: Callable[[Batch], float],
        directions: Directions | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.split, self.weigh = split, weigh
        self.directions = directions or Directions()
        # by name, replica and copy
        self._of: dict[tuple[str, int, int], Tensor] = {}
        self._start = {n: b.detach().clone() for n, b in self.module.named_buffers()}
        self._at = (0, 0)

    def derive(self, batch: Batch, samples: Sequence[int]) -> Tensor:
        """The weighed loss of all parts in training mode, its gradients in `gradients()`."""
        import torch

        from schedlang.runtime.batch import stack

        self._switch()
        self.module.zero_grad(set_to_none=True)
        shares = self.split(batch)
        weights = [[self.weigh(part.inputs) for part in parts] for parts in shares]
        total = sum(map(sum, weights)) or 1.0
        losses, outputs, inputs = [], [], []
        for place, parts in enumerate(shares):
            for k, (part, weight) in enumerate(zip(parts, weights[place])):
                self._enter(place, self.directions.replica(k))
                loss = self._part(part, weight / total)
                losses += [loss * (weight / total)] if weight else []
                outputs.append(self.output)
                inputs.append(self._inputs)
        self._enter(0)
        self._inputs = joined(inputs)
        rows = [len(part.rows) for parts in shares for part in parts]
        self.output = stack(outputs, rows, [w for some in weights for w in some])
        return torch.stack(losses).sum()

    def _part(self, part: Part, share: float) -> Tensor:
        """Forward and backward of one part; one that weighs nothing only leaves its statistics."""
        from schedlang.runtime.batch import called
        from schedlang.runtime.scope import Scope, entered

        given = self._given(part.inputs)
        with entered(Scope(self._steps, 0, part.rows)), self._noting_order():
            self.output = called(self.module, given)
            loss = self.loss(self.output, given) * self.scale
            if share:
                (loss * share).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def eval_step(self, batch: Batch) -> Any:
        """The output in eval mode, each replica's rows under its own buffers."""
        import torch

        from schedlang.runtime.batch import called, stack
        from schedlang.runtime.scope import Scope, entered

        self._training.off()
        outputs, rows, weights = [], [], []
        evaluation = self._evaluation()
        for place, parts in enumerate(self.split(batch)):
            self._enter(place)
            for part in parts:
                with torch.no_grad(), entered(Scope(self._steps, 0, part.rows, evaluation)):
                    outputs.append(called(self.module, part.inputs))
                rows.append(len(part.rows))
                weights.append(self.weigh(part.inputs))
        self._enter(0)
        return stack(outputs, rows, weights)

    def _enter(self, place: int, direction: int = 0) -> None:
        """Put the buffers of this replica and direction in place, those of the other away."""
        import torch

        if (place, direction) == self._at:
            return
        before, was = self._at
        copy = self.directions.copy
        for name, buffer in self.module.named_buffers():
            self._of[name, before, copy(name, was)] = buffer.detach().clone()
        with torch.no_grad():
            for name, value in self._start.items():
                kept = self._of.get((name, place, copy(name, direction)), value)
                self.module.get_buffer(name).copy_(kept)
        self._at = place, direction


def joined(inputs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What was given to the parts, as one; only its gradients are asked for."""
    import torch

    out = {}
    for name in inputs[0]:
        grads = [given[name].grad for given in inputs]
        whole = torch.cat([given[name].detach() for given in inputs]).requires_grad_()
        if any(grad is not None for grad in grads):
            there = [torch.zeros_like(g[name]) if x is None else x for g, x in zip(inputs, grads)]
            whole.grad = torch.cat(there)
        out[name] = whole
    return out
