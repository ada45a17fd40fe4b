"""The original under stale weights: what `relax(staleness)` allows, replayed in one process.

Microbatch after microbatch, each stage's parameters are filled with the version that the table
names, once for the forward and once for the backward.  What autograd saved of a parameter is the
parameter's own storage, so a backward reads what it is filled with then.  An update comes when all
its microbatches are through, on the newest weights.  The only thing shared with the program is the
table of versions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from schedlang.passes.preparing.stale_table import Table, Versions
from schedlang.passes.proving.observe import Batch
from schedlang.passes.proving.parted import Parted, joined

if TYPE_CHECKING:
    from torch import Tensor

    from schedlang.runtime.parts import Part


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
        from schedlang.runtime.given import called
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
        self, shares: Sequence[Sequence[Part]], weights: Sequence[Sequence[float]],
        seen: Mapping[tuple[int, int], tuple[Any, dict[str, Any]]],
    ) -> None:  # fmt: skip
        """Output and inputs of all parts as of one batch, replica after replica."""
        from schedlang.runtime.parts import stack

        found = [seen[place, k] for place, k in _places(shares)]
        rows = [len(part.rows) for parts in shares for part in parts]
        self._inputs = joined([inputs for _, inputs in found])
        self.output = stack(
            [output for output, _ in found], rows, [w for row in weights for w in row]
        )


def _places(shares: Sequence[Sequence[Part]]) -> Iterator[tuple[int, int]]:
    return ((place, k) for place, parts in enumerate(shares) for k in range(len(parts)))
