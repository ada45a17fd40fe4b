"""The original under what `relax(lossy)` and `relax(staleness)` allow, replayed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from schedlang.ir.plan import Plan
from schedlang.passes.analyze.reductions import compressed_over
from schedlang.passes.analyze.staleness import Table, Versions
from schedlang.passes.verify.observe import Batch
from schedlang.passes.verify.parted import Parted, joined

if TYPE_CHECKING:
    from torch import Tensor

    from schedlang.runtime.batch import Part
    from schedlang.runtime.checkpointing.holding import Holding
    from schedlang.runtime.grad_reduction.compressed import Codec

# ---- The original under compressed sums: what `relax(lossy)` allows, replayed in one process.
# The gradients of each data-parallel part are taken by themselves, cut as ranks hold them, and
# coded, added up and decoded as the codec says: with what ranks keep from step to step, one memory
# for each. The codecs themselves are shared with the program; who codes what, and what is added,
# is not.


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
        from schedlang.runtime.grad_reduction.compressed import Codec

        super().__init__(*args, **options)
        how = plan.compression
        assert how is not None
        self.plan, self.holdings = plan, holdings
        self.codec = Codec(how.kind, how.rank, how.block, how.feedback)
        self._kept: dict[tuple[str, object], Kept] = {}

    def derive(self, batch: Batch, samples: Sequence[int]) -> Tensor:
        """The weighed loss of all parts; the coded sum of their gradients in `gradients()`."""
        import torch

        from schedlang.runtime.batch import stack

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

        from schedlang.runtime.checkpointing.holding import put, take

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

    from schedlang.runtime.grad_reduction.compressed import orthogonal, started

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

    from schedlang.runtime.grad_reduction.compressed import decoded, encoded

    read = [
        decoded(codec, encoded(codec, part, name, step, place), part.numel()).view_as(part)
        for place, part in enumerate(own)
    ]
    return torch.stack(read).sum(0), [part - said for part, said in zip(own, read)]


# ---- The original under stale weights: what `relax(staleness)` allows, replayed in one process.
# Microbatch after microbatch, each stage's parameters are filled with the version that the table
# names, once for the forward and once for the backward.  What autograd saved of a parameter is the
# parameter's own storage, so a backward reads what it is filled with then.  An update comes when
# all its microbatches are through, on the newest weights.  The only thing shared with the program
# is the table of versions.


class Replayed(Parted):
    """The loop over microbatches at the weights that a table names, an update after each group."""

    def __init__(self, *args: Any, table: Table, **options: Any) -> None:
        super().__init__(*args, **options)
        self.table = table
        self._history: list[dict[str, Tensor]] = []  # of this step, by version

    def train_step(self, batch: Batch) -> Tensor:
        """All updates of a step; the weighed mean of the losses, each where it was met."""
        import torch

        self._switch()
        shares = self.split(batch)
        weights = [[self.weigh(part.inputs) for part in parts] for parts in shares]
        whole = sum(map(sum, weights)) or 1.0
        self._history = [self._weights()]
        losses: list[Tensor] = []
        seen: dict[tuple[int, int], tuple[Any, dict[str, Any]]] = {}
        for made in range(1, max(self.table.made) + 1):
            members = [k for k, update in enumerate(self.table.made) if update == made]
            total = sum(row[k] for row in weights for k in members)
            self.module.zero_grad(set_to_none=True)
            for place, k in ((place, k) for place in range(len(shares)) for k in members):
                self._enter(place, self.directions.replica(k))
                weight = weights[place][k]
                loss = self._through(k, shares[place][k], weight / total if total else 0.0)
                losses += [loss * (weight / whole)] if weight else []
                seen[place, k] = self.output, self._inputs
            self._update(total)
        self._enter(0)
        self._steps += 1
        self._together(shares, weights, seen)
        return torch.stack(losses).sum()

    def _through(self, microbatch: int, part: Part, share: float) -> Tensor:
        """Forward and backward of one microbatch, each at its own weights."""
        from schedlang.runtime.batch import called
        from schedlang.runtime.scope import Scope, entered

        given = self._given(part.inputs)
        self._fill(self.table.forward[microbatch])
        with entered(Scope(self._steps, 0, part.rows)), self._noting_order():
            self.output = called(self.module, given)
            loss = self.loss(self.output, given) * self.scale
            self._fill(self.table.backward[microbatch])
            if share:
                (loss * share).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _update(self, total: float) -> None:
        """The next version, from the newest one; of microbatches without weight, the same again."""
        from torch.nn.utils import clip_grad_norm_

        assert self._optimizer is not None, "this subject was made without an optimizer"
        newest = len(self._history) - 1
        self._fill(dict.fromkeys(self._stages(), newest))
        self.grad_norm = clip_grad_norm_([p for _, p in self._named], math.inf)
        if total:
            self._optimizer.step()
        self._history.append(self._weights())

    def _stages(self) -> set[int]:
        return {0, *self.table.stage.values()}

    def _weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self._named}

    def _fill(self, versions: Versions) -> None:
        """Write versions of the weights into the parameters, behind the back of autograd."""
        for name, parameter in self._named:
            version = versions[self.table.stage.get(name, 0)]
            parameter.data.copy_(self._history[version][name])

    def _together(
        self,
        shares: Sequence[Sequence[Part]],
        weights: Sequence[Sequence[float]],
        seen: Mapping[tuple[int, int], tuple[Any, dict[str, Any]]],
    ) -> None:
        """Output and inputs of all parts as of one batch, replica after replica."""
        from schedlang.runtime.batch import stack

        found = [seen[place, k] for place, k in _places(shares)]
        rows = [len(part.rows) for parts in shares for part in parts]
        self._inputs = joined([inputs for _, inputs in found])
        self.output = stack(
            [output for output, _ in found], rows, [w for row in weights for w in row]
        )


def _places(shares: Sequence[Sequence[Part]]) -> Iterator[tuple[int, int]]:
    return ((place, k) for place, parts in enumerate(shares) for k in range(len(parts)))
