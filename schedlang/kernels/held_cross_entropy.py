"""A linear layer and its cross-entropy: logits made once, and overwritten by their gradient.

Eager holds the logits, their logarithms and their gradient; here there is one tensor of that size.
Backward writes over it (kernels/cross_entropy.py) and goes on with the products.  No logit is made
twice and every product is whole: faster than chunks (kernels/linear_cross_entropy.py) where there
is room for the logits.  The tensor belongs to these two operators alone: nobody else ever has it,
and a second backward is an error of autograd, since its version has changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from schedlang.kernels import linear_cross_entropy
from schedlang.kernels.cross_entropy import gradient_
from schedlang.kernels.cross_entropy import statistics as row_statistics
from schedlang.kernels.device import count, runs_kernel, wide
from schedlang.kernels.linear_cross_entropy import Form, Sums, asked_for, fake_gradients
from schedlang.kernels.linear_cross_entropy import reference as whole_reference


def held_statistics(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, form: Form
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-sum-exp, the target's logit, the sum) of the logits of each row of `x` [tokens, in].

    As `linear_cross_entropy.statistics`, but for how they are made; differentiable once.
    """
    lse, picked, total, _ = held_forward(x, weight, bias, target, form.scale, form.cap)
    return lse, picked, total


@torch.library.custom_op("schedlang::held_cross_entropy_forward", mutates_args=())
def held_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, scale: float, cap: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The three statistics of each row, and the logits, for backward alone."""
    count(runs_kernel(x, weight, longest=None))
    z = F.linear(x, weight, bias)
    found = row_statistics(z, target, scale, cap)
    lse, picked, total = (each.clone() for each in found)  # no views of one tensor
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
    own: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of x, of weight, of bias), empty where not asked for; `z` becomes its gradient."""
    count(runs_kernel(x, weight, longest=None))
    sums = Sums(x, weight, bias, inputs, own)
    by = by_lse, by_picked, by_total
    sums.add(slice(None), gradient_(z, target, lse, by, scale, cap))
    return sums.results(bias)


@held_forward.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, scale: float, cap: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lse = x.new_empty(x.shape[:1], dtype=wide(x, weight))
    z = x.new_empty((x.shape[0], weight.shape[0]))
    return lse, torch.empty_like(lse), torch.empty_like(lse), z


@held_backward.register_fake
def _(
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
    own: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return fake_gradients(x, weight, bias, inputs, own)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, target, *ctx.form = inputs
    ctx.set_materialize_grads(False)  # zeros for the logits would be a second tensor of their size
    ctx.save_for_backward(x, weight, bias, target, output[0], output[3])


def _differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, bias, target, lse, z = ctx.saved_tensors
    assert grads[3] is None, "the logits are used by nobody else"
    by = (torch.zeros_like(lse) if each is None else each for each in grads[:3])
    asked = ctx.needs_input_grad
    found = held_backward(
        z, x, weight, bias, target, lse, *by, *ctx.form, asked[0], asked[1] or asked[2]
    )
    return *asked_for(asked, found, bias), None, None, None


held_forward.register_autograd(_differentiate, setup_context=_save)


@dataclass(frozen=True)
class Case(linear_cross_entropy.Case):
    """One head to run, as another kernel's (kernels/linear_cross_entropy.py)."""

    kernel: ClassVar[str] = "held_cross_entropy"

    def run(self, given: dict[str, Tensor], kernel: bool) -> Tensor:
        """What the kernel gives, or its reference: the mean over all tokens."""
        x, weight, bias = given["input"], given["weight"], given.get("bias")
        target, by = self.labels(x)
        form = Form(self.scale, self.cap)
        if not kernel:
            return whole_reference(x, weight, bias, target, by, self.smoothing, form)
        lse, picked, total = held_statistics(x, weight, bias, target, form)
        each = lse - (1 - self.smoothing) * picked - self.smoothing / self.classes * total
        return (each * by).sum()
