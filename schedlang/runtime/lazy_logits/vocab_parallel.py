"""Logits split over the vocabulary: a stand-in that a model's own loss code may handle.

The cross-entropy over split logits needs three numbers per token from each rank, never the whole
row (Shoeybi et al. 2019, section 3).  The stand-in follows casts, views, scaling and slices of the
leading dims; at `cross_entropy` it computes the parallel loss; for anything else the logits are
gathered first, so that any model still gets what it asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from schedlang.runtime.comm import collectives, world
from schedlang.runtime.comm.collectives import Group
from schedlang.runtime.lazy_logits.stand_in import StandIn, as_torchs, reduced, takes_rows


class _Statistics(torch.autograd.Function):
    """log-sum-exp, the target's logit, and the sum of all logits, over the split last dim."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
        """Shift by the largest logit of all ranks, and sum over them in one collective."""
        largest = x.amax(-1)
        collectives.count("all-reduce", group, largest)
        world.all_reduce(largest, group.pg, largest=True)
        offset = group.rank * x.shape[-1]  # every rank holds as many, padding included
        local = target - offset
        mine = (local >= 0) & (local < x.shape[-1])
        local = local.clamp(0, x.shape[-1] - 1)
        picked = x.gather(-1, local[..., None])[..., 0] * mine
        exps = (x - largest[..., None]).exp_().sum(-1)
        total = x.masked_fill(x == -torch.inf, 0.0).sum(-1)  # padding has no logit to be summed
        sums = collectives.all_reduce(torch.stack([exps, picked, total]), group)
        logsumexp = sums[0].log() + largest
        ctx.save_for_backward(x, logsumexp, local, mine)
        ctx.set_materialize_grads(False)
        return logsumexp, sums[1].clone(), sums[2].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        """Softmax, one-hot and ones, each by its gradient: of this rank's words only.

        Nothing as large as the logits lives beside them and their gradient.
        """
        x, logsumexp, local, mine = ctx.saved_tensors
        by_lse, by_target, by_sum = grads
        out = (x - logsumexp[..., None]).exp_().mul_(by_lse[..., None])
        if by_sum is not None:  # labels are smoothed
            out += by_sum[..., None] * (x != -torch.inf)
        out.scatter_add_(-1, local[..., None], (by_target * mine)[..., None])
        return out, None, None


@as_torchs
def cross_entropy(
    logits: ShardedLogits, target: Tensor, counts: Tensor, reduction: str, smoothing: float
) -> Tensor:
    """`torch.nn.functional.cross_entropy` on logits (..., classes) split over the last dim."""
    filled = target.masked_fill(~counts, 0)
    stats = _Statistics.apply(logits.local, filled, logits.group)  # type: ignore[no-untyped-call]
    logsumexp, picked, total = cast(tuple[Tensor, Tensor, Tensor], stats)
    loss = logsumexp - picked
    if smoothing:
        flat = logsumexp - total / logits.classes
        loss = (1 - smoothing) * loss + smoothing * flat
    return reduced(loss, counts, reduction)


@dataclass(eq=False)  # fully_shard looks for tensors in dataclasses, to gather before backward
class ShardedLogits(StandIn):
    """Logits (..., classes) of which each rank holds an equal part of the last dim.

    `classes` is the true number; what lies beyond is padding and must hold -inf.
    """

    local: Tensor
    group: Group
    classes: int

    # -- what is read ----------------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole."""
        return torch.Size((*self.local.shape[:-1], self.classes))

    def __getattr__(self, name: str) -> Any:
        if name in ("dtype", "device", "requires_grad", "is_floating_point", "dim"):
            return getattr(self.local, name)
        if name in _ALONG:
            return lambda *a, **k: self._with(getattr(self.local, name)(*a, **k))
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(name)
        return getattr(self.gathered(), name)

    def gathered(self) -> Tensor:
        """The whole, on every rank alike."""
        whole = collectives.gather(self.local, -1, self.group, consumers_differ=False)
        return whole[..., : self.classes]

    def whole(self) -> Tensor:
        """Return the logits as a plain tensor."""
        return self.gathered()

    # -- what keeps the split --------------------------------------------------------------------

    def _with(self, local: Tensor) -> ShardedLogits:
        return ShardedLogits(local, self.group, self.classes)

    def view(self, *shape: Any) -> Any:
        """View as Tensor.view where the last dim stays whole; gathered otherwise."""
        sizes = list(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else list(shape)
        if sizes and sizes[-1] in (self.classes, -1) and (sizes.count(-1) < 2):
            leading_known = -1 not in sizes[:-1]
            if sizes[-1] == self.classes or (
                leading_known and torch.Size(sizes[:-1]).numel() == self.shape[:-1].numel()
            ):
                return self._with(self.local.reshape(*sizes[:-1], self.local.shape[-1]))
        return self.gathered().reshape(*shape)

    reshape = view

    def __getitem__(self, index: Any) -> Any:
        if takes_rows(index, self.local.ndim):
            return self._with(self.local[index])
        return self.gathered()[index]

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, int | float):
            return self._with(self.local * other)
        return self.gathered() * other

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        if isinstance(other, int | float):
            return self._with(self.local / other)
        return self.gathered() / other

    @classmethod
    def known(cls) -> Mapping[Any, Callable[..., Any]]:
        """The parallel loss, and what keeps the split."""
        return {F.cross_entropy: cross_entropy, torch.flatten: ShardedLogits.flatten}


# methods that act on each element, or that need no whole last dim
_ALONG = frozenset(["float", "double", "half", "bfloat16", "to", "contiguous", "clone", "detach"])


def _parts(logits: ShardedLogits) -> tuple[list[Any], Any]:
    return [logits.local], (logits.group, logits.classes)


def _made(children: Iterable[Any], context: Any) -> ShardedLogits:
    (local,) = children
    return ShardedLogits(local, *context)


# whoever looks for tensors in an output (hooks of fully_shard, stages) finds the local one
pytree.register_pytree_node(
    ShardedLogits,
    _parts,
    _made,
    flatten_with_keys_fn=lambda x: ([(pytree.GetAttrKey("local"), x.local)], (x.group, x.classes)),
)
