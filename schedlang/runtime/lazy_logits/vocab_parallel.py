"""Stand-ins for logits in a model's own loss code, and logits that are sharded over the vocabulary.

* `LogitsStandIn`: the base class.  A stand-in passes through the model's code in place of logits
  that no rank has as one tensor.  It implements a few functions; any other function gets the full
  logits.
* `ShardedLogits`: logits that are split over the vocabulary.  Their cross-entropy needs three
  numbers per token from each rank, never the full row (Shoeybi et al. 2019, section 3).  The
  stand-in follows casts, views, scaling and slices of the leading dims, and computes the parallel
  loss at `cross_entropy`; for any other function the logits are gathered first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Size, Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from schedlang.runtime.comm import collectives, world
from schedlang.runtime.comm.collectives import Group
from schedlang.runtime.index_bounds import check_indices
from schedlang.runtime.modes import reenter_modes


class LogitsStandIn:
    """Logits [..., classes] that do not exist as one tensor."""

    @property
    def ndim(self) -> int:
        """The number of dims, as Tensor.ndim."""
        return len(self.shape)

    @property
    def shape(self) -> Size:
        """The shape of the full logits."""
        raise NotImplementedError

    def full(self) -> Tensor:
        """Return the full logits, as a plain tensor."""
        raise NotImplementedError

    @property
    def base(self) -> Tensor:
        """The tensor with the same leading dims, from whose last dim the logits are computed."""
        raise NotImplementedError

    def with_base(self, lines: Tensor) -> Any:
        """Return the logits of `lines` in place of those of `base`."""
        raise NotImplementedError

    def view(self, *shape: Any) -> Any:
        """View as Tensor.view; a stand-in if the last dim is kept, else of the full logits."""
        sizes = list(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else list(shape)
        if self.has_loss() and sizes and _keeps_last(sizes, self.shape):
            return self.with_base(self.base.reshape(*sizes[:-1], self.base.shape[-1]))
        return self.full().reshape(*shape)

    reshape = view

    def __getitem__(self, index: Any) -> Any:
        if self.has_loss() and _takes_rows(index, self.ndim):
            return self.with_base(self.base[index])
        return self.full()[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(name)
        return getattr(self.full(), name)

    def has_loss(self) -> bool:
        """Return whether the loss can be computed without the full logits."""
        return True

    @classmethod
    def replacements(cls) -> Mapping[Any, Callable[..., Any]]:
        """Return functions of torch that accept a stand-in as first argument -> replacements."""
        raise NotImplementedError

    def size(self, dim: int | None = None) -> Any:
        """Return the size, as Tensor.size."""
        return self.shape if dim is None else self.shape[dim]

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        """Flatten as Tensor.flatten; a stand-in if the last dim is kept."""
        first, last = start_dim % self.ndim, end_dim % self.ndim
        if not first <= last < self.ndim - 1:
            return self.full().flatten(start_dim, end_dim)
        sizes = tuple(self.shape)
        return self.view(*sizes[:first], math.prod(sizes[first : last + 1]), *sizes[last + 1 :])

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function's replacement, or the function with the full logits."""
        kwargs, replacement = dict(kwargs or {}), cls.replacements().get(func)
        if "input" in kwargs and replacement is not None:
            args = (kwargs.pop("input"), *args)
        with reenter_modes():  # a function mode that called this is off inside
            if replacement is not None and args and isinstance(args[0], cls):
                return replacement(*args, **kwargs)
            full_kwargs = {name: to_full(value) for name, value in kwargs.items()}
            return func(*(to_full(value) for value in args), **full_kwargs)


def to_full(value: Any) -> Any:
    """Return an argument with full logits in place of stand-ins."""
    if isinstance(value, LogitsStandIn):
        return value.full()
    return type(value)(map(to_full, value)) if type(value) in (list, tuple) else value


def _takes_rows(index: Any, ndim: int) -> bool:
    """Return whether an index keeps the last dim, and indexes others by integers and slices."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(part, slice | int) or part is Ellipsis for part in parts):
        return False
    return len(parts) < ndim and Ellipsis not in parts or parts[-1] == slice(None)


def _keeps_last(sizes: list[Any], shape: torch.Size) -> bool:
    """Return whether a view with these sizes keeps the last dim."""
    if sizes.count(-1) > 1 or sizes[-1] not in (-1, shape[-1]):
        return False
    kept_rows = torch.Size(s for s in sizes[:-1] if s != -1).numel()
    rows = shape[:-1].numel()
    return kept_rows == rows if -1 not in sizes[:-1] else bool(kept_rows) and rows % kept_rows == 0


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
        if name in _ALONG:
            return lambda *a, **k: self.with_base(getattr(self.local, name)(*a, **k))
        return super().__getattr__(name)

    def full(self) -> Tensor:
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

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, int | float):
            return self.with_base(self.local * other)
        return self.full() * other

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        if isinstance(other, int | float):
            return self.with_base(self.local / other)
        return self.full() / other

    @classmethod
    def replacements(cls) -> Mapping[Any, Callable[..., Any]]:
        """Return the functions that keep the split, and the parallel loss."""
        return {F.cross_entropy: cross_entropy, torch.flatten: ShardedLogits.flatten}


# methods that are elementwise, or do not need the full last dim
_ALONG = frozenset(["float", "double", "half", "bfloat16", "to", "contiguous", "clone", "detach"])


def _parts(logits: ShardedLogits) -> tuple[list[Any], Any]:
    return [logits.local], (logits.group, logits.classes)


def _made(children: Iterable[Any], context: Any) -> ShardedLogits:
    (local,) = children
    return ShardedLogits(local, *context)


# code that looks for tensors in an output (hooks of fully_shard, stages) finds the local shard
pytree.register_pytree_node(
    ShardedLogits,
    _parts,
    _made,
    flatten_with_keys_fn=lambda x: ([(pytree.GetAttrKey("local"), x.local)], (x.group, x.classes)),
)
