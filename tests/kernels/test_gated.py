"""The kernel `gated` for gated MLPs: accuracy, which modules it fits, results in models."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.kernels import probe
from schedlang.kernels.check import _idle, run_kernel_check
from schedlang.kernels.gated import (
    ACTIVATIONS,
    Case,
    gated_backward,
    gated_forward,
    gated_product,
    packed_gated_product,
    reference,
)
from schedlang.runtime.kernel_injection import gated_mlp
from schedlang.runtime.kernel_injection.gated_mlp import GatedForm, probe_gated
from schedlang.runtime.kernel_injection.kernel import match, replace
from tests import models
from tests.proofs import assert_proven, make_plan, refusal_text

CASES = [
    Case(shape, dtype, act, pack, scale)
    for dtype in ("float32", "bfloat16", "float16")
    for act in ACTIVATIONS
    for shape, pack, scale in [((2, 257), "", 1.0), ((1, 2, 40), "gate first", 4.0)]
]
CASES += [Case((3, 5, 9), strided=True), Case((2, 1500), pack="up first")]


def test_kernel_is_as_right_as_eager():
    """The kernel runs in the interpreter; output and gradients keep the rule of their dtype."""
    for result in run_kernel_check(CASES, device="cpu"):
        assert result.backend == "interpreter"
        assert result.ok, result


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_operators_equal_autograd_of_the_reference(act):
    """In float64, separate and packed in both orders, output and gradients are torch's."""
    packed = torch.randn(3, 4, 10, dtype=torch.float64, requires_grad=True)
    left, right = packed.chunk(2, -1)
    grad = torch.randn(3, 4, 5, dtype=torch.float64)
    for actual, expected in [
        (gated_product(left, right, act), reference(left, right, act)),
        (packed_gated_product(packed, act), reference(left, right, act)),
        (packed_gated_product(packed, act, gate_first=False), reference(right, left, act)),
    ]:
        assert torch.equal(actual, expected)
        grads = [
            torch.autograd.grad(y, packed, grad, retain_graph=True)[0] for y in (actual, expected)
        ]
        assert (grads[0] - grads[1]).norm() <= 1e-14 * grads[1].norm()


def test_opcheck_and_one_graph():
    """The operators pass opcheck and compile without a graph break."""
    packed = torch.randn(3, 10, requires_grad=True)
    left, right = (t.detach().clone().requires_grad_() for t in packed.chunk(2, -1))
    torch.library.opcheck(gated_forward, (left, right, "silu", 1))
    separate = left.detach(), right.detach()
    torch.library.opcheck(gated_backward, (separate[0], *separate, "gelu", 1))
    torch.library.opcheck(gated_forward, (packed, None, "silu", 1))
    torch.library.opcheck(gated_backward, (separate[0], packed.detach(), None, "gelu", 0))
    loss = lambda x: packed_gated_product(x * 2, "gelu_tanh").square().sum()  # noqa: E731
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    grads = [torch.autograd.grad(f(packed), packed)[0] for f in (loss, compiled)]
    torch.testing.assert_close(*grads)


class Mlp(nn.Module):
    """A gated MLP with invented names, and a forward that the test gives."""

    def __init__(self, form, width=6, middle=8, out=None):
        super().__init__()
        self.one, self.two = nn.Linear(width, middle), nn.Linear(width, middle)
        self.three = nn.Linear(middle, width)
        self.form = form

    def forward(self, x):
        return self.form(self, x)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (lambda m, x: m.three(F.silu(m.one(x)) * m.two(x)), ("one", "two", "silu")),
        (lambda m, x: m.three(F.gelu(m.two(x)) * m.one(x)), ("two", "one", "gelu")),
        (lambda m, x: m.three(m.one(x) * F.relu(m.two(x))), ("two", "one", "relu")),
        (
            lambda m, x: F.linear(F.silu(m.one(x)) * m.two(x), m.three.weight, m.three.bias),
            ("one", "two", "silu"),
        ),
        (
            lambda m, x: m.three((F.silu(m.one(x)) * m.two(x)).flatten(0, 1)).view(x.shape),
            ("one", "two", "silu"),
        ),
    ],
)
@pytest.mark.parametrize("size", ["narrow", "wide"])
def test_names_every_part(form, expected, size, monkeypatch):
    """Gate, up and activation are found by what the module computes, on meta too; also where
    projections are not called, or get other shapes."""
    _set_width(size, monkeypatch)
    with torch.device("meta"):
        module = Mlp(form)
    assert probe_gated(module) == GatedForm(expected[0], expected[1], "three", expected[2], 8)


def _set_width(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For "wide", let a small module be probed as a wide one is."""
    if size == "wide":
        monkeypatch.setattr(gated_mlp, "_WIDE_WEIGHT", 0)
        monkeypatch.setattr(probe, "_DISTINCT", 11)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (lambda m, x: m.three(F.silu(m.one(x)) + m.two(x)), "differs"),
        (lambda m, x: m.three(F.silu(m.one(x) * 1.001) * m.two(x)), "differs"),
        (lambda m, x: m.three(F.silu(m.one(x)) * m.two(x).detach()), "gradients differ"),
        (lambda m, x: m.three(F.silu(m.one(x)).detach() * m.two(x)), "gradients differ"),
        (lambda m, x: m.three((F.silu(m.one(x)) * m.two(x)).detach()), "gradients differ"),
        (lambda m, x: m.three(F.silu(m.one(x)) * m.two(x.detach())), "gradients differ"),
        (lambda m, x: m.three(F.silu(m.one(x)) * m.two(x)).clamp(max=0.3), "differs"),
        (lambda m, x: (m.three(F.silu(m.one(x)) * m.two(x)), None), "returns tuple, not a tensor"),
        (lambda m, x: F.dropout(m.three(F.silu(m.one(x)) * m.two(x)), 0.5, m.training), "differs"),
        (lambda m, x: m.three(F.silu(m.one(x)) * m.nothing), "does not run"),
        (lambda m, x: m.three(F.silu(m.one(x)) * m.two(x)) * 1.001, "differs"),
        (lambda m, x: m.three(F.silu(m.one(x)) * m.two(x)) * (1.0, 1.001)[m.training], "differs"),
        (lambda m, x: m.three(F.silu(m.one(x)) * m.two(x)) * (1.001, 1.0)[m.training], "differs"),
        (
            lambda m, x: (
                m.three(F.silu(m.one(x)) * m.two(x)) * (1.0, 1.001)[torch.is_grad_enabled()]
            ),
            "differs",
        ),
        (
            lambda m, x: (
                m.three(F.silu(m.one(x)) * m.two(x)) * (1.001, 1.0)[torch.is_grad_enabled()]
            ),
            "differs",
        ),
    ],
)
@pytest.mark.parametrize("size", ["narrow", "wide"])
def test_refuses_what_only_resembles(form, said, size, monkeypatch):
    """A sum, another activation, a detached gradient, dropout, other results: each is a mismatch,
    even where weights are too wide to compute their gradients."""
    _set_width(size, monkeypatch)
    mismatch = probe_gated(Mlp(form))
    assert said in mismatch.reason
    if "differ" in said:
        assert mismatch.error > 1e-5


class WithChild(Mlp):
    """A gated MLP with one more child, which the product or something else passes through."""

    def __init__(self, more, form):
        super().__init__(form)
        self.more = more


def gated_product_of(m, x):
    return F.silu(m.one(x)) * m.two(x)


@pytest.mark.parametrize("size", ["narrow", "wide"])
@pytest.mark.parametrize("more", [nn.Dropout(0.3), nn.RMSNorm(8), nn.LayerNorm(8)])
def test_what_the_product_goes_through_is_found(more, size, monkeypatch):
    """Dropout (T5) or a norm (BitNet) before the last projection stays a module."""
    if size == "wide":
        monkeypatch.setattr(gated_mlp, "_WIDE_WEIGHT", 0)
    module = WithChild(more, lambda m, x: m.three(m.more(gated_product_of(m, x)))).double()
    gated_form = match(module, "gated")
    assert gated_form == GatedForm("one", "two", "three", "silu", 8, between="more")
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    leaves, outcomes = [x, *module.parameters()], []
    for _ in range(2):
        torch.manual_seed(3)
        y = module(x)
        outcomes.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
        replace(module, gated_form)
    for a, b in zip(*outcomes, strict=True):
        assert (a - b).norm() <= 1e-14 * b.norm()


@pytest.mark.parametrize("size", ["narrow", "wide"])
@pytest.mark.parametrize(
    ("more", "form"),
    [
        (nn.Dropout(0.3), lambda m, x: m.more(m.three(gated_product_of(m, x)))),
        (nn.Dropout(0.3), lambda m, x: m.three(F.silu(m.more(m.one(x))) * m.two(x))),
        (nn.Dropout(0.3), lambda m, x: m.three(m.more(gated_product_of(m, x)).detach())),
        (nn.RMSNorm(8), lambda m, x: m.three(m.more(m.one(x)) * m.two(x))),
        (nn.RMSNorm(8), lambda m, x: m.three(gated_product_of(m, x))),
        (
            nn.RMSNorm(8),
            lambda m, x: m.three(F.rms_norm(gated_product_of(m, x), (8,), m.more.weight.data)),
        ),
        (nn.Linear(8, 8), lambda m, x: m.three(m.more(gated_product_of(m, x)))),
    ],
)
def test_a_child_in_another_place_is_refused(more, form, size, monkeypatch):
    """A child at another place, or with a detached gradient, is no gated MLP."""
    if size == "wide":
        monkeypatch.setattr(gated_mlp, "_WIDE_WEIGHT", 0)
    mismatch = match(WithChild(more, form), "gated")
    assert "differ" in mismatch.reason or "projections" in mismatch.reason, mismatch


def test_gated_mlps_of_transformers_with_more_inside():
    """The published T5 and BitNet, on meta: dropout and norm keep their places."""
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    bitnet = pytest.importorskip("transformers.models.bitnet.modeling_bitnet")
    with torch.device("meta"):
        config = t5.T5Config(d_model=16, d_ff=24, feed_forward_proj="gated-gelu")
        first = t5.T5DenseGatedActDense(config)
        second = bitnet.BitNetMLP(bitnet.BitNetConfig(hidden_size=16, intermediate_size=24))
    assert config.dropout_rate > 0
    assert match(first, "gated") == GatedForm(
        "wi_0", "wi_1", "wo", "gelu_tanh", 24, between="dropout"
    )
    gated_form = match(second, "gated")
    assert (gated_form.act, gated_form.between) == (second.config.hidden_act, "ffn_sub_norm")


def test_a_second_argument_is_refused():
    """A module with an optional second argument could compute something else: refused."""

    class Gate(nn.LayerNorm):
        def forward(self, x, gate=None):
            return super().forward(x if gate is None else x * gate)

    class Masked(Mlp):
        def forward(self, x, mask=None):
            return self.three(F.silu(self.one(x)) * self.two(x))

    for module, name, kernel in [(Gate(4), "gate", "layer_norm"), (Masked(None), "mask", "gated")]:
        assert f"takes `{name}` beside its input" in match(module, kernel).reason


ROWS = {
    "llama": (
        models.llama,
        """model.layers.*.mlp replace_kernel(gated)
        model.layers.*.mlp.{gate_proj,up_proj} shard(col, over=tp)
        model.layers.*.mlp.down_proj shard(row, over=tp)
        model.layers.* checkpoint()
        zero(stage=3, over=dp)""",
        "dp=2, tp=2",
    ),
    "phi3": (
        models.phi3,
        """model.layers.*.mlp replace_kernel(gated)
        model.layers.*.mlp.gate_up_proj shard(col, blocks=2, over=tp)
        model.layers.*.mlp.down_proj shard(row, over=tp)
        model.layers pipeline_split(over=pp)
        pipeline(order="1F1B", micro=2)""",
        "pp=2, tp=2",
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_models_over_ranks(name, pool):
    """SwiGLU, separate and packed, with tensor parallelism, stages, recomputation and sharded
    state."""
    build_model, rows, mesh = ROWS[name]
    plan = make_plan(build_model(layers=2), rows, mesh)
    assert_proven(pool, plan, [models.tokens(rows=6, seed=seed) for seed in (1, 2, 3)])


def test_a_region_compiles_around_it():
    """An unmodified MLP with the kernel compiles as one graph."""
    mlp = models.llama(1).model.layers[0].mlp
    gated_form = match(mlp, "gated")
    assert gated_form == GatedForm("gate_proj", "up_proj", "down_proj", "silu", 24)
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    expected = mlp(x)
    replace(mlp, gated_form)
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
    for y in (mlp(x), compiled(x)):
        assert (y - expected).norm() <= 1e-14 * expected.norm()


def test_what_is_no_gated_mlp_is_told():
    """A plain MLP, and a module without projections, are refused with the reason."""
    message = refusal_text(models.gpt2(1), "transformer.h.0.mlp replace_kernel(gated)")
    assert "S410" in message and "shapes are not those of a gated MLP" in message
    assert "0 projections" in refusal_text(models.llama(1), "model.norm replace_kernel(gated)")


def test_reference_is_what_models_write() -> None:
    """The activations equal those of the same names in transformers."""
    from transformers.activations import ACT2FN

    x: Tensor = torch.linspace(-5, 5, 21, dtype=torch.float64)
    names = {name: name for name in ("silu", "gelu", "relu", "relu2")}
    names["gelu_tanh"] = "gelu_pytorch_tanh"
    for own_name, transformers_name in names.items():
        assert (ACTIVATIONS[own_name](x) - ACT2FN[transformers_name](x)).abs().max() <= 1e-15


def test_one_process_checks_all_until_it_fails():
    """Checks share one process; one that fails in a check is reported and replaced."""
    first = run_kernel_check([CASES[0]], device="cpu")
    (worker,) = _idle.values()
    assert run_kernel_check([CASES[0]], device="cpu") == first
    assert [*_idle.values()] == [worker]
    with pytest.raises(RuntimeError, match=r"check of the kernels failed:\n(.*\n)+.*shape"):
        run_kernel_check([Case(("of", "words"))], device="cpu")
    assert not _idle and worker._process.returncode is not None
    with pytest.raises(RuntimeError, match=r"no answer within 0.001 s"):
        run_kernel_check([CASES[0]], device="cpu", timeout=1e-3)
    assert run_kernel_check([CASES[0]], device="cpu") == first
