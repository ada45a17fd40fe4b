"""A linear layer and the cross-entropy of its results, chunk by chunk: no full logits, ever.

The rows of logits exist for one chunk of tokens at a time, twice: in forward for their statistics
(kernels/cross_entropy.py), in backward again, to be overwritten by their own gradient.  After
Wijmans et al., "Cut your losses in large-vocabulary language models" (2025), without their
filtering: nothing is left out.  Where the loss is a sum over tokens whose weights are known,
`weighed` makes the gradients in forward (Hsu et al., "Liger kernel", 2024) and each logit once.

The gradient of the weight adds up in float32 at least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from schedlang.kernels.cross_entropy import gradient_
from schedlang.kernels.cross_entropy import statistics as row_statistics
from schedlang.kernels.device import count, runs_kernel, wide
from schedlang.kernels.once import multiplied

LARGEST = 256 * 2**20  # bytes of a chunk of logits, where nothing else is said
PARTS = 16  # and of how many chunks the logits are then


@dataclass(frozen=True)
class Form:
    """What a model does with the product before the loss, and how large a chunk may be in bytes.

    The logits are cap * tanh(scale * z), or scale * z where `cap` is 0.  `held`: they are made at
    once, and kept for backward (kernels/held_cross_entropy.py).
    """

    scale: float = 1.0
    cap: float = 0.0
    budget: int = 0
    held: bool = False

    def rows(self, tokens: int, classes: int, dtype: torch.dtype) -> int:
        """Tokens of a chunk: a sixteenth of all, at most 256 MiB, if no budget is given."""
        size = max(classes, 1) * dtype.itemsize
        budget = self.budget or min(LARGEST, size * -(-tokens // PARTS))
        return max(1, min(tokens, budget // size))


def statistics(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, form: Form
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-sum-exp, the target's logit, the sum) of the logits of each row of `x` [tokens, in].

    In float32 at least; no target where `target` is negative.  Differentiable once, in `x`,
    `weight` and `bias`.
    """
    rows = form.rows(x.shape[0], weight.shape[0], x.dtype)
    found: tuple[Tensor, Tensor, Tensor] = linear_statistics_forward(
        x, weight, bias, target, form.scale, form.cap, rows
    )
    return found


def weighed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    by: Tensor,
    smoothing: float,
    form: Form,
) -> Tensor:
    """The sum over tokens of `by` times their cross-entropy, with labels smoothed; a scalar.

    `by` [tokens] is a constant.  Differentiable once, in `x`, `weight` and `bias`, by a gradient
    that is known up to one factor: it is made in forward.
    """
    rows = form.rows(x.shape[0], weight.shape[0], x.dtype)
    asked = [t is not None and t.requires_grad for t in (x, weight, bias)]
    loss: Tensor = linear_weighed(
        x,
        weight,
        bias,
        target,
        by,
        smoothing,
        form.scale,
        form.cap,
        rows,
        asked[0],
        asked[1] or asked[2],
    )[0]
    return loss


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    by: Tensor,
    smoothing: float,
    form: Form,
) -> Tensor:
    """`weighed` in plain torch operations, all logits at once."""
    z = F.linear(x, weight, bias).to(wide(x, weight)) * form.scale
    z = torch.tanh(z) * form.cap if form.cap else z
    picked = z.gather(1, target.clamp_min(0)[:, None])[:, 0]
    loss = z.logsumexp(1) - (1 - smoothing) * picked - smoothing * z.mean(1)
    return (loss * by).sum()


def _chunks(tokens: int, rows: int) -> Iterator[slice]:
    return (slice(start, min(start + rows, tokens)) for start in range(0, tokens, rows))


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Of one chunk; in the precision in which the row kernels are to write gradients over them."""
    return F.linear(x, weight, bias)


class Sums:
    """The gradients of one operator, added up chunk by chunk."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None, inputs: bool, own: bool):
        kind = wide(weight)
        self.x, self.weight = x, weight
        self.dx = torch.empty(x.shape if inputs else (0,), dtype=x.dtype, device=x.device)
        self.dweight = weight.new_zeros(weight.shape if own else (0,), dtype=kind)
        self.dbias = weight.new_zeros(
            weight.shape[:1] if own and bias is not None else (0,), dtype=kind
        )
        self.inputs, self.own = inputs, own

    def add(self, part: slice, grad: Tensor) -> None:
        """The part of one chunk, from the gradient of its logits."""
        if self.inputs:
            torch.mm(grad, self.weight, out=self.dx[part])
        if self.own and grad.dtype == self.dweight.dtype:
            self.dweight.addmm_(grad.mT, self.x[part])
        elif self.own:
            self.dweight += grad.mT @ self.x[part]
        if self.dbias.numel():
            self.dbias += grad.sum(0, dtype=self.dbias.dtype)

    def results(self, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """In the types of what they are gradients of."""
        kind = self.weight.dtype if bias is None else bias.dtype
        return self.dx, self.dweight.to(self.weight.dtype), self.dbias.to(kind)


@torch.library.custom_op("schedlang::linear_statistics_forward", mutates_args=())
def linear_statistics_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    scale: float,
    cap: float,
    rows: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The three statistics of each row, `rows` of them at a time."""
    kind = wide(x, weight)
    lse, picked, total = (torch.empty(len(x), dtype=kind, device=x.device) for _ in range(3))
    count(runs_kernel(x, weight, longest=None))
    for part in _chunks(len(x), rows):
        z = _logits(x[part], weight, bias)
        lse[part], picked[part], total[part] = row_statistics(z, target[part], scale, cap)
        del z  # before the next chunk is made
    return lse, picked, total


@torch.library.custom_op("schedlang::linear_statistics_backward", mutates_args=())
def linear_statistics_backward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    lse: Tensor,
    by_lse: Tensor,
    by_picked: Tensor,
    by_total: Tensor,
    scale: float,
    cap: float,
    rows: int,
    inputs: bool,
    own: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of x, of weight, of bias); empty where they are not asked for."""
    sums = Sums(x, weight, bias, inputs, own)
    count(runs_kernel(x, weight, longest=None))
    for part in _chunks(len(x), rows):
        z = _logits(x[part], weight, bias)
        by = by_lse[part], by_picked[part], by_total[part]
        sums.add(part, gradient_(z, target[part], lse[part], by, scale, cap))
        del z  # before the next chunk is made
    return sums.results(bias)


@torch.library.custom_op("schedlang::linear_weighed", mutates_args=())
def linear_weighed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    by: Tensor,
    smoothing: float,
    scale: float,
    cap: float,
    rows: int,
    inputs: bool,
    own: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, gradients of x, of weight and of bias), each chunk of logits made once."""
    classes = weight.shape[0]
    sums = Sums(x, weight, bias, inputs, own)
    kind = wide(x, weight)
    loss = torch.zeros((), dtype=kind, device=x.device)
    count(runs_kernel(x, weight, longest=None))
    for part in _chunks(len(x), rows):
        z = _logits(x[part], weight, bias)
        lse, picked, total = row_statistics(z, target[part], scale, cap)
        factor = by[part].to(kind)
        each = lse - (1 - smoothing) * picked - smoothing / classes * total
        loss += torch.where(factor != 0, each * factor, 0.0).sum()  # no NaN of an ignored token
        if inputs or own:
            grads = factor, (smoothing - 1) * factor, -smoothing / classes * factor
            sums.add(part, gradient_(z, target[part], lse, grads, scale, cap))
        del z  # before the next chunk is made
    return loss, *sums.results(bias)


@linear_statistics_forward.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    scale: float,
    cap: float,
    rows: int,
) -> tuple[Tensor, Tensor, Tensor]:
    found = x.new_empty(x.shape[:1], dtype=wide(x, weight))
    return found, torch.empty_like(found), torch.empty_like(found)


def fake_gradients(
    x: Tensor, weight: Tensor, bias: Tensor | None, inputs: bool, own: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """What `Sums.results` are like."""
    dbias = weight.new_empty(0) if bias is None else bias.new_empty(bias.shape if own else (0,))
    return (
        x.new_empty(x.shape if inputs else (0,)),
        weight.new_empty(weight.shape if own else (0,)),
        dbias,
    )


@linear_statistics_backward.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    lse: Tensor,
    by_lse: Tensor,
    by_picked: Tensor,
    by_total: Tensor,
    scale: float,
    cap: float,
    rows: int,
    inputs: bool,
    own: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return fake_gradients(x, weight, bias, inputs, own)


@linear_weighed.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    by: Tensor,
    smoothing: float,
    scale: float,
    cap: float,
    rows: int,
    inputs: bool,
    own: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss = x.new_empty((), dtype=wide(x, weight))
    return loss, *fake_gradients(x, weight, bias, inputs, own)


def _save_statistics(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, target, *ctx.form = inputs
    ctx.save_for_backward(x, weight, bias, target, output[0])


def _through_statistics(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias, target, lse = ctx.saved_tensors
    asked = ctx.needs_input_grad
    found = linear_statistics_backward(
        x, weight, bias, target, lse, *grads, *ctx.form, asked[0], asked[1] or asked[2]
    )
    return *asked_for(asked, found, bias), None, None, None, None


def _save_weighed(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.bias = inputs[2] is not None
    ctx.set_materialize_grads(False)  # zeros for the gradients would be as large as they are
    ctx.save_for_backward(*output[1:])


def _through_weighed(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    found = multiplied(ctx.saved_tensors, grad)
    return *asked_for(ctx.needs_input_grad, found, ctx.bias or None), *(None,) * 8


def asked_for(
    asked: Any, found: Any, bias: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of those inputs that need one."""
    return (
        found[0] if asked[0] else None,
        found[1] if asked[1] else None,
        found[2] if asked[2] and bias is not None else None,
    )


linear_statistics_forward.register_autograd(_through_statistics, setup_context=_save_statistics)
linear_weighed.register_autograd(_through_weighed, setup_context=_save_weighed)


@dataclass(frozen=True)
class Case:
    """One head to run: `shape` is [tokens, in]; every seventh label is ignored."""

    kernel: ClassVar[str] = "linear_cross_entropy"
    shape: tuple[int, ...]
    dtype: str = "float32"
    classes: int = 300
    bias: bool = False
    smoothing: float = 0.0
    scale: float = 1.0
    cap: float = 0.0
    rows: int = 3
    spread: float = 1.0  # of the logits
    seed: int = 0
    strided: bool = False

    def draw(self, normal: Callable[..., Tensor]) -> dict[str, Tensor]:
        """The tensors that it is differentiated by, in float32."""
        weight = normal(self.classes, self.shape[1]) * self.spread * self.shape[1] ** -0.5
        found = {"input": normal(*self.shape), "weight": weight}
        return found | ({"bias": normal(self.classes)} if self.bias else {})

    def labels(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The label of each token, and what its loss weighs."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        target = torch.randint(self.classes, (len(x),), generator=generator).to(x.device)
        target[::7] = -1
        return target, (target >= 0) / len(x)

    def run(self, given: dict[str, Tensor], kernel: bool) -> Tensor:
        """What the kernel gives, or its reference."""
        x, weight, bias = given["input"], given["weight"], given.get("bias")
        target, by = self.labels(x)
        form = Form(self.scale, self.cap, self.rows * self.classes * x.dtype.itemsize)
        call = weighed if kernel else reference
        return call(x, weight, bias, target, by, self.smoothing, form)
