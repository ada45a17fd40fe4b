"""Lazy logits: `lm_head` and cross-entropy are computed together in chunks, in any model.

In training the head returns `LazyLogits`, a stand-in that the model's own loss code handles like
logits.  It records casts, views, scaling, a soft cap and slices of the leading dims.  At
`cross_entropy` (or `logsumexp`, for a z-loss) the product and the loss are computed together, chunk
by chunk (kernels/linear_cross_entropy.py).  Any other function gets the logits as the head computes
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.kernels.kernel_device import autocast_dtype
from schedlang.kernels.linear_cross_entropy import Case, Form, statistics, weighted_loss
from schedlang.kernels.probe import (
    TOLERANCE,
    Mismatch,
    bare_copy,
    gradients_distance,
    random_rows,
    relative_error,
)
from schedlang.runtime.adapters.torch_compile import patch_loss_modules
from schedlang.runtime.comm import collectives, world
from schedlang.runtime.comm.collectives import Group
from schedlang.runtime.forward import layer_of, the_input
from schedlang.runtime.lazy_logits.stand_in import LogitsStandIn, is_number, to_full
from schedlang.runtime.lazy_logits.vocab_parallel import reduce_losses, with_torch_signature

Statistics = tuple[Tensor, Tensor, Tensor]


class LocalClasses(NamedTuple):
    """This rank's classes: `own_classes` from `first` on, of all `classes` over the ranks of a
    group.

    Rows of the rank's weight beyond `own_classes` are padding.
    """

    first: int
    own_classes: int
    classes: int
    group: Group | None = None

    @classmethod
    def of(cls, group: Group, width: int, classes: int) -> LocalClasses:
        """Return the classes of a rank of `group`; every rank holds `width` rows of the weight."""
        first = group.rank * width
        return cls(first, max(0, min(width, classes - first)), classes, group)


class _ReducedStatistics(torch.autograd.Function):
    """Combines the ranks' statistics of their classes into those of full rows: two all-reduces."""

    @staticmethod
    def forward(ctx: Any, lse: Tensor, picked: Tensor, total: Tensor, group: Group) -> Statistics:
        """Sum the exponentials over the ranks, shifted by the largest log-sum-exp."""
        largest = lse.clone()
        collectives.count("all-reduce", group, largest)
        world.all_reduce(largest, group.pg, largest=True)
        sums = collectives.all_reduce(torch.stack([(lse - largest).exp(), picked, total]), group)
        full_lse = sums[0].log() + largest
        ctx.save_for_backward(lse, full_lse)
        return full_lse, sums[1].clone(), sums[2].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Scale by the rank's share of the exponentials; the loss is equal on all ranks."""
        lse, full_lse = ctx.saved_tensors
        return grads[0] * (lse - full_lse).exp(), grads[1], grads[2], None


@dataclass(eq=False)
class LazyLogits(LogitsStandIn):
    """Logits x @ weight.T + bias [..., classes] that are not computed, and later steps.

    `like` is an empty tensor of the current dtype.  `steps` repeat the steps; apart from casts they
    are cap * tanh(scale * z), or scale * z if `cap` is 0.  At most `budget` bytes of logits exist
    at a time; `in_place`: all logits exist from the loss to its backward.

    torch.compile traces this class, and returns it from graphs: therefore its fields are of types
    that torch.compile can construct, and the dataclass is not frozen.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    part: LocalClasses
    budget: int = 0
    in_place: bool = False
    like: Tensor = field(default_factory=lambda: torch.empty(0))
    scale: float = 1.0
    cap: float = 0.0
    steps: tuple[Callable[[Tensor], Tensor], ...] = ()

    # -- attributes of a tensor --------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        """The shape of the logits."""
        return torch.Size((*self.x.shape[:-1], self.part.classes))

    @property
    def dtype(self) -> torch.dtype:
        """The current dtype of the logits."""
        return self.like.dtype

    @property
    def device(self) -> torch.device:
        """The device of the logits."""
        return self.x.device

    @property
    def requires_grad(self) -> bool:
        """Whether a gradient flows through the logits."""
        return self.x.requires_grad or self.weight.requires_grad

    def dim(self) -> int:
        """Return the number of dims, as Tensor.dim."""
        return self.x.ndim

    def __len__(self) -> int:
        return self.shape[0]

    def compute(self) -> Tensor:
        """Return the logits as the head and the later steps compute them."""
        z = F.linear(self.x, self.weight, self.bias)
        if self.part.group is not None:
            z = collectives.gather(z, -1, self.part.group, consumers_differ=False)
            z = z[..., : self.part.classes]
        for step in self.steps:
            z = step(z)
        return z

    # -- steps that stay lazy ----------------------------------------------------------------------

    def _add_step(self, step: Callable[[Tensor], Tensor], **changes: Any) -> Any:
        """Record one more step, or apply it if the logits are computed already."""
        if not self.has_loss():
            return step(self.full())
        return replace(self, steps=(*self.steps, step), like=step(self.like), **changes)

    def become(self, other: Any) -> None:
        """Take over the steps of other logits of the same head."""
        self.steps = other.steps
        self.like = other.like
        self.scale = other.scale
        self.cap = other.cap

    def _cast(self, name: str, *args: Any, **kwargs: Any) -> Any:
        cast = self._add_step(lambda z: getattr(z, name)(*args, **kwargs))
        return self if name != "clone" and getattr(cast, "like", None) is self.like else cast

    def _times(self, factor: float, step: Callable[[Tensor], Tensor]) -> Any:
        if not factor:
            return step(self.full())
        if self.cap:
            return self._add_step(step, cap=self.cap * factor)
        return self._add_step(step, scale=self.scale * factor)

    def __mul__(self, other: Any) -> Any:
        if is_number(other):
            return self._times(float(other), lambda z: z * other)
        return self.full() * to_full(other)

    __rmul__ = __mul__
    mul = __mul__

    def __truediv__(self, other: Any) -> Any:
        if is_number(other) and other:
            return self._times(1 / float(other), lambda z: z / other)
        return self.full() / to_full(other)

    div = __truediv__

    def tanh(self) -> Any:
        """Apply Tensor.tanh; a second tanh computes the logits, as no kernel has two."""
        return self.full().tanh() if self.cap else self._add_step(torch.tanh, cap=1.0)

    def detach(self) -> Any:
        """Detach as Tensor.detach."""
        bias = None if self.bias is None else self.bias.detach()
        if not self.has_loss():
            return self.full().detach()
        detached = replace(self, x=self.x.detach(), weight=self.weight.detach(), bias=bias)
        return self.linked(detached, lambda full: full.detach())

    @property
    def base(self) -> Tensor:
        """The inputs of the head: all recorded steps are elementwise."""
        return self.x

    def with_base(self, lines: Tensor) -> LazyLogits:
        """Return the logits of other inputs of the head."""
        return replace(self, x=lines)

    # -- the losses ------------------------------------------------------------------------------

    def has_loss(self) -> bool:
        """Return whether the fused loss can be used: the logits are not computed yet."""
        return self.computed is None and super().has_loss()

    def statistics(self, target: Tensor, form: Form) -> Statistics:
        """Return the statistics of full rows for the loss.

        `target` are indices among all classes, or negative.
        """
        rows, part = self.x.reshape(-1, self.x.shape[-1]), self.part
        if part.group is None:
            return statistics(rows, self.weight, self.bias, target, form)
        local = target - part.first
        local = torch.where((local >= 0) & (local < part.own_classes), local, -1)
        if part.own_classes:
            bias = None if self.bias is None else self.bias[: part.own_classes]
            local_stats = statistics(rows, self.weight[: part.own_classes], bias, local, form)
        else:  # only padding: its sum of exponentials is 0
            zeros = rows[:, 0] * 0.0
            local_stats = (zeros - torch.inf, zeros.clone(), zeros.clone())
        reduced: Statistics = _ReducedStatistics.apply(*local_stats, part.group)  # type: ignore[no-untyped-call]
        return reduced

    def logsumexp(self, dim: Any, keepdim: bool = False) -> Any:
        """Reduce as Tensor.logsumexp; over the classes, chunk by chunk."""
        if not self.has_loss() or dim not in (-1, self.ndim - 1, (-1,), [-1]):
            return self.full().logsumexp(dim, keepdim)
        no_target = torch.full((self.shape[:-1].numel(),), -1, device=self.device)
        # not `in_place`: besides the loss this would be a second tensor of logits
        form = Form(self.scale, self.cap, self.budget)
        lse = self.statistics(no_target, form)[0].to(self.dtype).view(self.shape[:-1])
        return lse.unsqueeze(-1) if keepdim else lse

    @classmethod
    def replacements(cls) -> Mapping[Any, Callable[..., Any]]:
        """Return the functions that keep the logits lazy, and the fused loss."""
        return _LAZY


@with_torch_signature
def cross_entropy(
    logits: LazyLogits, target: Tensor, counts: Tensor, reduction: str, smoothing: float
) -> Tensor:
    """Compute `torch.nn.functional.cross_entropy` of [tokens, classes] and a vector of classes."""
    form = Form(logits.scale, logits.cap, logits.budget, logits.in_place)
    target = target.masked_fill(~counts, -1)
    # a gradient that is computed in forward is not loss-scaled yet, and would underflow in float16
    if (
        not form.held
        and reduction != "none"
        and logits.part.group is None
        and logits.x.dtype != torch.float16
    ):
        number = counts.sum() if reduction == "mean" else torch.ones_like(counts.sum())
        share = 1.0 / number.to(torch.promote_types(logits.x.dtype, torch.float32))
        shares = torch.where(counts, share, 0.0)
        loss = weighted_loss(logits.x, logits.weight, logits.bias, target, shares, smoothing, form)
        # without labels the mean is NaN, and the gradient is zero, as in torch
        return torch.where(number > 0, loss, torch.nan).to(logits.dtype)
    lse, picked, total = logits.statistics(target, form)
    loss = lse - (1 - smoothing) * picked - smoothing * total / logits.part.classes
    return reduce_losses(loss.to(logits.dtype), counts, reduction)


def _casting(name: str) -> Callable[..., Any]:
    def cast(self: LazyLogits, *args: Any, **kwargs: Any) -> Any:
        return self._cast(name, *args, **kwargs)

    cast.__doc__ = f"As Tensor.{name}."
    return cast


for _name in ("float", "double", "half", "bfloat16", "to", "contiguous", "clone"):
    setattr(LazyLogits, _name, _casting(_name))
_LAZY: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: cross_entropy,
    torch.flatten: LazyLogits.flatten,
    torch.tanh: LazyLogits.tanh,
    torch.logsumexp: LazyLogits.logsumexp,
    torch.mul: LazyLogits.__mul__,
    torch.div: LazyLogits.__truediv__,
}


# -- the head --------------------------------------------------------------------------------------
# In training the head returns LazyLogits, which the model's forward passes to its own loss; without
# gradients, and in eval mode, the head computes logits.


@dataclass(frozen=True)
class Head:
    """A linear layer [..., width] -> [..., classes]; `weight` and `bias` name its parameters.

    `in_place`: its logits are computed once, and overwritten by their gradient.
    """

    weight: str
    bias: str | None
    width: int
    classes: int
    in_place: bool = False

    def cases(self) -> list[Any]:
        """Return test cases of the kernel: with all classes, but at most 512."""
        shape, classes = (7, min(self.width, 128)), min(self.classes, 512)
        runs = [("float32", 0.0), ("bfloat16", 0.0), ("float32", 0.1)]
        return [
            Case(shape, dtype, classes, self.bias is not None, smoothing, held=self.in_place)
            for dtype, smoothing in runs
        ]


def probe_in_place_head(module: nn.Module) -> Head | Mismatch:
    """Probe as `probe_head`, for logits that are overwritten by their gradient."""
    head = probe_head(module)
    return head if isinstance(head, Mismatch) else replace(head, in_place=True)


def probe_head(module: nn.Module) -> Head | Mismatch:
    """Return the head that a module is, or the measured reason why it is not a linear layer."""
    params = dict(module.named_parameters())
    weights = [name for name, p in params.items() if p.ndim == 2]
    vectors = [name for name in params if name not in weights]
    if len(weights) != 1 or len(vectors) > 1 or "." in weights[0]:
        listed = [f"{name} {tuple(p.shape)}" for name, p in list(params.items())[:3]]
        omitted = [f"and {len(params) - 3} more"] if len(params) > 3 else []
        shapes = ", ".join(listed + omitted) or "none"
        return Mismatch(f"has the parameters {shapes}: a head has a matrix, and perhaps a bias")
    if "forward" in vars(module):
        return Mismatch("has a replaced forward already")
    classes, width = params[weights[0]].shape
    head = Head(weights[0], vectors[0] if vectors else None, width, classes)
    if module._backward_hooks or module._backward_pre_hooks:
        return Mismatch("has a hook on gradients: those of logits that wait are never made")
    if type(module).forward is nn.Linear.forward:
        if head.weight != "weight" or head.bias not in (None, "bias"):
            return Mismatch(f"computes its weight from `{head.weight}` at each call")
        return head  # needs no run; a copy in float64 may be large
    if next(module.buffers(), None) is not None:
        return Mismatch("has buffers: a linear layer has none")
    return _compare_with_linear(module, head)


def _compare_with_linear(module: nn.Module, head: Head) -> Head | Mismatch:
    copied = bare_copy(module, torch.float64)
    params = dict(copied.named_parameters())
    weight, bias = params[head.weight], params[head.bias] if head.bias else None
    x = random_rows(head.width).requires_grad_()
    worst = 0.0
    for training in (True, False):
        copied.train(training)
        with torch.random.fork_rng(devices=[]):
            try:
                y, expected = copied(x), F.linear(x, weight, bias)
                gradient_error = gradients_distance(y, expected, [x, *params.values()])
                worst = max(worst, relative_error(y.detach(), expected.detach()), gradient_error)
            except Exception as raised:  # the module's own code: any error is a mismatch
                return Mismatch.raised(f"does not run on rows of {head.width} alone", raised)
    return head if worst <= TOLERANCE else Mismatch("differs from a linear layer", worst)


class LazyHead:
    """The layer around a head's forward: lazy logits in training, else the head's own product."""

    def __init__(self, module: nn.Module, head: Head, budget: int = 0) -> None:
        self.module, self.head, self.budget = module, head, budget
        self.kernel = "cross_entropy" if head.in_place else "linear_cross_entropy"

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return lazy logits in training, else call the head's forward `inner`."""
        x = the_input(self.module, args, kwargs)
        return self.make_lazy(x) if self.is_lazy() else inner(x)

    def is_lazy(self) -> bool:
        """Return whether logits of this call are for a loss: in training, with gradients."""
        return self.module.training and torch.is_grad_enabled()

    def make_lazy(self, x: Tensor, group: Group | None = None, classes: int = 0) -> LazyLogits:
        """Return the lazy logits of `x`; `classes` are split over the ranks of a given `group`."""
        if torch.compiler.is_compiling():
            patch_loss_modules()
        weight: Tensor = getattr(self.module, self.head.weight)
        bias: Tensor | None = getattr(self.module, self.head.bias) if self.head.bias else None
        dtype = autocast_dtype(x)  # as F.linear would
        if dtype is not None:
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        width = weight.shape[0]
        part = (
            LocalClasses(0, width, width)
            if group is None
            else LocalClasses.of(group, width, classes)
        )
        return LazyLogits(x, weight, bias, part, self.budget, self.head.in_place, x.new_empty(0))


def lazy_head_of(module: nn.Module) -> LazyHead | None:
    """Return the module's `LazyHead` if it would return lazy logits now, else None."""
    layer = layer_of(module, "kernel")
    return layer if isinstance(layer, LazyHead) and layer.is_lazy() else None
