"""squeeze: the operands of products in 8 bits, in the range that each tensor needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from schedlang.ir.features import Rewrite, Trial, Tried
from schedlang.ir.model import Site
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import refuse

HIGHEST = 15  # the greatest exponent of an 8-bit float with 5 bits of exponent
BITS = 2  # of its mantissa


class squeeze(Rewrite, Tried):  # noqa: N801
    """Round what a linear layer multiplies to 8 bits, forward and backward; sums stay wide.

    before   y = x w', dx = dy w, dw = dy' x
    after    the same of q(x), q(w) and q(dy): q(x) = 2^(-b/a) |fp8(2^b |x|^a)|^(1/a) sign(x)

    Of each tensor a and b are such that the mean of log2|x| becomes 0 and its maximum 15: no scale
    of the loss is needed.  A rank takes those of its own part.  In float64 nothing is rounded, as
    with `cast`: there the program equals the model, and the rounding is run by itself.

    S2FP8 (Cambier et al. 2020).
    """

    example = "layers.*.up  squeeze()"
    gives_up = frozenset({"rounding", "dtype"})

    def check(self, site: Site, plan: Plan) -> None:
        """Refuse what is no linear layer."""
        if not plan.model.computes_as(site.fqn, "Linear"):
            title = f"`{site}` is a `{site.class_name}`, not a linear layer"
            refuse("S401", title, helps=("select the linear layers inside it: `**:Linear`",))

    def rewrite(self, module: Any) -> None:
        """Put the product of rounded operands in the place of the product."""
        module.forward = lambda x: product(x, module.weight, module.bias)

    def trial(
        self, site: Site, plan: Plan, calls: Mapping[str, tuple[Any, Any]]
    ) -> Sequence[Trial]:
        """Compare products of rounded operands with whole ones, by what rounding may change."""
        layer = plan.model.module(site.fqn)
        w = layer.weight.detach().float()
        trials = []
        for name, (args, kwargs) in calls.items():
            x = next(iter((*args, *kwargs.values()))).detach().float()
            error = (product(x, w, None) - x @ w.t()).abs()
            bound = (x.abs() + off(x)) @ (w.abs() + off(w)).t() - x.abs() @ w.abs().t()
            share = float((error / (bound + 1e-6 * bound.max())).max())
            trials.append(Trial(name or "product", share, 1.0, share <= 1.0))
        return trials


def product(x: Any, weight: Any, bias: Any) -> Any:
    """The product of both, rounded, and of what comes back in backward."""
    import torch

    class Product(torch.autograd.Function):
        """Three products of rounded operands."""

        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            x, weight = rounded(x), rounded(weight)
            ctx.save_for_backward(x, weight)
            return x @ weight.t()

        @staticmethod
        def backward(ctx: Any, dy: Any) -> Any:
            (x, weight), dy = ctx.saved_tensors, rounded(dy)
            return dy @ weight, dy.flatten(0, -2).t() @ x.flatten(0, -2)

    y = Product.apply(x, weight)
    return y if bias is None else y + bias


def range_of(x: Any) -> tuple[Any, Any, Any]:
    """Exponents of all elements, and by what they are squeezed (a) and shifted (b)."""
    import torch

    logs, nonzero = x.abs().log2(), x != 0
    mean = torch.where(nonzero, logs, 0).sum() / nonzero.sum().clamp(min=1)
    spread = logs.amax() - mean
    a = torch.where(spread > 0, HIGHEST / spread, 1)  # of equal sizes a shift makes ones
    return logs, a, -a * torch.where(nonzero.any(), mean, 0)


def rounded(x: Any) -> Any:
    """The tensor with 8 bits for each element; as it is in float64, and without elements."""
    import torch

    if x.dtype is torch.float64 or not x.numel():
        return x
    logs, a, b = range_of(x)
    encoded = (a * logs + b).exp2().to(torch.float8_e5m2).to(x.dtype)
    return ((encoded.log2() - b) / a).exp2().copysign(x)


def off(x: Any) -> Any:
    """The most by which each element may change."""
    _, a, b = range_of(x)
    smallest = (
        (-HIGHEST - 1 - BITS - b) / a
    ).exp2()  # what is smaller than a half of the least is 0
    return x.abs() * ((1 + 2.0 ** -(BITS + 1)) ** (1 / a) - 1) + 2 * smallest
