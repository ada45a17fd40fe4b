"""Grouped matrix products: each row times its group's matrix, without padding or dropped rows.

Rows are sorted by group; `ends` are the ends of the groups' rows, as in torch's grouped matrix
product. For bfloat16 torch's product is used, in one launch for groups of any length (Gale et al.,
"MegaBlocks", 2022; Tan et al., "ScatterMoE", 2024); otherwise groups are multiplied one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from schedlang.kernels import check
from schedlang.kernels.backward_halves import needed_gradients
from schedlang.kernels.kernel_device import capability, count_run, on_gpu

_ALIGNED = 16  # alignment in bytes of a matrix's rows that torch's product requires


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor, across: bool = False) -> Tensor:
    """Return the rows of `x` [rows, in] times `weight` [groups, in, out]; differentiable once, in
    both.

    `ends` are int32, one for each group, the last the number of rows. `across`: the weight is
    [groups, out, in], as in linear layers.
    """
    y: Tensor = grouped_forward(x, weight, ends, int(across))
    return y


def reference(x: Tensor, weight: Tensor, ends: Tensor, across: bool = False) -> Tensor:
    """Compute the same by plain products, one for each group that has rows."""
    matrix = weight.mT if across else weight
    parts = [x[rows] @ matrix[group] for group, rows in _spans(ends)]
    return torch.cat(parts) if parts else x.new_empty(0, matrix.shape[2])


def _spans(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield every group that has rows, and its rows."""
    start = 0
    for group, end in enumerate(ends.tolist()):
        if end > start:
            yield group, slice(start, end)
            start = end


def _reference_backward(
    dy: Tensor, x: Tensor, weight: Tensor, ends: Tensor, across: bool, for_x: bool, for_weight: bool
) -> tuple[Tensor, Tensor]:
    dx, dweight = torch.empty_like(x), torch.zeros_like(weight)
    left, right = (dy, x) if across else (x, dy)
    for group, rows in _spans(ends):
        if for_x:
            torch.mm(dy[rows], weight[group] if across else weight[group].T, out=dx[rows])
        if for_weight:
            torch.mm(left[rows].T, right[rows], out=dweight[group])
    return dx, dweight


def _fits(*tensors: Tensor) -> bool:
    """Return whether torch's product supports these: bfloat16, a GPU that has it, aligned sizes."""
    first = tensors[0]
    if on_gpu(first) and capability(first) < (8, 0):
        return False
    return first.numel() > 0 and all(
        t.dtype == torch.bfloat16 and t.shape[-1] * t.element_size() % _ALIGNED == 0
        for t in tensors
    )


@torch.library.custom_op("schedlang::grouped_forward", mutates_args=())
def grouped_forward(x: Tensor, weight: Tensor, ends: Tensor, across: int) -> Tensor:
    """Return the products, [rows, out]."""
    x, weight = x.contiguous(), weight.contiguous()
    if not _fits(x, weight):
        count_run("reference")
        return reference(x, weight, ends, bool(across))
    count_run("torch")
    return torch._grouped_mm(x, weight.mT if across else weight, ends).contiguous()


@torch.library.custom_op("schedlang::grouped_backward", mutates_args=())
def grouped_backward(
    dy: Tensor, x: Tensor, weight: Tensor, ends: Tensor, across: int, for_x: bool, for_weight: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and weight, contiguous; undefined values where not needed."""
    dy, x, weight = dy.contiguous(), x.contiguous(), weight.contiguous()
    if not _fits(dy, x, weight):
        count_run("reference")
        return _reference_backward(dy, x, weight, ends, bool(across), for_x, for_weight)
    count_run("torch")
    left, right = (dy, x) if across else (x, dy)
    dx = torch._grouped_mm(dy, weight if across else weight.mT, ends) if for_x else x
    dweight = torch._grouped_mm(left.mT, right, ends) if for_weight else weight
    return _contiguous_or_empty(dx, x), _contiguous_or_empty(dweight, weight)


def _contiguous_or_empty(grad: Tensor, source: Tensor) -> Tensor:
    """Return a gradient, contiguous; an empty tensor of its shape if it was not needed."""
    return torch.empty_like(source) if grad is source else grad.contiguous()


@grouped_forward.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor, across: int) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1 if across else 2])


@grouped_backward.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.across = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    needed = needed_gradients(ctx, 2)
    grads = grouped_backward(dy, *ctx.saved_tensors, ctx.across, *needed)
    return *(grad if is_needed else None for grad, is_needed in zip(grads, needed)), None, None


grouped_forward.register_autograd(_differentiate, setup_context=_save)


@register_flop_formula(torch.ops.schedlang.grouped_forward)
def _flop(x: Any, weight: Any, *_: Any, **__: Any) -> int:
    """Return two operations for each row and element of its matrix."""
    return int(2 * x[0] * weight[1] * weight[2])


@register_flop_formula(torch.ops.schedlang.grouped_backward)
def _flop_backward(dy: Any, x: Any, weight: Any, *args: Any, **__: Any) -> int:
    return _flop(x, weight) * (int(args[-2]) + int(args[-1]))


@dataclass(frozen=True)
class Case(check.Case):
    """A test case of a grouped product: shape of the rows, dtype, random group sizes, one empty."""

    kernel: ClassVar[str] = "grouped"
    dtype: str = "bfloat16"
    groups: int = 4
    out: int = 16
    across: bool = False

    def draw(self, normal: Callable[..., Tensor]) -> dict[str, Tensor]:
        """Return the differentiated tensors, in float32."""
        width = self.shape[-1]
        sizes = (self.out, width) if self.across else (width, self.out)
        weight = normal(self.groups, *sizes) / width**0.5
        return {"input": normal(*self.shape), "weight": weight}

    def ends(self) -> Tensor:
        """Return the end of each group; the second group has no rows."""
        rows, generator = self.shape[0], torch.Generator().manual_seed(self.seed)
        cuts = torch.randint(0, rows + 1, (self.groups - 1,), generator=generator).sort().values
        cuts[1:2] = cuts[0:1]
        return torch.cat([cuts, torch.tensor([rows])]).int()

    def run(self, tensors: dict[str, Tensor], kernel: bool) -> Tensor:
        """Run the product, or its reference."""
        ends = self.ends().to(tensors["input"].device)
        call = grouped_product if kernel else reference
        return call(tensors["input"], tensors["weight"], ends, self.across)
