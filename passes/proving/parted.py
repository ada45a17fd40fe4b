"""The original trained by parts: what `relax(batch_stats)` allows, done in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from schedlang.passes.proving.observe import Batch
from schedlang.passes.proving.original import Sequential

if TYPE_CHECKING:
    from torch import Tensor

    from schedlang.runtime.parts import Part


class Parted(Sequential):
    """The plain loop over the microbatches of each replica, the loss being their weighed sum.

    The sequential oracle of statistics over parts: each part is a batch of its own to whatever
    looks at the batch as a whole, and each replica keeps its own buffers, as its ranks do.
    """

    def __init__(
        self,
        *args: Any,
        split: Callable[[Batch], Sequence[Sequence[Part]]],
        weigh: Callable[[Batch], float],
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.split, self.weigh = split, weigh
        self._of: dict[int, dict[str, Tensor]] = {}  # the buffers of each replica
        self._start = {n: b.detach().clone() for n, b in self.module.named_buffers()}
        self._at = 0

    def derive(self, batch: Batch, samples: Sequence[int]) -> Tensor:
        """The weighed loss of all parts in training mode, its gradients in `gradients()`."""
        import torch

        from schedlang.runtime.parts import stack

        self._switch()
        self.module.zero_grad(set_to_none=True)
        shares = self.split(batch)
        weights = [[self.weigh(part.inputs) for part in parts] for parts in shares]
        total = sum(map(sum, weights)) or 1.0
        losses, outputs, inputs = [], [], []
        for place, parts in enumerate(shares):
            self._enter(place)
            for part, weight in zip(parts, weights[place]):
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
        from schedlang.runtime.given import called
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

        from schedlang.runtime.given import called
        from schedlang.runtime.parts import stack
        from schedlang.runtime.scope import Scope, entered

        self._training.off()
        outputs, rows, weights = [], [], []
        for place, parts in enumerate(self.split(batch)):
            self._enter(place)
            for part in parts:
                with torch.no_grad(), entered(Scope(self._steps, 0, part.rows)):
                    outputs.append(called(self.module, part.inputs))
                rows.append(len(part.rows))
                weights.append(self.weigh(part.inputs))
        self._enter(0)
        return stack(outputs, rows, weights)

    def _enter(self, place: int) -> None:
        """Put the buffers of this replica in place, those of the other away."""
        import torch

        if place == self._at:
            return
        now = {name: b.detach().clone() for name, b in self.module.named_buffers()}
        self._of[self._at] = now
        with torch.no_grad():
            for name, value in self._of.get(place, self._start).items():
                self.module.get_buffer(name).copy_(value)
        self._at = place


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
