"""RMSNorm's kernel against float64, in every type, and its operator under every torch machinery."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from schedlang.kernels.check import compare, run_kernel_check
from schedlang.kernels.device import runs
from schedlang.kernels.rms_norm import (
    Case,
    reference,
    rms_norm,
    rms_norm_backward,
    rms_norm_forward,
)

FORMS = [(0.0, "early"), (1.0, "late"), (0.0, "late"), (1.0, "early")]
CASES = [
    Case(shape, dtype, eps, offset, rounding, scale)
    for dtype in ("float32", "bfloat16", "float16")
    for offset, rounding in FORMS
    for shape, eps, scale in [
        ((5, 257), 1e-6, 1.0),  # odd, and long enough for low-precision sums to show
        ((1, 300), 1e-5, 1e-3),  # one row, small enough for eps to matter
        ((2, 3, 256), 1e-6, 50.0),
        ((40, 8), 1e-6, 1.0),  # many short rows: several tiles per program
    ]
]
CASES += [Case((3, 5, 65), strided=True), Case((65, 9), "bfloat16", strided=True)]


@pytest.fixture(scope="module")
def checked():
    """Every case in Triton's interpreter, in one child process."""
    return run_kernel_check(CASES, device="cpu")


def test_kernel_is_as_right_as_eager(checked):
    """The kernel itself ran, and output and gradients are within the rule of their type."""
    assert len(checked) == len(CASES)
    for each in checked:
        assert each.backend == "interpreter"
        assert each.ok, each


def test_rule_rejects_wrong_norms():
    """A wrong eps, offset or divisor lies outside the rule, in float32; eager lies inside."""
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) * 1e-2
    weight = torch.linspace(0.5, 1.5, 64)
    exact = reference(x.double(), weight.double(), 1e-6)
    eager = reference(x, weight, 1e-6)
    assert compare("eager", eager, eager, exact).ok
    wrong = {
        "eps": reference(x, weight, 1e-5),
        "offset": reference(x, weight, 1e-6, 1.0),
        "divisor": reference(x, weight, 1e-6) * (63 / 64) ** 0.5,
        "stale row": torch.cat([eager[:4], eager[:1]]),
        "unwritten": eager.masked_fill(torch.arange(64) == 63, float("nan")),
    }
    for name, out in wrong.items():
        assert not compare(name, out, eager, exact).ok, name


def test_rule_wants_the_same_infinities():
    """Where the truth is NaN or infinite, so must the output be, and nowhere else."""
    exact = torch.tensor([1.0, float("inf"), float("nan")], dtype=torch.float64)
    same = exact.float()
    assert compare("same", same, same, exact).ok
    assert not compare("negated", -same, same, exact).ok
    assert not compare("finite", torch.ones(3), same, exact).ok


def leaves(dtype: torch.dtype, *shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, generator=generator).to(dtype).requires_grad_()
    weight = (torch.rand(shape[-1], generator=generator) + 0.5).to(dtype).requires_grad_()
    return x, weight


@pytest.mark.parametrize(("offset", "rounding"), FORMS)
def test_operator_gradient_is_the_derivative(offset, rounding):
    """In float64 the operator's own backward is the derivative of its forward."""
    x, weight = leaves(torch.float64, 2, 3, 7)
    torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-5, offset, rounding), (x, weight))


@pytest.mark.parametrize(("offset", "rounding"), FORMS)
def test_operator_equals_autograd_of_the_reference(offset, rounding):
    """Forward and gradients in float64 equal plain autograd through the reference."""
    x, weight = leaves(torch.float64, 4, 33)
    grad = torch.randn(4, 33, dtype=torch.float64)
    ours = rms_norm(x, weight, 1e-6, offset, rounding)
    plain = reference(x, weight, 1e-6, offset, rounding)
    pairs = zip(
        [ours, *torch.autograd.grad(ours, (x, weight), grad)],
        [plain, *torch.autograd.grad(plain, (x, weight), grad)],
        strict=True,
    )
    for a, b in pairs:
        assert (a - b).norm() <= 1e-14 * b.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_opcheck(dtype):
    """Schema, fake tensors, autograd and ahead-of-time tracing of both operators are sound."""
    x, weight = leaves(dtype, 2, 3, 17)
    torch.library.opcheck(rms_norm_forward, (x, weight, 1e-6, 0.0, "late"))
    rstd = torch.rand(2, 3, dtype=torch.promote_types(dtype, torch.float32))
    args = (x.detach(), x.detach(), weight.detach(), rstd, 0.0, "early")
    torch.library.opcheck(rms_norm_backward, args)


def test_meta_says_what_real_gives():
    """Shapes, types and strides on the meta device are those of the real result."""
    for inner, outer in [(torch.bfloat16, torch.float32), (torch.float32, torch.float32)]:
        for rounding in ("early", "late"):
            x, weight = torch.randn(3, 16, 5).to(inner).transpose(1, 2), torch.rand(16).to(outer)
            real = rms_norm_forward(x, weight, 1e-6, 0.0, rounding)
            meta = rms_norm_forward(x.to("meta"), weight.to("meta"), 1e-6, 0.0, rounding)
            for a, b in zip(real, meta, strict=True):
                assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def test_strided_inputs_and_gradients():
    """Transposed inputs and expanded gradients give what contiguous ones give."""
    x, weight = torch.randn(4, 6, 5, dtype=torch.float64), torch.rand(6, dtype=torch.float64)
    turned = x.transpose(1, 2).requires_grad_()
    plain = x.transpose(1, 2).contiguous().requires_grad_()
    for each in (turned, plain):
        rms_norm(each, weight, 1e-6).sum().backward()
    torch.testing.assert_close(turned.grad, plain.grad, rtol=1e-14, atol=1e-14)


def test_empty_batch():
    """No rows give no rows, and a zero gradient of the weight."""
    x, weight = leaves(torch.float32, 0, 8)
    rms_norm(x, weight, 1e-6).sum().backward()
    assert torch.equal(weight.grad, torch.zeros(8))


def test_compiles_and_checkpoints():
    """One graph without breaks under torch.compile; the same gradients when recomputed."""
    x, weight = leaves(torch.float32, 3, 12)

    def loss(x, weight):
        return rms_norm(x * 2, weight, 1e-6, 0.0, "early").square().sum()

    plain = torch.autograd.grad(loss(x, weight), (x, weight))
    whole = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for again in (whole(x, weight), checkpoint(loss, x, weight, use_reentrant=False)):
        for a, b in zip(torch.autograd.grad(again, (x, weight)), plain, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_default_eps_is_torch_s():
    """Without eps the result is torch.nn.functional.rms_norm's, also in low precision."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = (torch.randn(3, 8) * 1e-4).to(dtype)
        theirs = torch.nn.functional.rms_norm(x, (8,))
        ours = rms_norm(x, torch.ones(8, dtype=dtype), None)
        torch.testing.assert_close(ours, theirs, rtol=4 * torch.finfo(dtype).eps, atol=0)


def test_ledger_names_the_backend():
    """Without a GPU or the interpreter the ledger says that the reference ran, not the kernel."""
    before = runs().get("reference", 0)
    x, weight = leaves(torch.float64, 2, 4)
    rms_norm(x, weight, 1e-6).sum().backward()
    assert runs()["reference"] == before + 2
