"""Logits that are sharded over the vocabulary, and the signature of a loss for stand-ins.

The cross-entropy of `ShardedLogits` needs three numbers per token from each rank, never the full
row (Shoeybi et al. 2019, section 3).  The stand-in follows casts, views, scaling and slices of the
leading dims, and computes the parallel loss at `cross_entropy`; for any other function the logits
are gathered first.
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
from schedlang.runtime.index_bounds import check_indices
from schedlang.runtime.lazy_logits.stand_in import LogitsStandIn, is_number, to_full

Loss = Callable[[Any, Tensor, Tensor, str, float], Tensor]


def with_torch_signature(loss: Loss) -> Callable[..., Tensor]:
    """Return `torch.nn.functional.cross_entropy` for stand-ins [tokens, classes], by `loss`.

    `loss` gets the stand-in, the labels, a mask of labels that count, the reduction and the
    smoothing.  Calls with class weights, or with probabilities as labels, use torch's function on
    the full logits.
    """

    def cross_entropy(
        logits: Any,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        supported = logits.ndim == 2 and not target.is_floating_point() and logits.has_loss()
        if not supported or weight is not None or size_average is not None or reduce is not None:
            return F.cross_entropy(
                logits.full(),
                target,
                weight,
                size_average,
                ignore_index,
                reduce,
                reduction,
                label_smoothing,
            )
        counts = target != ignore_index
        helps = (f"give {ignore_index} (`ignore_index`) to tokens without a label",)
        counted = target.masked_fill(~counts, 0)
        check_indices(counted, logits.shape[-1], "the label", "the logits", helps)
        return loss(logits, target, counts, reduction, label_smoothing)

    cross_entropy.__doc__ = loss.__doc__
    return cross_entropy


def reduce_losses(loss: Tensor, counts: Tensor, reduction: str) -> Tensor:
    """Reduce the losses of tokens as torch does; tokens whose label does not count give 0."""
    loss = loss.masked_fill(~counts, 0.0)
    if reduction == "none":
        return loss
    return loss.sum() / counts.sum() if reduction == "mean" else loss.sum()


def _local_targets(x: Tensor, target: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Return the targets as indices of this rank's shard, and a mask of those inside of it."""
    local = target - group.rank * x.shape[-1]  # shards are of equal size, with padding
    is_local = (local >= 0) & (local < x.shape[-1])
    return local.clamp_(0, x.shape[-1] - 1), is_local


class _Statistics(torch.autograd.Function):
    """Log-sum-exp, the target's logit and, if `summed`, the sum of logits over the split dim."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, target: Tensor, group: Group, summed: bool
    ) -> tuple[Tensor, ...]:
        """Shift by the largest logit of all ranks, and sum over the ranks in one all-reduce."""
        largest = x.amax(-1)
        collectives.count("all-reduce", group, largest)
        world.all_reduce(largest, group.pg, largest=True)
        local, is_local = _local_targets(x, target, group)
        picked = torch.where(is_local, x.gather(-1, local[..., None])[..., 0], 0.0)
        exps = (x - largest[..., None]).exp_().sum(-1)
        parts = [exps, picked]
        if summed:  # padding has no logit to be summed
            parts.append(x.masked_fill(x == -torch.inf, 0.0).sum(-1))
        sums = collectives.all_reduce(torch.stack(parts), group)
        logsumexp = sums[0].log() + largest
        ctx.save_for_backward(x, logsumexp, target)
        ctx.group = group
        ctx.set_materialize_grads(False)
        return logsumexp, *(part.clone() for part in sums[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        """Add softmax, one-hot and ones, each times its gradient, for this rank's classes only.

        The logits and their gradient are the only tensors of their size.
        """
        x, logsumexp, target = ctx.saved_tensors
        local, is_local = _local_targets(x, target, ctx.group)
        by_lse, by_target, *by_sum = grads
        grad = (x - logsumexp[..., None]).exp_().mul_(by_lse[..., None])
        for grad_sum in by_sum:  # with label smoothing
            grad += grad_sum[..., None] * (x != -torch.inf)
        grad.scatter_add_(-1, local[..., None], (by_target * is_local)[..., None])
        return grad, None, None, None


@with_torch_signature
def cross_entropy(
    logits: ShardedLogits, target: Tensor, counts: Tensor, reduction: str, smoothing: float
) -> Tensor:
    """Compute `torch.nn.functional.cross_entropy` of logits that are split over the last dim."""
    args = (logits.local, target, logits.group, bool(smoothing))
    stats = _Statistics.apply(*args)  # type: ignore[no-untyped-call]
    logsumexp, picked, *total = cast(tuple[Tensor, ...], stats)
    loss = logsumexp - picked
    if smoothing:
        flat = logsumexp - total[0] / logits.classes
        loss = (1 - smoothing) * loss + smoothing * flat
    return reduce_losses(loss, counts, reduction)


@dataclass(eq=False)  # fully_shard looks for tensors in dataclasses, to gather before backward
class ShardedLogits(LogitsStandIn):
    """Logits (..., classes) of which each rank holds an equal shard of the last dim.

    `classes` is the number without padding; logits of padding must be -inf.
    """

    local: Tensor
    group: Group
    classes: int

    # -- attributes of a tensor --------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        """The shape of the full logits."""
        return torch.Size((*self.local.shape[:-1], self.classes))

    def __getattr__(self, name: str) -> Any:
        if name in ("dtype", "device", "requires_grad", "is_floating_point", "dim"):
            return getattr(self.local, name)
        if name in _ALONG and self.has_loss():
            return lambda *args, **kwargs: self._along(name, *args, **kwargs)
        return super().__getattr__(name)

    def compute(self) -> Tensor:
        """All-gather the full logits."""
        full_logits = collectives.gather(self.local, -1, self.group, consumers_differ=False)
        return full_logits[..., : self.classes]

    # -- steps that keep the split -----------------------------------------------------------------

    @property
    def base(self) -> Tensor:
        """This rank's shard of the logits."""
        return self.local

    def with_base(self, lines: Tensor) -> ShardedLogits:
        """Return sharded logits with another local shard."""
        return ShardedLogits(lines, self.group, self.classes)

    def become(self, other: Any) -> None:
        """Take over the values of other sharded logits."""
        self.local = other.local

    def _along(self, name: str, *args: Any, **kwargs: Any) -> Any:
        local = getattr(self.local, name)(*args, **kwargs)
        if local is self.local:
            return self
        copied = self.with_base(local)
        if name == "detach":  # the same memory
            return self.linked(copied, lambda full: full.detach())
        return copied

    def __mul__(self, other: Any) -> Any:
        if is_number(other) and self.has_loss():
            return self.with_base(self.local * other)
        return self.full() * to_full(other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        if is_number(other) and self.has_loss():
            return self.with_base(self.local / other)
        return self.full() / to_full(other)

    @classmethod
    def replacements(cls) -> Mapping[Any, Callable[..., Any]]:
        """Return the functions that keep the split, and the parallel loss."""
        return {F.cross_entropy: cross_entropy, torch.flatten: ShardedLogits.flatten}


# methods that are elementwise, or do not need the full last dim
_ALONG = frozenset(["float", "double", "half", "bfloat16", "to", "contiguous", "clone", "detach"])


def _parts(logits: ShardedLogits) -> tuple[list[Any], Any]:
    if not logits.has_loss():
        return [logits.full()], None
    return [logits.local], (logits.group, logits.classes)


def _made(children: Iterable[Any], context: Any) -> Any:
    (tensor,) = children
    return tensor if context is None else ShardedLogits(tensor, *context)


# code that looks for tensors in an output (hooks of fully_shard, stages) finds the local shard
pytree.register_pytree_node(
    ShardedLogits,
    _parts,
    _made,
    flatten_with_keys_fn=lambda x: (
        [(pytree.GetAttrKey("local"), part) for part in _parts(x)[0]],
        _parts(x)[1],
    ),
)
