"""The kernels of norms, sums with norms and gates: accuracy, operators, compilation, models."""

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
from tests.proofs import assert_proven, make_plan, refusal_text

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
SUM_FORMS = [(RMS[0], False), (RMS[1], False), LAYER[0], LAYER[3]]
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
CASES += [
    Case((2, 3, 257), dtype, form, bias, add=True) for form, bias in SUM_FORMS for dtype in TYPES
]
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
GATED_CASES = [
    Case(shape, dtype, form, scale=scale)
    for dtype in ("float32", "bfloat16", "float16")
    for form in GATES
    for shape, scale in [
        ((5, 258), 1.0),  # no power of two, and long enough for low-precision sums to show
        ((1, 300), 1e-3),  # one row, small enough for eps to matter
        ((2, 3, 768), 50.0),
    ]
]
GATED_CASES += [
    Case((40, 12), "bfloat16", form) for form in GATES
]  # many short rows: several tiles
MIXED = [("float32", "bfloat16"), ("bfloat16", "float32")]
GATED_CASES += [Case((7, 96), kind, form, other=other) for form in GATES for kind, other in MIXED]
GATED_CASES += [Case((3, 5, 66), "float32", form, strided=True) for form in GATES]
QUICK_CASES = [
    *CASES,
    *(Case((2, 258), dtype, form) for dtype in ("float32", "bfloat16") for form in GATES[:2]),
    *(Case((1, 36), "float32", form, scale=1e-3) for form in GATES[3:]),
    *(
        Case((9, 12), kind, form, other=other)
        for form, (kind, other) in zip(GATES, (*MIXED, ("float16", "")))
    ),
    Case((3, 5, 6), "float32", GATES[3], strided=True),
]


def check_cases(cases: list[Case]) -> None:
    """Assert that the kernel ran in Triton's interpreter and is as accurate as eager torch."""
    results = run_kernel_check(cases, device="cpu")
    assert len(results) == len(cases)
    for result in results:
        assert result.backend == "interpreter"
        assert result.ok, result


def test_kernel_is_as_right_as_eager() -> None:
    """Output and all gradients keep the rule of their dtype, for each form."""
    check_cases(QUICK_CASES)


@pytest.mark.deep
def test_kernel_is_as_right_as_eager_with_every_gate() -> None:
    """The same for each gate in each dtype, long and short rows, small and large numbers."""
    check_cases(GATED_CASES)


def rms_reference(x: Tensor, weight: Tensor, eps: float = 1e-6, offset: float = 0.0) -> Tensor:
    """Compute the reference of an RMSNorm that rounds late."""
    return reference(x, weight, None, Form(False, eps, offset))


def test_rule_rejects_wrong_norms() -> None:
    """In float32 a wrong eps, offset or divisor breaks the rule; eager keeps it."""
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) * 1e-2
    weight = torch.linspace(0.5, 1.5, 64)
    exact = rms_reference(x.double(), weight.double())
    eager = rms_reference(x, weight)
    assert compare_tensor("eager", eager, eager, exact).ok
    wrong = {
        "eps": rms_reference(x, weight, 1e-5),
        "offset": rms_reference(x, weight, 1e-6, 1.0),
        "divisor": rms_reference(x, weight) * (63 / 64) ** 0.5,
        "stale row": torch.cat([eager[:4], eager[:1]]),
        "unwritten": eager.masked_fill(torch.arange(64) == 63, float("nan")),
    }
    for name, out in wrong.items():
        assert not compare_tensor(name, out, eager, exact).ok, name


def test_rule_wants_the_same_infinities() -> None:
    """The output must be NaN or infinite exactly where the reference is."""
    exact = torch.tensor([1.0, float("inf"), float("nan")], dtype=torch.float64)
    same = exact.float()
    assert compare_tensor("same", same, same, exact).ok
    assert not compare_tensor("negated", -same, same, exact).ok
    assert not compare_tensor("finite", torch.ones(3), same, exact).ok


def random_leaves(dtype: torch.dtype, *shape: int, bias: bool = True) -> tuple[Tensor, Tensor, Any]:
    """Return an input, a weight, and a bias if asked for."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, generator=generator).to(dtype).requires_grad_()
    weight, shift = (torch.rand(2, shape[-1], generator=generator) + 0.5).to(dtype).unbind()
    return x, weight.clone().requires_grad_(), shift.clone().requires_grad_() if bias else None


def random_gate(form: Form, x: Tensor) -> Tensor | None:
    """Return a gate for an input, or None if the form has none."""
    if not form.act:
        return None
    generator = torch.Generator().manual_seed(1)
    return torch.randn(x.shape, generator=generator).to(x.dtype).requires_grad_()


@pytest.mark.parametrize(("form", "bias"), [*FORMS, *((form, False) for form in GATES)])
def test_operator_equals_autograd_of_the_reference(form: Form, bias: bool) -> None:
    """In float64 the backward is the derivative of the forward, which equals torch's norm."""
    x, weight, shift = random_leaves(torch.float64, 2, 3, 6, bias=bias)
    arguments = {"x": x, "weight": weight, "bias": shift, "gate": random_gate(form, x)}
    present = {name: t for name, t in arguments.items() if t is not None}
    absent = {name: None for name in arguments if name not in present}
    call = lambda *t: norm(form=form, **dict(zip(present, t)), **absent)  # type: ignore[arg-type]  # noqa: E731
    torch.autograd.gradcheck(call, [*present.values()])
    x, weight, shift = random_leaves(torch.float64, 4, 36, bias=bias)
    assert form.eps is not None
    gate = random_gate(form, x)
    references = [reference(x, weight, shift, form, gate)]
    if form.centred:
        references.append(F.layer_norm(x, (36,), weight + form.offset, shift, form.eps))
    elif gate is None:
        references.append(F.rms_norm(x, (36,), weight + form.offset, form.eps))
    inputs = [t for t in (x, weight, shift, gate) if t is not None]
    actual, grad = norm(x, weight, shift, form, gate), torch.randn(4, 36, dtype=torch.float64)
    for expected in references:
        pairs = zip(
            [actual, *torch.autograd.grad(actual, inputs, grad, retain_graph=True)],
            [expected, *torch.autograd.grad(expected, inputs, grad)],
            strict=True,
        )
        for a, b in pairs:
            assert (a - b).norm() <= 1e-13 * b.norm()


@pytest.mark.parametrize(("form", "bias"), SUM_FORMS)
def test_a_sum_equals_autograd_of_the_reference(form: Form, bias: bool) -> None:
    """In float64, whichever results are used, values and gradients are torch's."""
    a, b = (torch.randn(2, 3, 10, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight, shift = (torch.randn(10, dtype=torch.float64, requires_grad=True) for _ in range(2))
    inputs = [a, b, weight, *([shift] if bias else [])]
    for used in ((0, 1), (1,)):
        results = []
        for call in (add_norm, add_reference):
            outputs = call(a, b, weight, shift if bias else None, form)
            loss = sum((outputs[index] ** 3).sum() for index in used)
            results.append([*outputs, *torch.autograd.grad(loss, inputs)])  # type: ignore[arg-type]
        for actual, expected in zip(*results):
            assert (actual - expected).norm() <= 1e-13 * expected.norm()


@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16])
def test_a_sum_of_two_types(first: torch.dtype) -> None:
    """As under a cast, where one summand is rounded and the residual is not: dtypes, values and
    gradients are torch's."""
    second = torch.bfloat16 if first == torch.float32 else torch.float32
    a, b = (torch.randn(3, 10).to(dtype).requires_grad_() for dtype in (first, second))
    weight = torch.randn(10, requires_grad=True)
    results = []
    for call in (add_norm, add_reference):
        outputs = call(a, b, weight, None, RMS[0])
        loss = (outputs[0] ** 2).sum() + (outputs[1] ** 2).sum()
        results.append([*outputs, *torch.autograd.grad(loss, (a, b, weight))])
    for actual, expected in zip(*results):
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(
            actual, expected, rtol=1e-6 if actual.dtype == torch.float32 else 8e-3, atol=1e-6
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("add", [False, True])
def test_opcheck(dtype: torch.dtype, add: bool) -> None:
    """Both operators pass opcheck: schema, fake tensors, autograd, ahead-of-time tracing."""
    x, weight, bias = random_leaves(dtype, 2, 3, 17)
    other = x.detach().clone().requires_grad_() if add else None
    kinds = [(False, None), (True, bias), (True, None)]
    for (centred, shift), rounding in zip(kinds, ("late", "late", "early"), strict=True):
        forward_args = (x, other, None, weight, shift, centred, 1e-6, 0.0, rounding, "", False, 1)
        torch.library.opcheck(norm_forward, forward_args)
    row = torch.rand(2, 3, 1, dtype=torch.promote_types(dtype, torch.float32))
    plain, total = x.detach(), x.detach().clone() if add else None
    for centred, rounding in ((False, "early"), (True, "early"), (True, "late")):
        args = (plain, plain, total, None, weight.detach(), row if centred else None, row.clone())
        torch.library.opcheck(norm_backward, (*args, centred, 0.0, rounding, "", False, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_with_a_gate(dtype: torch.dtype) -> None:
    """The same with a gate, before groups and after the complete row."""
    x, weight, _ = random_leaves(dtype, 2, 3, 12)
    gate = random_gate(GATES[0], x)
    form = 0, 1e-6, 0.0, "early", "silu", True, 2
    torch.library.opcheck(norm_forward, (x, None, gate, weight, None, *form))
    assert gate is not None
    x, gate, weight = (t.detach() for t in (x, gate, weight))
    args = (x, x, None, gate, weight, None, torch.rand(2, 3, 2), 0, 0.0, "late", "silu", False, 2)
    torch.library.opcheck(norm_backward, args)


NORM_FORMS = [
    (Form(centred, rounding=r), True) for centred in (False, True) for r in ("early", "late")
]
META_FORMS = [
    *NORM_FORMS,
    *((form, False) for form, _ in NORM_FORMS),
    *((form, False) for form in GATES),
]


@pytest.mark.parametrize(("form", "add"), META_FORMS)
def test_meta_says_what_real_gives(form: Form, add: bool) -> None:
    """Shapes, dtypes and strides on meta equal the real ones, forward and backward."""
    kinds = (torch.bfloat16, torch.float32)
    for inner, outer in itertools.product(kinds, kinds):
        x, weight = torch.randn(3, 12, 5).to(inner).transpose(1, 2), torch.rand(12).to(outer)
        gate = torch.randn(3, 5, 12).to(outer) if form.act else None
        bias = torch.rand(12).to(outer) if form.centred else None
        inputs = [x, x if add else None, gate, weight, bias]
        meta = [None if t is None else t.to("meta") for t in inputs]
        results = []
        for arguments in (inputs, meta):
            total, y, mean, rstd = norm_forward(*arguments, *form.values)
            rows = total if add else arguments[0], total if add else None
            saved_mean = mean if form.centred else None
            numbers = form.values[0], *form.values[2:]
            grads = norm_backward(y, *rows, *arguments[2:4], saved_mean, rstd, *numbers)
            results.append((total, y, mean, rstd, *grads))
        for a, b in zip(*results, strict=True):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def test_strided_inputs_and_gradients() -> None:
    """Transposed inputs and expanded gradients give the same as contiguous ones."""
    x, weight = torch.randn(4, 6, 5, dtype=torch.float64), torch.rand(6, dtype=torch.float64)
    transposed = x.transpose(1, 2).requires_grad_()
    contiguous = x.transpose(1, 2).contiguous().requires_grad_()
    for tensor in (transposed, contiguous):
        norm(tensor, weight, None, RMS[2]).sum().backward()
    assert transposed.grad is not None
    torch.testing.assert_close(transposed.grad, contiguous.grad, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("form", [RMS[2], GATES[1]])
def test_empty_batch(form: Form) -> None:
    """No rows in, no rows out, and a zero gradient of the weight."""
    x, weight, _ = random_leaves(torch.float32, 0, 8)
    norm(x, weight, None, form, random_gate(form, x)).sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, torch.zeros(8))


@pytest.mark.parametrize(("form", "bias"), [(RMS[0], False), LAYER[2], (GATES[0], False)])
def test_compiles_and_checkpoints(form: Form, bias: bool) -> None:
    """One graph without breaks under torch.compile; the same gradients when recomputed."""
    inputs = random_leaves(torch.float32, 3, 12, bias=bias)
    inputs = *inputs, random_gate(form, inputs[0])
    present = [t for t in inputs if t is not None]

    def loss(x: Tensor, weight: Tensor, shift: Tensor | None, gate: Tensor | None) -> Tensor:
        return norm(x * 2, weight, shift, form, gate).square().sum()

    expected = torch.autograd.grad(loss(*inputs), present)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for result in (compiled(*inputs), checkpoint(loss, *inputs, use_reentrant=False)):
        for a, b in zip(torch.autograd.grad(result, present), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_default_eps_is_torch_s() -> None:
    """Without eps the result is torch.nn.functional.rms_norm's, also in low precision."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = (torch.randn(3, 8) * 1e-4).to(dtype)
        actual = norm(x, torch.ones(8, dtype=dtype), None, Form(eps=None))
        torch.testing.assert_close(
            actual, F.rms_norm(x, (8,)), rtol=4 * torch.finfo(dtype).eps, atol=0
        )


@pytest.mark.parametrize("form", [RMS[2], GATES[0]])
def test_one_launch_each_way(form: Form) -> None:
    """Forward and backward call two operators; on a CPU the reference is counted, not the
    kernel."""
    runs_before = backend_runs().get("reference", 0)
    x, weight, _ = random_leaves(torch.float64, 2, 6)
    norm(x, weight, None, form, random_gate(form, x)).sum().backward()
    assert backend_runs()["reference"] == runs_before + 2


@pytest.mark.parametrize(("form", "kept"), [(RMS[0], [4, 12, 48]), (GATES[0], [12, 12, 48, 48])])
def test_what_is_saved(form: Form, kept: list[int]) -> None:
    """Backward needs the input, the weight, the gate and a number for each group: no copies."""
    (x, weight, _), saved = random_leaves(torch.float32, 4, 12), list[Tensor]()
    gate = random_gate(form, x)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        norm(x, weight, None, form, gate)
    assert sorted(t.numel() for t in saved) == kept


@pytest.mark.deep
def test_norms_of_gpt2_over_ranks(pool: Any) -> None:
    """Every norm of an unmodified GPT-2, with tensor parallelism, recomputation and sharded
    state."""
    rows = """transformer.**:LayerNorm replace_kernel(layer_norm)
        transformer.h.*.attn.c_attn shard(col, blocks=3, over=tp)
        transformer.h.*.attn.c_proj shard(row, over=tp)
        transformer.h.* checkpoint()
        zero(stage=3, over=dp)"""
    plan = make_plan(models.gpt2(2), rows, "dp=2, tp=2")
    assert_proven(pool, plan, [models.tokens(rows=6, seed=seed) for seed in (1, 2, 3)])


def test_each_norm_is_told_from_the_other() -> None:
    """A row with the wrong kernel names the right one; a module that is no norm gives the
    reason."""
    model = models.gpt2(1)
    message = refusal_text(model, "transformer.ln_f replace_kernel(rms_norm)")
    assert "S410" in message and "`replace_kernel(layer_norm)` fits" in message
    assert "submodules" in refusal_text(model, "transformer.h.0 replace_kernel(layer_norm)")
