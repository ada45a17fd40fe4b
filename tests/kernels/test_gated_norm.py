"""A norm with a gate: its kernel against float64, its operators, and what is told of modules."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from schedlang.kernels.check import run_kernel_check
from schedlang.kernels.device import runs
from schedlang.kernels.norm import (
    Case,
    Form,
    backward_of,
    forward_of,
    norm,
    norm_backward,
    norm_forward,
    reference,
)
from schedlang.kernels.norm_probes import Norm
from schedlang.kernels.probe import Mismatch
from schedlang.runtime.float64 import Float64
from schedlang.runtime.kernel_injection.kernel import match, replace
from schedlang.runtime.left import left_in
from schedlang.runtime.modes import ambient
from tests import models
from tests.engine import Threads
from tests.proofs import planned, proven

FORMS = [
    Form(rounding="early", act="silu", first=True, groups=3),  # Mamba-2, Zamba2, Bamba
    Form(rounding="early", act="silu"),  # Qwen3-Next
    Form(act="sigmoid"),  # Kimi
    Form(False, 1e-5, 1.0, "early", "gelu_tanh", False, 2),
    Form(False, 1e-5, 1.0, "late", "relu", True, 1),
]
CASES = [
    Case(shape, dtype, form, scale=scale)
    for dtype in ("float32", "bfloat16", "float16")
    for form in FORMS
    for shape, scale in [
        ((5, 258), 1.0),  # no power of two, and long enough for low-precision sums to show
        ((1, 300), 1e-3),  # one row, small enough for eps to matter
        ((2, 3, 768), 50.0),
    ]
]
CASES += [Case((40, 12), "bfloat16", form) for form in FORMS]  # many short rows: several tiles
MIXED = [("float32", "bfloat16"), ("bfloat16", "float32")]
CASES += [Case((7, 96), kind, form, other=other) for form in FORMS for kind, other in MIXED]
CASES += [Case((3, 5, 66), "float32", form, strided=True) for form in FORMS]
FEW = [
    *(Case((2, 258), dtype, form) for dtype in ("float32", "bfloat16") for form in FORMS[:2]),
    *(Case((1, 36), "float32", form, scale=1e-3) for form in FORMS[3:]),
    *(
        Case((9, 12), kind, form, other=other)
        for form, (kind, other) in zip(FORMS, (*MIXED, ("float16", "")))
    ),
    Case((3, 5, 6), "float32", FORMS[3], strided=True),
]


def right(cases: list[Case]) -> None:
    """The kernel itself ran in Triton's interpreter, and is as right as eager."""
    checked = run_kernel_check(cases, device="cpu")
    assert len(checked) == len(cases)
    for each in checked:
        assert each.backend == "interpreter"
        assert each.ok, each


def test_kernel_is_as_right_as_eager() -> None:
    """Output and all three gradients are within the rule of their type, for each form."""
    right(FEW)


@pytest.mark.deep
def test_kernel_is_as_right_as_eager_everywhere() -> None:
    """The same for each form in each type, long rows and short, small numbers and large."""
    right(CASES)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, form: Form) -> Tensor:
    """The norm with its tensors in the order of what is tested."""
    return norm(x, weight, None, form, gate)


def leaves(dtype: torch.dtype, *shape: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, gate = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    weight = (torch.rand(shape[-1], generator=generator) + 0.5).to(dtype)
    return x.requires_grad_(), gate.requires_grad_(), weight.requires_grad_()


@pytest.mark.parametrize("form", FORMS)
def test_operator_gradient_is_the_derivative(form: Form) -> None:
    """In float64 the operator's own backward is the derivative of its forward."""
    given = leaves(torch.float64, 2, 3, 6)
    torch.autograd.gradcheck(lambda *given: gated_norm(*given, form), given)


@pytest.mark.parametrize("form", FORMS)
def test_operator_equals_autograd_of_the_reference(form: Form) -> None:
    """Forward and gradients in float64 equal plain autograd through the reference."""
    given = leaves(torch.float64, 4, 36)
    grad = torch.randn(4, 36, dtype=torch.float64)
    ours, plain = gated_norm(*given, form), reference(given[0], given[2], None, form, given[1])
    pairs = zip(
        [ours, *torch.autograd.grad(ours, given, grad)],
        [plain, *torch.autograd.grad(plain, given, grad)],
        strict=True,
    )
    for a, b in pairs:
        assert (a - b).norm() <= 1e-14 * b.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype: torch.dtype) -> None:
    """Schema, fake tensors, autograd and ahead-of-time tracing of both operators are sound."""
    given = leaves(dtype, 2, 3, 12)
    form = 0, 1e-6, 0.0, "early", "silu", True, 2
    torch.library.opcheck(norm_forward, (given[0], None, *given[1:], None, *form))
    x, gate, weight = (t.detach() for t in given)
    args = (x, x, None, gate, weight, None, torch.rand(2, 3, 2), 0, 0.0, "late", "silu", False, 2)
    torch.library.opcheck(norm_backward, args)


def test_meta_says_what_real_gives() -> None:
    """Shapes, types and strides on the meta device are those of the real results, both ways."""
    kinds = (torch.bfloat16, torch.float32)
    for form, inner, outer in itertools.product(FORMS, kinds, kinds):
        x = torch.randn(3, 12, 5).to(inner).transpose(1, 2)
        given = [x, None, torch.randn(3, 5, 12).to(outer), torch.rand(12).to(outer), None]
        meta = [None if t is None else t.to("meta") for t in given]
        numbers = form.values[2:]
        made, same = (norm_forward(*side, *form.values) for side in (given, meta))
        back, told = (
            norm_backward(ran[1], *side[:4], None, ran[3], 0, *numbers)
            for ran, side in ((made, given), (same, meta))
        )
        same += told
        for a, b in zip((*made, *back), same, strict=True):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def test_empty_batch() -> None:
    """No rows give no rows, and a zero gradient of the weight."""
    given = leaves(torch.float32, 0, 8)
    gated_norm(*given, FORMS[1]).sum().backward()
    assert torch.equal(given[2].grad, torch.zeros(8))


def test_compiles_and_checkpoints() -> None:
    """One graph without breaks under torch.compile; the same gradients when recomputed."""
    given = leaves(torch.float32, 3, 12)

    def loss(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        return gated_norm(x * 2, gate, weight, FORMS[0]).square().sum()

    plain = torch.autograd.grad(loss(*given), given)
    whole = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for again in (whole(*given), checkpoint(loss, *given, use_reentrant=False)):
        for a, b in zip(torch.autograd.grad(again, given), plain, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_one_launch_each_way() -> None:
    """Of a forward and its backward two operators run, and nothing beside them."""
    given = leaves(torch.float64, 2, 6)
    before = runs().get("reference", 0)
    gated_norm(*given, FORMS[0]).sum().backward()
    assert runs()["reference"] == before + 2


def test_what_is_saved() -> None:
    """For backward the input, the gate, the weight and a number for each group: no copies."""
    given, saved = leaves(torch.float32, 4, 12), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        gated_norm(*given, FORMS[0])
    assert sorted(t.numel() for t in saved) == [12, 12, 48, 48]


class Gated(nn.Module):
    """A norm with a gate under invented names, in every variation that a test wants."""

    def __init__(self, form: Callable[..., Tensor], size: int = 24) -> None:
        super().__init__()
        self.gain, self.form = nn.Parameter(torch.ones(size)), form

    def forward(self, rows: Tensor, lever: Tensor | None = None) -> Tensor:
        return self.form(rows, lever, self.gain)


def rms(x: Tensor, eps: float = 1e-6, groups: int = 1) -> Tensor:
    parts = x.unflatten(-1, (groups, -1))
    return (parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps)).flatten(-2)


def before(x: Tensor, z: Tensor | None, w: Tensor) -> Tensor:
    """As Mamba-2's: also without a gate."""
    value = x.float() if z is None else x.float() * F.silu(z.float())
    return w * rms(value, 3e-5, 4).to(x.dtype)


def after(x: Tensor, z: Tensor, w: Tensor) -> Tensor:
    """As Qwen3-Next's, with a sigmoid and one more than the weight."""
    normal = (1 + w) * rms(x.float()).to(x.dtype)
    return (normal * torch.sigmoid(z.float())).to(x.dtype)


def wide(x: Tensor, z: Tensor, w: Tensor) -> Tensor:
    """As Kimi's: rounded once."""
    return (w.float() * rms(x.float()) * F.silu(z.float())).to(x.dtype)


TOLD = [
    (before, Form(False, 3e-5, 0.0, "early", "silu", True, 4)),
    (after, Form(False, 1e-6, 1.0, "early", "sigmoid", False, 1)),
    (wide, Form(False, 1e-6, 0.0, "late", "silu", False, 1)),
]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("form", "told"), TOLD)
def test_names_every_form(form: Callable[..., Tensor], told: Form, device: str) -> None:
    """What gates, where, and over which parts of a row is found by behaviour."""
    with torch.device(device):
        module = Gated(form)
    assert match(module, "rms_norm") == Norm(24, "gain", None, told, ("rows", "lever"))
    other = match(module, "layer_norm")
    assert isinstance(other, Mismatch) and "`replace_kernel(rms_norm)` fits" in other.reason


def ragged(x: Tensor, z: Tensor, w: Tensor) -> Tensor:
    left, right = x[..., :7], x[..., 7:]
    return w * torch.cat([rms(left), rms(right)], -1) * F.silu(z)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (lambda x, z, w: wide(x, 1.702 * z, w), "differs from rms_norm with a gate"),
        (lambda x, z, w: wide(x, z, w) * (1 + 1e-7), "nearest: silu after it"),
        (lambda x, z, w: before(x, 1 + 1e-6 * z, w), "differs"),
        (lambda x, z, w: wide(x, z.detach(), w), "gradients differ"),
        (lambda x, z, w: wide(x, z, w.detach()), "gradients differ"),
        (lambda x, z, w: w * rms(x + z), "differs"),
        (lambda x, z, w: w * rms(x) * F.silu(z), "rounds differently"),
        (lambda x, z, w: w * rms(x.float(), 2.0**-52) * F.silu(z), "depends on the dtype"),
        (lambda x, z, w: w * rms(x.float()).to(x.dtype) * F.silu(z.float()), "rounds differently"),
        (lambda x, z, w: wide(x, z, w.to(x.dtype)).float(), "rounds differently"),
        (ragged, "groups of equal size"),
        (lambda x, z, w: wide(x, z, w).sum(), "does not run"),
        (lambda x, z, w: (x.float() * F.silu(z.float()) * w).to(x.dtype), "differs"),
        (lambda x, z, w: F.layer_norm(x, w.shape, w) * F.silu(z), "differs"),
    ],
)
def test_refuses_what_only_resembles(form: Callable[..., Tensor], said: str) -> None:
    """Another gate, a cut gradient, foreign parts or roundings are refused, and measured."""
    found = match(Gated(form), "rms_norm")
    assert isinstance(found, Mismatch)
    assert "takes `lever` beside its input" in found.reason
    assert said in found.reason
    if "differ" in said and "rounds" not in said:
        assert found.error is not None and found.error > 1e-8


@pytest.mark.parametrize(("form", "told"), TOLD)
def test_a_module_with_the_kernel_gives_what_it_gave(
    form: Callable[..., Tensor], told: Form
) -> None:
    """Output and gradients, the gate given by place or by name, in matrices and in batches."""
    module, plain = Gated(form).double(), Gated(form).double()
    with torch.no_grad():
        for each in (module, plain):
            each.gain.copy_(torch.linspace(0.5, 1.5, 24))
    replace(module, match(module, "rms_norm"))  # type: ignore[arg-type]
    for shape in ((5, 24), (2, 3, 24), (2, 3, 4, 24)):
        x, gate, _ = leaves(torch.float64, *shape)
        by = torch.linspace(-1, 1, x.numel(), dtype=torch.float64).view(shape)
        for call in (lambda m: m(x, gate), lambda m: m(lever=gate, rows=x)):  # noqa: B023
            both = [
                [y, *torch.autograd.grad(y, [x, gate, m.gain], by)]
                for m in (module, plain)
                for y in [call(m)]
            ]
            for a, b in zip(*both, strict=True):
                # the module's own casts to float32 stay casts
                assert (a - b).norm() <= 1e-6 * b.norm()
    assert not left_in(module)


def test_a_call_without_a_gate_is_the_modules_own() -> None:
    """It is computed as ever, and told; so is a gate of another shape."""
    module, x = Gated(before), torch.randn(2, 3, 24)
    replace(module, match(module, "rms_norm"))  # type: ignore[arg-type]
    assert torch.equal(module(x), Gated(before)(x))
    gate = torch.randn(3, 24)
    assert torch.equal(module(x, gate), Gated(before)(x, gate))
    (left,) = left_in(module)
    assert left.calls == 2 and "a gate of the shape of the input" in left.why


def test_the_references_of_both_ways_agree_on_half_precision() -> None:
    """In bfloat16 the reference's backward is that of autograd, to a few roundings."""
    for form in FORMS:
        x, gate, weight = leaves(torch.bfloat16, 64, 48)
        y = reference(x, weight, None, form, gate)
        by = torch.randn_like(y)
        _, _, rstd = forward_of(x, gate, weight, None, form)
        dx, dweight, _, dgate = backward_of(by, x, gate, weight, None, rstd, form)
        for a, b in zip(
            (dx, dgate, dweight), torch.autograd.grad(y, (x, gate, weight), by), strict=True
        ):
            assert (a.double() - b.double()).norm() <= 2e-2 * b.double().norm()


MAMBA = """at backbone.layers.*.mixer {
  norm  replace_kernel(rms_norm)
}
"""
WAYS = [
    ("", "backbone.layers.* checkpoint()"),
    ("dp=2", "zero(stage=3, over=dp)"),
    ("pp=2", 'backbone.layers pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)'),
]


def mamba(layers: int = 2) -> nn.Module:
    """Mamba-2, unmodified: a gate before the norm of two groups of channels."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Mamba2Config(
        hidden_size=16,
        num_heads=4,
        head_dim=8,
        expand=2,
        n_groups=2,
        state_size=8,
        conv_kernel=2,
        num_hidden_layers=layers,
        chunk_size=4,
        use_cache=False,
        **models.SIZES,
    )
    return transformers.Mamba2ForCausalLM(config).double()


def outcome(model: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    """Logits, loss and every gradient, in float64 throughout."""
    with ambient(Float64):
        out: Any = model(**batch)
        out.loss.backward()
    return [out.logits.detach(), out.loss.detach(), *(p.grad for p in model.parameters())]  # type: ignore[misc]


def test_a_model_with_the_kernel_is_the_model() -> None:
    """Mamba-2's own forward, its gated norms by the kernel: logits, loss and every gradient."""
    model, batch = mamba(), models.tokens(rows=3)
    expected = outcome(copy.deepcopy(model), batch)
    norms = [m for n, m in model.named_modules() if n.endswith("mixer.norm")]
    assert len(norms) == 2
    for each in norms:
        replace(each, match(each, "rms_norm"))  # type: ignore[arg-type]
    before = runs()["reference"]
    for a, b in zip(outcome(model, batch), expected, strict=True):
        assert (a - b).norm() <= 1e-12 * (b.norm() + 1e-3)
    assert runs()["reference"] == before + 4 and not left_in(model)


@pytest.mark.deep
@pytest.mark.parametrize(("mesh", "rows"), WAYS)
def test_the_whole_proof(threads: Threads, mesh: str, rows: str) -> None:
    """Recomputed, sharded or cut in stages, a schedule with the row is proven."""
    plan = planned(mamba(), MAMBA + rows, mesh)
    proven(threads, plan, [models.tokens(rows=4, seed=seed) for seed in (1, 2)])
