"""Stand-ins for logits that a model's own loss handles, and logits split over the vocabulary.

* Base of stand-ins for logits: calls of torch's functions, indices, and the loss's arguments. A
  stand-in goes through a model's own code in place of logits that are nowhere whole.  It knows a
  few functions; for anything else it gives the whole, so that any model gets what it asked for.
* Logits split over the vocabulary: a stand-in that a model's own loss code may handle. The cross-
  entropy over split logits needs three numbers per token from each rank, never the whole row
  (Shoeybi et al. 2019, section 3).  The stand-in follows casts, views, scaling and slices of the
  leading dims; at `cross_entropy` it computes the parallel loss; for anything else the logits are
  gathered first, so that any model still gets what it asked for.
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

from schedlang.runtime.bounds import check_within
from schedlang.runtime.comm import collectives, world
from schedlang.runtime.comm.collectives import Group
from schedlang.runtime.modes import again


class StandIn:
    """Logits [..., classes] that are not there as one tensor."""

    @property
    def ndim(self) -> int:
        """The number of dims, as Tensor.ndim."""
        return len(self.shape)

    @property
    def shape(self) -> Size:
        """The shape of the whole."""
        raise NotImplementedError

    def whole(self) -> Tensor:
        """The logits, as a plain tensor."""
        raise NotImplementedError

    @property
    def lines(self) -> Tensor:
        """The tensor with the same leading dims, of whose last dim the logits are made."""
        raise NotImplementedError

    def with_lines(self, lines: Tensor) -> Any:
        """The logits of other leading dims."""
        raise NotImplementedError

    def view(self, *shape: Any) -> Any:
        """View as Tensor.view where the last dim stays whole; of the whole otherwise."""
        sizes = list(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else list(shape)
        if self.has_loss() and sizes and _keeps_last(sizes, self.shape):
            return self.with_lines(self.lines.reshape(*sizes[:-1], self.lines.shape[-1]))
        return self.whole().reshape(*shape)

    reshape = view

    def __getitem__(self, index: Any) -> Any:
        if self.has_loss() and _takes_rows(index, self.ndim):
            return self.with_lines(self.lines[index])
        return self.whole()[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(name)
        return getattr(self.whole(), name)

    def has_loss(self) -> bool:
        """Tell whether the loss can be computed without the whole logits."""
        return True

    @classmethod
    def known(cls) -> Mapping[Any, Callable[..., Any]]:
        """Functions of torch whose first argument may be a stand-in, and what is done for them."""
        raise NotImplementedError

    def size(self, dim: int | None = None) -> Any:
        """Return the size, as Tensor.size."""
        return self.shape if dim is None else self.shape[dim]

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        """Flatten as Tensor.flatten; a view where the last dim stays whole."""
        first, last = start_dim % self.ndim, end_dim % self.ndim
        if not first <= last < self.ndim - 1:
            return self.whole().flatten(start_dim, end_dim)
        sizes = tuple(self.shape)
        return self.view(*sizes[:first], math.prod(sizes[first : last + 1]), *sizes[last + 1 :])

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Functions of torch: what is known here, or a call with the whole."""
        kwargs, known = dict(kwargs or {}), cls.known().get(func)
        if "input" in kwargs and known is not None:
            args = (kwargs.pop("input"), *args)
        with again():  # a mode that saw the call first is off inside of it
            if known is not None and args and isinstance(args[0], cls):
                return known(*args, **kwargs)
            whole = {name: made_whole(value) for name, value in kwargs.items()}
            return func(*(made_whole(value) for value in args), **whole)


def made_whole(value: Any) -> Any:
    """Any stand-in in an argument as a tensor."""
    if isinstance(value, StandIn):
        return value.whole()
    return type(value)(map(made_whole, value)) if type(value) in (list, tuple) else value


def _takes_rows(index: Any, ndim: int) -> bool:
    """Tell whether an index keeps the last dim whole, and picks among the others by numbers."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(part, slice | int) or part is Ellipsis for part in parts):
        return False
    return len(parts) < ndim and Ellipsis not in parts or parts[-1] == slice(None)


def _keeps_last(sizes: list[Any], shape: torch.Size) -> bool:
    """Tell whether a view by these sizes keeps the last dim."""
    if sizes.count(-1) > 1 or sizes[-1] not in (-1, shape[-1]):
        return False
    known = torch.Size(s for s in sizes[:-1] if s != -1).numel()
    rows = shape[:-1].numel()
    return known == rows if -1 not in sizes[:-1] else bool(known) and rows % known == 0


Loss = Callable[[Any, Tensor, Tensor, str, float], Tensor]


def as_torchs(loss: Loss) -> Callable[..., Tensor]:
    """`torch.nn.functional.cross_entropy` of a stand-in [tokens, classes] by `loss`.

    It is given the stand-in, the classes, which of them count, the reduction and the smoothing.
    Weights of classes and labels that are probabilities are left to torch, on the whole.
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
        plain = logits.ndim == 2 and not target.is_floating_point() and logits.has_loss()
        if not plain or weight is not None or size_average is not None or reduce is not None:
            return F.cross_entropy(
                logits.whole(),
                target,
                weight,
                size_average,
                ignore_index,
                reduce,
                reduction,
                label_smoothing,
            )
        counts = target != ignore_index
        helps = (f"give {ignore_index} (`ignore_index`) to what has no label",)
        counted = target.masked_fill(~counts, 0)
        check_within(counted, logits.shape[-1], "the label", "the logits", helps)
        return loss(logits, target, counts, reduction, label_smoothing)

    cross_entropy.__doc__ = loss.__doc__
    return cross_entropy


def reduced(loss: Tensor, counts: Tensor, reduction: str) -> Tensor:
    """The losses of tokens as torch reduces them; of those that do not count nothing."""
    loss = loss.masked_fill(~counts, 0.0)
    if reduction == "none":
        return loss
    return loss.sum() / counts.sum() if reduction == "mean" else loss.sum()


def _held(x: Tensor, target: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Return where in this rank's part of the last dim the targets lie, and which of them do."""
    local = target - group.rank * x.shape[-1]  # every rank holds as many, padding included
    mine = (local >= 0) & (local < x.shape[-1])
    return local.clamp_(0, x.shape[-1] - 1), mine


class _Statistics(torch.autograd.Function):
    """log-sum-exp, the target's logit, and if asked the sum of logits, over the split last dim."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, target: Tensor, group: Group, summed: bool
    ) -> tuple[Tensor, ...]:
        """Shift by the largest logit of all ranks, and sum over them in one collective."""
        largest = x.amax(-1)
        collectives.count("all-reduce", group, largest)
        world.all_reduce(largest, group.pg, largest=True)
        local, mine = _held(x, target, group)
        picked = torch.where(mine, x.gather(-1, local[..., None])[..., 0], 0.0)
        exps = (x - largest[..., None]).exp_().sum(-1)
        parts = [exps, picked]
        if summed:  # padding has no logit to be summed
            parts.append(x.masked_fill(x == -torch.inf, 0.0).sum(-1))
        sums = collectives.all_reduce(torch.stack(parts), group)
        logsumexp = sums[0].log() + largest
        ctx.save_for_backward(x, logsumexp, target)
        ctx.group = group
        ctx.set_materialize_grads(False)
        return logsumexp, *(one.clone() for one in sums[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        """Softmax, one-hot and ones, each by its gradient: of this rank's words only.

        Nothing as large as the logits lives beside them and their gradient.
        """
        x, logsumexp, target = ctx.saved_tensors
        local, mine = _held(x, target, ctx.group)
        by_lse, by_target, *by_sum = grads
        out = (x - logsumexp[..., None]).exp_().mul_(by_lse[..., None])
        for one in by_sum:  # labels are smoothed
            out += one[..., None] * (x != -torch.inf)
        out.scatter_add_(-1, local[..., None], (by_target * mine)[..., None])
        return out, None, None, None


@as_torchs
def cross_entropy(
    logits: ShardedLogits, target: Tensor, counts: Tensor, reduction: str, smoothing: float
) -> Tensor:
    """`torch.nn.functional.cross_entropy` on logits (..., classes) split over the last dim."""
    given = (logits.local, target, logits.group, bool(smoothing))
    stats = _Statistics.apply(*given)  # type: ignore[no-untyped-call]
    logsumexp, picked, *total = cast(tuple[Tensor, ...], stats)
    loss = logsumexp - picked
    if smoothing:
        flat = logsumexp - total[0] / logits.classes
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
            return lambda *a, **k: self.with_lines(getattr(self.local, name)(*a, **k))
        return super().__getattr__(name)

    def whole(self) -> Tensor:
        """Gather the whole, on every rank alike."""
        whole = collectives.gather(self.local, -1, self.group, consumers_differ=False)
        return whole[..., : self.classes]

    # -- what keeps the split --------------------------------------------------------------------

    @property
    def lines(self) -> Tensor:
        """This rank's part of the logits."""
        return self.local

    def with_lines(self, lines: Tensor) -> ShardedLogits:
        """The same classes of other logits."""
        return ShardedLogits(lines, self.group, self.classes)

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, int | float):
            return self.with_lines(self.local * other)
        return self.whole() * other

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        if isinstance(other, int | float):
            return self.with_lines(self.local / other)
        return self.whole() / other

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
