"""A linear layer and the cross-entropy of its logits, without eager mode's three tensors of logits.

In chunks: the logits of one chunk of tokens exist at a time, and are computed twice: in forward for
their statistics (kernels/cross_entropy.py), and in backward, where their gradient overwrites them.
After Wijmans et al., "Cut your losses in large-vocabulary language models" (2025), without their
filtering: no gradient is dropped. If the loss is a sum over tokens with known weights,
`weighted_loss` computes the gradients in forward (Hsu et al., "Liger kernel", 2024) and each logit
once.

Held: the logits are computed once and saved for backward, where their gradient overwrites them.
Every product is over all tokens: faster than chunks if there is memory. Only the two operators use
this tensor. A backward that keeps the graph writes into a copy.

The gradient of the weight is accumulated in float32 at least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from schedlang.kernels import check
from schedlang.kernels.backward_halves import needed_gradients
from schedlang.kernels.cross_entropy import gradient_
from schedlang.kernels.cross_entropy import statistics as row_statistics
from schedlang.kernels.kernel_device import can_run_kernel, compute_dtype, count_kernel_run

CHUNK_BYTES = 256 * 2**20  # bytes of a chunk of logits, by default
CHUNK_COUNT = 16  # number of chunks, by default


@dataclass(frozen=True)
class Form:
    """Scale and cap of logits before the loss, and the bytes of logits per chunk.

    The logits are cap * tanh(scale * z), or scale * z if `cap` is 0. `held`: all of them are
    computed at once, and saved for backward.
    """

    scale: float = 1.0
    cap: float = 0.0
    budget: int = 0
    held: bool = False

    def chunks(self, x: Tensor, weight: Tensor) -> tuple[float, float, int]:
        """Return (scale, cap, tokens of a chunk) for operators.

        Without a budget, a chunk is a sixteenth of all tokens, at most 256 MiB of logits.
        """
        tokens, size = x.shape[0], max(weight.shape[0], 1) * x.dtype.itemsize
        budget = self.budget or min(CHUNK_BYTES, size * -(-tokens // CHUNK_COUNT))
        return self.scale, self.cap, max(1, min(tokens, budget // size))


def statistics(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, form: Form
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (log-sum-exp, the target's logit, the sum) of each row of logits of `x` [tokens, in].

    In float32 at least; a negative `target` means no target. Differentiable once, in `x`, `weight`
    and `bias`.
    """
    if form.held:
        results = held_forward(x, weight, bias, target, form.scale, form.cap)[:3]
    else:
        results = linear_statistics_forward(x, weight, bias, target, *form.chunks(x, weight))
    lse, picked, total = results
    return lse, picked, total


def weighted_loss(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    by: Tensor,
    smoothing: float,
    form: Form,
) -> Tensor:
    """Return the sum over tokens of `by` times their cross-entropy with smoothed labels, in chunks.

    `by` [tokens] is a constant. Differentiable once, in `x`, `weight` and `bias`; the gradients, up
    to one factor, are computed in forward.
    """
    needed = [t is not None and t.requires_grad for t in (x, weight, bias)]
    options = (*form.chunks(x, weight), needed[0], needed[1] or needed[2])
    loss: Tensor = linear_weighed(x, weight, bias, target, by, smoothing, *options)[0]
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
    """Compute `weighted_loss` by plain torch operations, all logits at once."""
    z = F.linear(x, weight, bias).to(compute_dtype(x, weight)) * form.scale
    z = torch.tanh(z) * form.cap if form.cap else z
    picked = z.gather(1, target.clamp_min(0)[:, None])[:, 0]
    loss = z.logsumexp(1) - (1 - smoothing) * picked - smoothing * z.mean(1)
    return (loss * by).sum()


def _chunks(tokens: int, rows: int) -> Iterator[slice]:
    return (slice(start, min(start + rows, tokens)) for start in range(0, tokens, rows))


class GradientSums:
    """The gradients of one operator, accumulated chunk by chunk."""

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, inputs: bool, parameters: bool
    ):
        kind = compute_dtype(weight)
        self.x, self.weight = x, weight
        self.dx = torch.empty(x.shape if inputs else (0,), dtype=x.dtype, device=x.device)
        self.dweight = weight.new_zeros(weight.shape if parameters else (0,), dtype=kind)
        self.dbias = weight.new_zeros(
            weight.shape[:1] if parameters and bias is not None else (0,), dtype=kind
        )
        self.inputs, self.own = inputs, parameters

    def add(self, part: slice, grad: Tensor) -> None:
        """Add the gradients of one chunk, from the gradient of its logits."""
        if self.inputs:
            torch.mm(grad, self.weight, out=self.dx[part])
        if self.own and grad.dtype == self.dweight.dtype:
            self.dweight.addmm_(grad.mT, self.x[part])
        elif self.own:
            self.dweight += grad.mT @ self.x[part]
        if self.dbias.numel():
            self.dbias += grad.sum(0, dtype=self.dbias.dtype)

    def results(self, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients in the dtypes of their tensors."""
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
    """Return the three statistics of each row, computed for `rows` rows at a time."""
    kind = compute_dtype(x, weight)
    lse, picked, total = (torch.empty(len(x), dtype=kind, device=x.device) for _ in range(3))
    count_kernel_run(can_run_kernel(x, weight, longest=None))
    for part in _chunks(len(x), rows):
        z = F.linear(x[part], weight, bias)
        lse[part], picked[part], total[part] = row_statistics(z, target[part], scale, cap)
        del z  # before the next chunk is computed
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
    parameters: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias; empty if not needed."""
    sums = GradientSums(x, weight, bias, inputs, parameters)
    count_kernel_run(can_run_kernel(x, weight, longest=None))
    for part in _chunks(len(x), rows):
        z = F.linear(x[part], weight, bias)
        by = by_lse[part], by_picked[part], by_total[part]
        sums.add(part, gradient_(z, target[part], lse[part], by, scale, cap))
        del z  # before the next chunk is computed
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
    parameters: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (loss, gradients of x, weight and bias); each chunk of logits is computed once."""
    classes = weight.shape[0]
    sums = GradientSums(x, weight, bias, inputs, parameters)
    kind = compute_dtype(x, weight)
    loss = torch.zeros((), dtype=kind, device=x.device)
    count_kernel_run(can_run_kernel(x, weight, longest=None))
    for part in _chunks(len(x), rows):
        z = F.linear(x[part], weight, bias)
        lse, picked, total = row_statistics(z, target[part], scale, cap)
        factor = by[part].to(kind)
        losses = lse - (1 - smoothing) * picked - smoothing / classes * total
        loss += torch.where(factor != 0, losses * factor, 0.0).sum()  # no NaN from an ignored token
        if inputs or parameters:
            grads = factor, (smoothing - 1) * factor, -smoothing / classes * factor
            sums.add(part, gradient_(z, target[part], lse, grads, scale, cap))
        del z  # before the next chunk is computed
    return loss, *sums.results(bias)


@linear_statistics_forward.register_fake
def _(x: Tensor, weight: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    log_sums = x.new_empty(x.shape[:1], dtype=compute_dtype(x, weight))
    return log_sums, torch.empty_like(log_sums), torch.empty_like(log_sums)


def _fake_gradients(
    x: Tensor, weight: Tensor, bias: Tensor | None, inputs: bool, parameters: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty tensors with the shapes and dtypes of `Sums.results`."""
    dbias = (
        weight.new_empty(0) if bias is None else bias.new_empty(bias.shape if parameters else (0,))
    )
    return (
        x.new_empty(x.shape if inputs else (0,)),
        weight.new_empty(weight.shape if parameters else (0,)),
        dbias,
    )


@linear_statistics_backward.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    return _fake_gradients(x, weight, bias, *args[-2:])


@linear_weighed.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    loss = x.new_empty((), dtype=compute_dtype(x, weight))
    return loss, *_fake_gradients(x, weight, bias, *args[-2:])


@torch.library.custom_op("schedlang::held_cross_entropy_forward", mutates_args=())
def held_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, scale: float, cap: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the three statistics of each row, and the logits, which only backward uses."""
    count_kernel_run(can_run_kernel(x, weight, longest=None))
    z = F.linear(x, weight, bias)
    results = row_statistics(z, target, scale, cap)
    lse, picked, total = (tensor.clone() for tensor in results)  # no views of one tensor
    return lse, picked, total, z


@torch.library.custom_op("schedlang::held_cross_entropy_backward", mutates_args=("z",))
def held_backward(
    z: Tensor,
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
    inputs: bool,
    parameters: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias, empty if not needed; `z` becomes its gradient."""
    count_kernel_run(can_run_kernel(x, weight, longest=None))
    sums = GradientSums(x, weight, bias, inputs, parameters)
    by = by_lse, by_picked, by_total
    sums.add(slice(None), gradient_(z, target, lse, by, scale, cap))
    return sums.results(bias)


@held_forward.register_fake
def _(x: Tensor, weight: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lse = x.new_empty(x.shape[:1], dtype=compute_dtype(x, weight))
    z = x.new_empty((x.shape[0], weight.shape[0]))
    return lse, torch.empty_like(lse), torch.empty_like(lse), z


@held_backward.register_fake
def _(z: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    return _fake_gradients(x, weight, bias, *args[-2:])


def _save_statistics(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, target, *ctx.form = inputs
    ctx.save_for_backward(x, weight, bias, target, output[0])


def _backward_statistics(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias, target, lse = ctx.saved_tensors
    needed = needed_gradients(ctx, 3)
    results = linear_statistics_backward(
        x, weight, bias, target, lse, *grads, *ctx.form, needed[0], needed[1] or needed[2]
    )
    return *_needed_gradients(needed, results, bias), None, None, None, None


def _save_weighed(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.bias = inputs[2] is not None
    # zeros for missing gradients would be as large as the gradients
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])


def _backward_weighed(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    grads = [_scale_saved(saved, grad) for saved in ctx.saved_tensors]
    return *_needed_gradients(ctx.needs_input_grad, grads, ctx.bias or None), *(None,) * 8


def _scale_saved(saved: Tensor, factor: Tensor) -> Tensor:
    """Multiply a gradient that forward has computed by a scalar, in place if possible.

    A backward that does not keep the graph is the last one, and does not need the saved tensors
    again. In a backward that keeps the graph (`retain_graph`, `create_graph`), when compiled, and
    for DTensors, whose layout the factor may change, the result is a new tensor.
    """
    if _frees_graph() and type(saved) is Tensor and type(factor) is Tensor:
        return saved.detach().mul_(factor)  # unpacked tensors belong to the graph
    # the factor in its own dtype: in the gradient's dtype it would be rounded once more
    return (saved * factor).to(saved.dtype)


def _frees_graph() -> bool:
    """Return whether the running backward frees its saved tensors; False outside of a backward."""
    return not torch.compiler.is_compiling() and not _keeps_graph()


def _keeps_graph() -> bool:
    """Return whether the running backward keeps its graph; False when compiled."""
    if torch.compiler.is_compiling():
        return False
    keeps: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return keeps


def _save_held(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, target, *ctx.form = inputs
    # zeros for the logits' gradient would be a second tensor of their size
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, bias, target, output[0], output[3])


def _backward_held(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, bias, target, lse, z = ctx.saved_tensors
    assert grads[3] is None, "the logits are used by nobody else"
    by = (torch.zeros_like(lse) if grad is None else grad for grad in grads[:3])
    needed = needed_gradients(ctx, 3)
    # a further backward, for the weights or for a second loss, needs the logits again
    results = held_backward(
        z.clone() if _keeps_graph() else z,
        x,
        weight,
        bias,
        target,
        lse,
        *by,
        *ctx.form,
        needed[0],
        needed[1] or needed[2],
    )
    return *_needed_gradients(needed, results, bias), None, None, None


def _needed_gradients(
    inputs_needed: Sequence[bool], grads: Sequence[Tensor], bias: Any
) -> list[Tensor | None]:
    """Return the gradients of those of (x, weight, bias) that need one; None for others."""
    needed = inputs_needed[0], inputs_needed[1], inputs_needed[2] and bias is not None
    return [grad if is_needed else None for grad, is_needed in zip(grads, needed)]


linear_statistics_forward.register_autograd(_backward_statistics, setup_context=_save_statistics)
linear_weighed.register_autograd(_backward_weighed, setup_context=_save_weighed)
held_forward.register_autograd(_backward_held, setup_context=_save_held)


@dataclass(frozen=True)
class Case(check.Case):
    """A test case of a head: `shape` is [tokens, in]; every seventh label is ignored.

    In chunks of `rows` tokens, or with saved logits (`held`).
    """

    kernel: ClassVar[str] = "linear_cross_entropy"
    classes: int = 300
    bias: bool = False
    smoothing: float = 0.0
    scale: float = 1.0
    cap: float = 0.0
    rows: int = 3
    spread: float = 1.0  # of the logits
    held: bool = False

    @property
    def name(self) -> str:
        """The name of the kernel in the report of a GPU."""
        return "held_cross_entropy" if self.held else self.kernel

    def draw(self, normal: Callable[..., Tensor]) -> dict[str, Tensor]:
        """Return the differentiated tensors, in float32."""
        weight = normal(self.classes, self.shape[1]) * self.spread * self.shape[1] ** -0.5
        tensors = {"input": normal(*self.shape), "weight": weight}
        return tensors | ({"bias": normal(self.classes)} if self.bias else {})

    def labels(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the label of each token, and its weight in the loss."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        target = torch.randint(self.classes, (len(x),), generator=generator).to(x.device)
        target[::7] = -1
        return target, (target >= 0) / len(x)

    def run(self, tensors: dict[str, Tensor], kernel: bool) -> Tensor:
        """Run the kernel, or its reference."""
        x, weight, bias = tensors["input"], tensors["weight"], tensors.get("bias")
        target, by = self.labels(x)
        form = Form(self.scale, self.cap, self.rows * self.classes * x.dtype.itemsize, self.held)
        if self.held and kernel:
            lse, picked, total = statistics(x, weight, bias, target, form)
            losses = lse - (1 - self.smoothing) * picked - self.smoothing / self.classes * total
            return (losses * by).sum()
        call = weighted_loss if kernel else reference
        return call(x, weight, bias, target, by, self.smoothing, form)
