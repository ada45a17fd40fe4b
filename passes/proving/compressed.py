"""The original under compressed sums: what `relax(lossy)` allows, replayed in one process.

The gradients of each data-parallel part are taken by themselves, cut as ranks hold them, and coded,
added up and decoded as the codec says: with what ranks keep from step to step, one memory for each.
The codecs themselves are shared with the program; who codes what, and what is added, is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from schedlang.passes.preparing.reductions import compressed_over
from schedlang.passes.proving.observe import Batch
from schedlang.passes.proving.parted import Parted, joined
from schedlang.plan import Plan

if TYPE_CHECKING:
    from torch import Tensor

    from schedlang.runtime.saving.holding import Holding
    from schedlang.runtime.summing.compressed import Codec

Parts = Sequence[Mapping[str, "Tensor | None"]]  # for each part of the rows its gradients


@dataclass
class Kept:
    """What one rank keeps of its part of a parameter; all ranks the same start of the iteration."""

    errors: dict[int, Tensor] = field(default_factory=dict)
    q: Tensor | None = None


class Compressed(Parted):
    """The loop over the parts of a batch, whose gradients are coded before they are added."""

    def __init__(
        self, *args: Any, plan: Plan, holdings: Mapping[str, Holding], **options: Any
    ) -> None:
        from schedlang.runtime.summing.compressed import Codec

        super().__init__(*args, **options)
        how = plan.compression
        assert how is not None
        self.plan, self.holdings = plan, holdings
        self.codec = Codec(how.kind, how.rank, how.block, how.feedback)
        self._kept: dict[tuple[str, object], Kept] = {}

    def derive(self, batch: Batch, samples: Sequence[int]) -> Tensor:
        """The weighed loss of all parts; the coded sum of their gradients in `gradients()`."""
        import torch

        from schedlang.runtime.parts import stack

        self._switch()
        shares = self.split(batch)
        weights = [[self.weigh(part.inputs) for part in parts] for parts in shares]
        total = sum(map(sum, weights)) or 1.0
        losses, outputs, inputs, grads = [], [], [], []
        for place, parts in enumerate(shares):
            self.module.zero_grad(set_to_none=True)
            for k, (part, weight) in enumerate(zip(parts, weights[place])):
                self._enter(place, self.directions.replica(k))
                loss = self._part(part, weight / total)
                losses += [loss * (weight / total)] if weight else []
                outputs.append(self.output)
                inputs.append(self._inputs)
            grads.append({name: p.grad for name, p in self._named})
        self._enter(0)
        self._inputs = joined(inputs)
        rows = [len(part.rows) for parts in shares for part in parts]
        self.output = stack(outputs, rows, [w for some in weights for w in some])
        with torch.no_grad():
            for name, parameter in self._named:
                parameter.grad = self._sum(name, [one[name] for one in grads])
        return torch.stack(losses).sum()

    def _sum(self, name: str, parts: Sequence[Tensor | None]) -> Tensor | None:
        """The gradient that every rank ends with, put together from what they hold."""
        import torch

        from schedlang.runtime.saving.holding import put, take

        given = next((part for part in parts if part is not None), None)
        if given is None:
            return None
        whole = torch.zeros_like(given)
        by_place = self._by_place([torch.zeros_like(given) if p is None else p for p in parts])
        mesh, holding = self.plan.mesh, self.holdings[name]
        for rank, key in self._ranks(holding):
            local = [take(one, holding, mesh, rank) for one in by_place]
            put(self._coded(name, key, local), whole, holding, mesh, rank)
            real = take(torch.ones_like(whole), holding, mesh, rank)
            errors = self._kept[name, key].errors
            errors.update({k: left * real.view_as(left) for k, left in errors.items()})
        return whole

    def _by_place(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """For each place along the compressed axes the exact sum over all others."""
        mesh, rows = self.plan.mesh, self.plan.row_axes
        axes = compressed_over(self.plan)
        sums: list[Any] = [0.0] * mesh.size(axes)
        ranks = {mesh.index(r, rows): r for r in reversed(range(mesh.world))}
        for place, part in enumerate(parts):
            at = mesh.index(ranks[place], axes)
            sums[at] = sums[at] + part
        return sums

    def _ranks(self, holding: Holding) -> Iterator[tuple[int, object]]:
        """A rank for each different part of a parameter, and what tells the parts apart."""
        mesh, known = self.plan.mesh, set()
        for rank in range(mesh.world):
            key = holding.segments(mesh, rank)
            if holding.held(mesh, rank) and key not in known:
                known.add(key)
                yield rank, key

    def _coded(self, name: str, key: object, parts: Sequence[Tensor]) -> Tensor:
        """The sum of the parts of all places, as the codec lets them know of each other."""
        import torch

        kept = self._kept.setdefault((name, key), Kept())
        if not self.codec.smaller(parts[0].shape):
            return torch.stack(list(parts)).sum(0)
        own = [part.reshape(part.shape[0], -1) for part in parts]
        own = [part + kept.errors.get(place, 0.0) for place, part in enumerate(own)]
        run = _low_rank if self.codec.kind == "powersgd" else _few_bits
        total, left = run(self.codec, name, self._steps, own, kept)
        if self.codec.feedback:
            kept.errors = dict(enumerate(left))
        return total.view_as(parts[0])


def _low_rank(
    codec: Codec, name: str, step: int, own: Sequence[Tensor], kept: Kept
) -> tuple[Tensor, list[Tensor]]:
    """PowerSGD: the sum projected on what one step of a power iteration finds."""
    import torch

    from schedlang.runtime.summing.codecs import orthogonal, started

    q = own[0].new_zeros(own[0].shape[1], codec.rank) if kept.q is None else kept.q
    total = torch.stack(list(own)).sum(0)
    p = orthogonal(total @ started(q, name, step))
    kept.q = total.T @ p
    return p @ kept.q.T, [part - p @ (p.T @ part) for part in own]


def _few_bits(
    codec: Codec, name: str, step: int, own: Sequence[Tensor], kept: Kept
) -> tuple[Tensor, list[Tensor]]:
    """Each part in few bits, by itself; what they mean is added."""
    import torch

    from schedlang.runtime.summing.compressed import decoded, encoded

    read = [
        decoded(codec, encoded(codec, part, name, step, place), part.numel()).view_as(part)
        for place, part in enumerate(own)
    ]
    return torch.stack(read).sum(0), [part - said for part, said in zip(own, read)]
