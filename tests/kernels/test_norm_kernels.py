"""Norms and sums with a norm: the kernel against float64, its operators under torch's machinery."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from schedlang.kernels.check import compare_tensor, run_kernel_check
from schedlang.kernels.kernel_device import backend_runs
from schedlang.kernels.norm import (
    Case,
    Form,
    add_norm,
    add_reference,
    norm,
    norm_backward,
    norm_forward,
    reference,
)
from tests import models
from tests.proofs import planned, proven, refused

RMS = [
    Form(False, 1e-5, 0.0, "early"),
    Form(False, 1e-5, 1.0, "late"),
    Form(False, 1e-5, 0.0, "late"),
    Form(False, 1e-5, 1.0, "early"),
]
LAYER = [
    (Form(True, 1e-5, 0.0, "late"), True),
    (Form(True, 1e-5, 1.0, "late"), False),
    (Form(True, 1e-5, 0.0, "early"), True),
    (Form(True, 1e-5, 1.0, "early"), False),
]
FORMS = [*((form, False) for form in RMS), *LAYER]
ADDED = [(RMS[0], False), (RMS[1], False), LAYER[0], LAYER[3]]
TYPES = ("float32", "bfloat16", "float16")
CASES = [
    Case(shape, dtype, form, scale=scale)
    for dtype in TYPES
    for form in RMS
    for shape, scale in [
        ((5, 257), 1.0),  # odd, and long enough for low-precision sums to show
        ((1, 300), 1e-3),  # one row, small enough for eps to matter
        ((2, 3, 256), 50.0),
        ((40, 8), 1.0),  # many short rows: several tiles per program
    ]
]
CASES += [
    Case(shape, dtype, form, bias, scale=scale)
    for dtype in TYPES
    for form, bias in LAYER
    for shape, scale in [((5, 257), 1.0), ((1, 300), 1e-3), ((20, 8), 1.0)]
]
CASES += [Case((2, 3, 257), dtype, form, bias, add=True) for form, bias in ADDED for dtype in TYPES]
CASES += [Case((3, 70), form=form, add=True, other="bfloat16") for form in (RMS[0], LAYER[0][0])]
CASES += [Case((3, 300), form=LAYER[0][0], bias=True, add=True, scale=1e-3)]
CASES += [
    Case(shape, dtype, form, form.centred, strided=True)
    for form in (RMS[2], LAYER[0][0])
    for shape, dtype in [((3, 5, 65), "float32"), ((65, 9), "bfloat16")]
]
CASES += [Case((1, 9), add=True, strided=True)]


GATES = [
    Form(rounding="early", act="silu", first=True, groups=3),  # Mamba-2, Zamba2, Bamba
    Form(rounding="early", act="silu"),  # Qwen3-Next
    Form(act="sigmoid"),  # Kimi
    Form(False, 1e-5, 1.0, "early", "gelu_tanh", False, 2),
    Form(False, 1e-5, 1.0, "late", "relu", True, 1),
]
GATED = [
    Case(shape, dtype, form, scale=scale)
    for dtype in ("float32", "bfloat16", "float16")
    for form in GATES
    for shape, scale in [
        ((5, 258), 1.0),  # no power of two, and long enough for low-precision sums to show
        ((1, 300), 1e-3),  # one row, small enough for eps to matter
        ((2, 3, 768), 50.0),
    ]
]
GATED += [Case((40, 12), "bfloat16", form) for form in GATES]  # many short rows: several tiles
MIXED = [("float32", "bfloat16"), ("bfloat16", "float32")]
GATED += [Case((7, 96), kind, form, other=other) for form in GATES for kind, other in MIXED]
GATED += [Case((3, 5, 66), "float32", form, strided=True) for form in GATES]
FEW = [
    *CASES,
    *(Case((2, 258), dtype, form) for dtype in ("float32", "bfloat16") for form in GATES[:2]),
    *(Case((1, 36), "float32", form, scale=1e-3) for form in GATES[3:]),
    *(
        Case((9, 12), kind, form, other=other)
        for form, (kind, other) in zip(GATES, (*MIXED, ("float16", "")))
    ),
    Case((3, 5, 6), "float32", GATES[3], strided=True),
]


def right(cases: list[Case]) -> None:
    """The kernel itself ran in Triton's interpreter, and is as right as eager."""
    checked = run_kernel_check(cases, device="cpu")
    assert len(checked) == len(cases)
    for each in checked:
        assert each.backend == "interpreter"
        assert each.ok, each


def test_kernel_is_as_right_as_eager() -> None:
    """Output and all gradients are within the rule of their type, for each form."""
    right(FEW)


@pytest.mark.deep
def test_kernel_is_as_right_as_eager_with_every_gate() -> None:
    """The same for each gate in each type, long rows and short, small numbers and large."""
    right(GATED)


def rms(x: Tensor, weight: Tensor, eps: float = 1e-6, offset: float = 0.0) -> Tensor:
    """The reference of an RMSNorm that rounds late."""
    return reference(x, weight, None, Form(False, eps, offset))


def test_rule_rejects_wrong_norms() -> None:
    """A wrong eps, offset or divisor lies outside the rule, in float32; eager lies inside."""
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) * 1e-2
    weight = torch.linspace(0.5, 1.5, 64)
    exact = rms(x.double(), weight.double())
    eager = rms(x, weight)
    assert compare_tensor("eager", eager, eager, exact).ok
    wrong = {
        "eps": rms(x, weight, 1e-5),
        "offset": rms(x, weight, 1e-6, 1.0),
        "divisor": rms(x, weight) * (63 / 64) ** 0.5,
        "stale row": torch.cat([eager[:4], eager[:1]]),
        "unwritten": eager.masked_fill(torch.arange(64) == 63, float("nan")),
    }
    for name, out in wrong.items():
        assert not compare_tensor(name, out, eager, exact).ok, name


def test_rule_wants_the_same_infinities() -> None:
    """Where the truth is NaN or infinite, so must the output be, and nowhere else."""
    exact = torch.tensor([1.0, float("inf"), float("nan")], dtype=torch.float64)
    same = exact.float()
    assert compare_tensor("same", same, same, exact).ok
    assert not compare_tensor("negated", -same, same, exact).ok
    assert not compare_tensor("finite", torch.ones(3), same, exact).ok


def leaves(dtype: torch.dtype, *shape: int, bias: bool = True) -> tuple[Tensor, Tensor, Any]:
    """An input, a weight and a bias, if one is asked for."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, generator=generator).to(dtype).requires_grad_()
    weight, shift = (torch.rand(2, shape[-1], generator=generator) + 0.5).to(dtype).unbind()
    return x, weight.clone().requires_grad_(), shift.clone().requires_grad_() if bias else None


def gate_of(form: Form, x: Tensor) -> Tensor | None:
    """A gate for an input, where the form has one."""
    if not form.act:
        return None
    generator = torch.Generator().manual_seed(1)
    return torch.randn(x.shape, generator=generator).to(x.dtype).requires_grad_()


@pytest.mark.parametrize(("form", "bias"), [*FORMS, *((form, False) for form in GATES)])
def test_operator_equals_autograd_of_the_reference(form: Form, bias: bool) -> None:
    """In float64: its backward is the derivative of its forward, which is torch's own norm."""
    x, weight, shift = leaves(torch.float64, 2, 3, 6, bias=bias)
    given = {"x": x, "weight": weight, "bias": shift, "gate": gate_of(form, x)}
    held = {name: t for name, t in given.items() if t is not None}
    none = {name: None for name in given if name not in held}
    call = lambda *t: norm(form=form, **dict(zip(held, t)), **none)  # type: ignore[arg-type]  # noqa: E731
    torch.autograd.gradcheck(call, [*held.values()])
    x, weight, shift = leaves(torch.float64, 4, 36, bias=bias)
    assert form.eps is not None
    gate = gate_of(form, x)
    others = [reference(x, weight, shift, form, gate)]
    if form.centred:
        others.append(F.layer_norm(x, (36,), weight + form.offset, shift, form.eps))
    elif gate is None:
        others.append(F.rms_norm(x, (36,), weight + form.offset, form.eps))
    wanted = [t for t in (x, weight, shift, gate) if t is not None]
    ours, grad = norm(x, weight, shift, form, gate), torch.randn(4, 36, dtype=torch.float64)
    for other in others:
        pairs = zip(
            [ours, *torch.autograd.grad(ours, wanted, grad, retain_graph=True)],
            [other, *torch.autograd.grad(other, wanted, grad)],
            strict=True,
        )
        for a, b in pairs:
            assert (a - b).norm() <= 1e-13 * b.norm()


@pytest.mark.parametrize(("form", "bias"), ADDED)
def test_a_sum_equals_autograd_of_the_reference(form: Form, bias: bool) -> None:
    """In float64, whichever of the two results is used: values and gradients are torch's."""
    a, b = (torch.randn(2, 3, 10, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight, shift = (torch.randn(10, dtype=torch.float64, requires_grad=True) for _ in range(2))
    wanted = [a, b, weight, *([shift] if bias else [])]
    for used in ((0, 1), (1,)):
        sides = []
        for call in (add_norm, add_reference):
            made = call(a, b, weight, shift if bias else None, form)
            loss = sum((made[place] ** 3).sum() for place in used)
            sides.append([*made, *torch.autograd.grad(loss, wanted)])  # type: ignore[arg-type]
        for ours, plain in zip(*sides):
            assert (ours - plain).norm() <= 1e-13 * plain.norm()


@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16])
def test_a_sum_of_two_types(first: torch.dtype) -> None:
    """As under a cast, where what is added is rounded and the residual is not: types, values and
    gradients are those of torch's own sum and norm."""
    second = torch.bfloat16 if first == torch.float32 else torch.float32
    a, b = (torch.randn(3, 10).to(kind).requires_grad_() for kind in (first, second))
    weight = torch.randn(10, requires_grad=True)
    sides = []
    for call in (add_norm, add_reference):
        made = call(a, b, weight, None, RMS[0])
        loss = (made[0] ** 2).sum() + (made[1] ** 2).sum()
        sides.append([*made, *torch.autograd.grad(loss, (a, b, weight))])
    for ours, plain in zip(*sides):
        assert ours.dtype == plain.dtype
        torch.testing.assert_close(
            ours, plain, rtol=1e-6 if ours.dtype == torch.float32 else 8e-3, atol=1e-6
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("add", [False, True])
def test_opcheck(dtype: torch.dtype, add: bool) -> None:
    """Schema, fake tensors, autograd and ahead-of-time tracing of both operators are sound."""
    x, weight, bias = leaves(dtype, 2, 3, 17)
    other = x.detach().clone().requires_grad_() if add else None
    kinds = [(False, None), (True, bias), (True, None)]
    for (centred, shift), rounding in zip(kinds, ("late", "late", "early"), strict=True):
        given = (x, other, None, weight, shift, centred, 1e-6, 0.0, rounding, "", False, 1)
        torch.library.opcheck(norm_forward, given)
    row = torch.rand(2, 3, 1, dtype=torch.promote_types(dtype, torch.float32))
    plain, total = x.detach(), x.detach().clone() if add else None
    for centred, rounding in ((False, "early"), (True, "early"), (True, "late")):
        args = (plain, plain, total, None, weight.detach(), row if centred else None, row.clone())
        torch.library.opcheck(norm_backward, (*args, centred, 0.0, rounding, "", False, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_with_a_gate(dtype: torch.dtype) -> None:
    """The same, of a gate before groups and after the whole row."""
    x, weight, _ = leaves(dtype, 2, 3, 12)
    gate = gate_of(GATES[0], x)
    form = 0, 1e-6, 0.0, "early", "silu", True, 2
    torch.library.opcheck(norm_forward, (x, None, gate, weight, None, *form))
    assert gate is not None
    x, gate, weight = (t.detach() for t in (x, gate, weight))
    args = (x, x, None, gate, weight, None, torch.rand(2, 3, 2), 0, 0.0, "late", "silu", False, 2)
    torch.library.opcheck(norm_backward, args)


SUMMED = [(Form(centred, rounding=r), True) for centred in (False, True) for r in ("early", "late")]
UNLIKE = [*SUMMED, *((form, False) for form, _ in SUMMED), *((form, False) for form in GATES)]


@pytest.mark.parametrize(("form", "add"), UNLIKE)
def test_meta_says_what_real_gives(form: Form, add: bool) -> None:
    """Shapes, types and strides on the meta device are those of the real results, both ways."""
    kinds = (torch.bfloat16, torch.float32)
    for inner, outer in itertools.product(kinds, kinds):
        x, weight = torch.randn(3, 12, 5).to(inner).transpose(1, 2), torch.rand(12).to(outer)
        gate = torch.randn(3, 5, 12).to(outer) if form.act else None
        bias = torch.rand(12).to(outer) if form.centred else None
        given = [x, x if add else None, gate, weight, bias]
        meta = [None if t is None else t.to("meta") for t in given]
        sides = []
        for side in (given, meta):
            total, y, mean, rstd = norm_forward(*side, *form.values)
            rows = total if add else side[0], total if add else None
            middle = mean if form.centred else None
            numbers = form.values[0], *form.values[2:]
            back = norm_backward(y, *rows, *side[2:4], middle, rstd, *numbers)
            sides.append((total, y, mean, rstd, *back))
        for a, b in zip(*sides, strict=True):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def test_strided_inputs_and_gradients() -> None:
    """Transposed inputs and expanded gradients give what contiguous ones give."""
    x, weight = torch.randn(4, 6, 5, dtype=torch.float64), torch.rand(6, dtype=torch.float64)
    turned = x.transpose(1, 2).requires_grad_()
    plain = x.transpose(1, 2).contiguous().requires_grad_()
    for each in (turned, plain):
        norm(each, weight, None, RMS[2]).sum().backward()
    assert turned.grad is not None
    torch.testing.assert_close(turned.grad, plain.grad, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("form", [RMS[2], GATES[1]])
def test_empty_batch(form: Form) -> None:
    """No rows give no rows, and a zero gradient of the weight."""
    x, weight, _ = leaves(torch.float32, 0, 8)
    norm(x, weight, None, form, gate_of(form, x)).sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, torch.zeros(8))


@pytest.mark.parametrize(("form", "bias"), [(RMS[0], False), LAYER[2], (GATES[0], False)])
def test_compiles_and_checkpoints(form: Form, bias: bool) -> None:
    """One graph without breaks under torch.compile; the same gradients when recomputed."""
    given = leaves(torch.float32, 3, 12, bias=bias)
    given = *given, gate_of(form, given[0])
    wanted = [t for t in given if t is not None]

    def loss(x: Tensor, weight: Tensor, shift: Tensor | None, gate: Tensor | None) -> Tensor:
        return norm(x * 2, weight, shift, form, gate).square().sum()

    plain = torch.autograd.grad(loss(*given), wanted)
    whole = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for again in (whole(*given), checkpoint(loss, *given, use_reentrant=False)):
        for a, b in zip(torch.autograd.grad(again, wanted), plain, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_default_eps_is_torch_s() -> None:
    """Without eps the result is torch.nn.functional.rms_norm's, also in low precision."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = (torch.randn(3, 8) * 1e-4).to(dtype)
        ours = norm(x, torch.ones(8, dtype=dtype), None, Form(eps=None))
        torch.testing.assert_close(
            ours, F.rms_norm(x, (8,)), rtol=4 * torch.finfo(dtype).eps, atol=0
        )


@pytest.mark.parametrize("form", [RMS[2], GATES[0]])
def test_one_launch_each_way(form: Form) -> None:
    """Of a forward and its backward two operators run; without a GPU or the interpreter the ledger
    says that the reference did, not the kernel."""
    before = backend_runs().get("reference", 0)
    x, weight, _ = leaves(torch.float64, 2, 6)
    norm(x, weight, None, form, gate_of(form, x)).sum().backward()
    assert backend_runs()["reference"] == before + 2


@pytest.mark.parametrize(("form", "kept"), [(RMS[0], [4, 12, 48]), (GATES[0], [12, 12, 48, 48])])
def test_what_is_saved(form: Form, kept: list[int]) -> None:
    """For backward the input, the weight, the gate and a number for each group: no copies."""
    (x, weight, _), saved = leaves(torch.float32, 4, 12), list[Tensor]()
    gate = gate_of(form, x)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        norm(x, weight, None, form, gate)
    assert sorted(t.numel() for t in saved) == kept


@pytest.mark.deep
def test_norms_of_gpt2_over_ranks(pool: Any) -> None:
    """Every norm of an unmodified GPT-2, beside split tensors, recomputation and sliced state."""
    rows = """transformer.**:LayerNorm replace_kernel(layer_norm)
        transformer.h.*.attn.c_attn shard(col, blocks=3, over=tp)
        transformer.h.*.attn.c_proj shard(row, over=tp)
        transformer.h.* checkpoint()
        zero(stage=3, over=dp)"""
    plan = planned(models.gpt2(2), rows, "dp=2, tp=2")
    proven(pool, plan, [models.tokens(rows=6, seed=seed) for seed in (1, 2, 3)])


def test_each_norm_is_told_from_the_other() -> None:
    """A row with the wrong kernel names the one that fits; a module that is none says why."""
    model = models.gpt2(1)
    said = refused(model, "transformer.ln_f replace_kernel(rms_norm)")
    assert "S410" in said and "`replace_kernel(layer_norm)` fits" in said
    assert "submodules" in refused(model, "transformer.h.0 replace_kernel(layer_norm)")
