"""LayerNorm's kernel against float64, in every type; its operator; norms of models by it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from schedlang.kernels.check import run_kernel_check
from schedlang.kernels.layer_norm import (
    Case,
    layer_norm,
    layer_norm_backward,
    layer_norm_forward,
    reference,
)
from tests import models
from tests.proofs import planned, proven, refused

FORMS = [(0.0, "late", True), (1.0, "late", False), (0.0, "early", True), (1.0, "early", False)]
CASES = [
    Case(shape, dtype, 1e-5, offset, rounding, scale, bias=bias)
    for dtype in ("float32", "bfloat16", "float16")
    for offset, rounding, bias in FORMS
    for shape, scale in [((5, 257), 1.0), ((1, 300), 1e-3), ((20, 8), 1.0)]
]
CASES += [Case((3, 5, 65), strided=True), Case((65, 9), "bfloat16", strided=True)]


def test_kernel_is_as_right_as_eager():
    """The kernel itself runs, interpreted; output and gradients keep the rule of their type."""
    checked = run_kernel_check(CASES, device="cpu")
    assert len(checked) == len(CASES)
    for each in checked:
        assert each.backend == "interpreter"
        assert each.ok, each


def leaves(dtype: torch.dtype, *shape: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, generator=generator).to(dtype).requires_grad_()
    weight, bias = (torch.rand(2, shape[-1], generator=generator) + 0.5).to(dtype).unbind()
    return x, weight.clone().requires_grad_(), bias.clone().requires_grad_()


@pytest.mark.parametrize(("offset", "rounding", "bias"), FORMS)
def test_operator_equals_autograd_of_the_reference(offset, rounding, bias):
    """In float64: its backward is the derivative of its forward, which is torch's own LayerNorm."""
    x, weight, shift = leaves(torch.float64, 4, 33)
    given = (x, weight, shift if bias else None)
    args = (1e-5, offset, rounding)
    torch.autograd.gradcheck(lambda *t: layer_norm(*t, *args), leaves(torch.float64, 2, 3, 7))
    ours, plain = layer_norm(*given, *args), reference(*given, *args)
    theirs = torch.nn.functional.layer_norm(x, (33,), weight + offset, given[2], 1e-5)
    wanted = [t for t in given if t is not None]
    grad = torch.randn(4, 33, dtype=torch.float64)
    for other in (plain, theirs):
        pairs = zip(
            [ours, *torch.autograd.grad(ours, wanted, grad, retain_graph=True)],
            [other, *torch.autograd.grad(other, wanted, grad)],
            strict=True,
        )
        for a, b in pairs:
            assert (a - b).norm() <= 1e-13 * b.norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_opcheck(dtype):
    """Schema, fake tensors, autograd and ahead-of-time tracing of both operators are sound."""
    x, weight, bias = leaves(dtype, 2, 3, 17)
    for shift in (bias, None):
        torch.library.opcheck(layer_norm_forward, (x, weight, shift, 1e-6, 0.0, "late"))
    row = torch.rand(2, 3, dtype=torch.promote_types(dtype, torch.float32))
    args = (x.detach(), x.detach(), weight.detach(), row, row.clone(), 0.0, "early")
    torch.library.opcheck(layer_norm_backward, args)


def test_compiles_and_checkpoints():
    """One graph without breaks under torch.compile; the same gradients when recomputed."""
    given = leaves(torch.float32, 3, 12)

    def loss(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return layer_norm(x * 2, weight, bias, 1e-6, 0.0, "early").square().sum()

    plain = torch.autograd.grad(loss(*given), given)
    whole = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for again in (whole(*given), checkpoint(loss, *given, use_reentrant=False)):
        for a, b in zip(torch.autograd.grad(again, given), plain, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.deep
def test_norms_of_gpt2_over_ranks(pool):
    """Every norm of an unmodified GPT-2, beside split tensors, recomputation and sliced state."""
    rows = """transformer.**:LayerNorm replace_kernel(layer_norm)
        transformer.h.*.attn.c_attn shard(col, blocks=3, over=tp)
        transformer.h.*.attn.c_proj shard(row, over=tp)
        transformer.h.* checkpoint()
        zero(stage=3, over=dp)"""
    plan = planned(models.gpt2(2), rows, "dp=2, tp=2")
    proven(pool, plan, [models.tokens(rows=6, seed=seed) for seed in (1, 2, 3)])


def test_each_norm_is_told_from_the_other():
    """A row with the wrong kernel names the one that fits; a module that is none says why."""
    model = models.gpt2(1)
    said = refused(model, "transformer.ln_f replace_kernel(rms_norm)")
    assert "S410" in said and "`replace_kernel(layer_norm)` fits" in said
    assert "submodules" in refused(model, "transformer.h.0 replace_kernel(layer_norm)")
