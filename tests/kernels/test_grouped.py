"""The kernel `grouped` for experts: results, which modules it fits, expert parallelism."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.kernels.check import check_case
from schedlang.kernels.grouped import Case, grouped_product
from schedlang.kernels.kernel_device import backend_runs
from schedlang.kernels.probe import Mismatch
from schedlang.runtime.float64 import Float64
from schedlang.runtime.kernel_injection.expert_kernel import (
    ExpertActivation,
    ExpertMatrix,
    GroupedForm,
)
from schedlang.runtime.kernel_injection.kernel import match, replace
from schedlang.runtime.modes import enter_modes
from tests import expert_models as models
from tests.proofs import assert_proven, make_plan, refusal_text, static_holds

KERNEL = "layers.*.experts  replace_kernel(grouped)\n"
EXPERT_PARALLEL = "layers.*.experts  expert_parallel(over={})\n"
DP = "zero(stage={}, over=dp)\n"
BATCHES = [models.batch(0), models.batch(1, rows=4)]
CASES = {
    "sent": (KERNEL + EXPERT_PARALLEL.format("dp") + DP.format(0), "dp=2"),
    "cut inside": (KERNEL + EXPERT_PARALLEL.format("dp, inner=tp") + DP.format(0), "dp=2, tp=2"),
    "fetched": (
        KERNEL + EXPERT_PARALLEL.format("ep, dispatch=fetch") + DP.format(3),
        "dp=2, tp=2)\nview ep of (dp, tp",
    ),
    "stages": (
        KERNEL + EXPERT_PARALLEL.format("dp") + "layers.*  checkpoint()\n"
        "layers  pipeline_split(over=pp)\n" + DP.format(0) + 'pipeline(order="1F1B", micro=2)',
        "dp=2, pp=2",
    ),
}


@pytest.mark.parametrize(
    "name", [c if c == "sent" else pytest.param(c, marks=pytest.mark.deep) for c in CASES]
)
def test_every_way_equals_the_original(name: str, threads: Any) -> None:
    """Outputs, losses, gradients and three steps agree in float64; static proofs hold."""
    rows, mesh = CASES[name]
    plan = make_plan(models.tiny_model(layers=2 if "pp" in mesh else 1), rows, mesh)
    assert_proven(threads, plan, BATCHES)
    static_holds(plan, BATCHES[0])


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize(
    ("dtype", "shape", "backend"),
    [
        ("bfloat16", (25, 24), "torch"),
        ("bfloat16", (7, 12), "reference"),
        ("float32", (24, 32), "reference"),
    ],
)
def test_the_product_itself(across: bool, dtype: str, shape: Any, backend: str) -> None:
    """As accurate as eager products, with an empty group too; and gradients."""
    result = check_case(Case(shape, dtype, across=across), "cpu")
    assert result.backend == backend and all(comparison.ok for comparison in result.comparisons)


def test_the_operator_is_whole() -> None:
    """The operator passes opcheck (shapes, strides, backward) and gradcheck."""
    x, weight = (
        torch.randn(*s, dtype=torch.double, requires_grad=True) for s in ((5, 3), (2, 4, 3))
    )
    ends = torch.tensor([0, 5], dtype=torch.int32)
    result = torch.library.opcheck(
        torch.ops.schedlang.grouped_forward.default, (x, weight, ends, True)
    )
    assert set(result.values()) == {"SUCCESS"}
    assert torch.autograd.gradcheck(
        lambda *tensors: grouped_product(*tensors, ends, True), (x, weight)
    )


@pytest.mark.parametrize("across", [False, True])
def test_each_half_of_a_backward_makes_its_own(across: bool) -> None:
    """First the input's gradient, then the weights': one product each."""
    sizes = (3, 5, 4) if across else (3, 4, 5)
    x, weight = (torch.randn(*s, dtype=torch.double, requires_grad=True) for s in ((6, 4), sizes))
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)
    y = grouped_product(x * 1, weight * 1, ends, across).square().sum()
    expected = torch.autograd.grad(y, (x, weight), retain_graph=True)
    for leaf, grad in zip((x, weight), expected, strict=True):
        with FlopCounterMode(display=False) as counter:
            (actual,) = torch.autograd.grad(y, leaf, retain_graph=True)
        assert counter.get_total_flops() == 2 * 6 * 4 * 5
        assert torch.equal(actual, grad)


@pytest.mark.deep
def test_compiles_as_one_graph() -> None:
    """Token counts of experts are not read on the host: no graph break."""
    module = models.Experts()
    replace(module, match(module, "grouped"))
    x, index = torch.randn(12, 6), torch.arange(24).view(12, 2) % 4
    weights = torch.rand(12, 2)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    leaves = [x.requires_grad_(), *module.parameters()]
    pairs = [
        torch.autograd.grad(call(x, index, weights).square().sum(), leaves)
        for call in (module, compiled)
    ]
    for a, b in zip(*pairs, strict=True):
        torch.testing.assert_close(a, b)


class CustomExperts(nn.Module):
    """Experts with parameter shapes and a middle that the test gives."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], middle: Any) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(4, *shape)))
        self.act, self.middle = nn.Tanh(), middle

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the sum over each token's experts, one after the other."""
        out = torch.zeros_like(x)
        for expert in range(len(self.down)):
            token, slot = torch.where(index == expert)
            y = self.middle(self, x[token], expert)
            out = out.index_add(0, token, y * weights[token, slot, None])
        return out


def _two_projections(m: Any, x: Tensor, e: int) -> Tensor:
    return (F.gelu(x @ m.one[e].T) * (x @ m.two[e].T)) @ m.down[e].T


def _interleaved(m: Any, x: Tensor, e: int) -> Tensor:
    packed = x @ m.up[e] + m.bias[e]
    return (F.silu(packed[:, ::2]) * packed[:, 1::2]) @ m.down[e]


def _ungated(m: Any, x: Tensor, e: int) -> Tensor:
    return m.act(F.linear(x, m.up[e])) @ m.down[e]


def _squared(m: Any, x: Tensor, e: int) -> Tensor:
    return F.linear(x, m.up[e]).square() @ m.down[e]


FORMS = {
    "apart": (
        dict(one=(10, 6), two=(10, 6), down=(6, 10)),
        _two_projections,
        GroupedForm(
            (ExpertMatrix("one", None, True), ExpertMatrix("two", None, True)),
            ExpertActivation("gelu", "apart"),
            ExpertMatrix("down", None, True),
            (4, 6, 10),
        ),
    ),
    "in turn": (
        dict(up=(6, 20), bias=(20,), down=(10, 6)),
        _interleaved,
        GroupedForm(
            (ExpertMatrix("up", "bias", False),),
            ExpertActivation("silu", "in turn"),
            ExpertMatrix("down", None, False),
            (4, 6, 20),
        ),
    ),
    "plain": (
        dict(up=(10, 6), down=(10, 6)),
        _ungated,
        GroupedForm(
            (ExpertMatrix("up", None, True),),
            ExpertActivation("act", "", True),
            ExpertMatrix("down", None, False),
            (4, 6, 10),
        ),
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_told(name: str) -> None:
    """Parameters, their layout and the activation are found by probing, on meta too."""
    shapes, middle, expected = FORMS[name]
    module = CustomExperts(shapes, middle)
    assert match(module, "grouped") == expected
    assert match(module.to("meta"), "grouped") == expected


def test_what_is_no_such_module_is_refused() -> None:
    """Another middle is refused with its error; a module without experts with the reason."""
    mismatch = match(CustomExperts(dict(up=(10, 6), down=(10, 6)), _squared), "grouped")
    assert isinstance(mismatch, Mismatch) and "differs from experts" in mismatch.reason
    assert mismatch.error is not None and mismatch.error > 1e-3
    message = refusal_text(models.tiny_model(layers=1), "layers.*.router  replace_kernel(grouped)")
    assert "S410" in message and "dim 0 counts the experts" in message
    module = models.Experts().double()
    replace(module, match(module, "grouped"))
    with pytest.raises(Refusal, match="S821|called with 2 arguments"):
        module(torch.zeros(2, 6), torch.zeros(2, 1).long())


def _gradients_and_flops(model: nn.Module, batch: Any) -> tuple[dict[str, Tensor], int]:
    model.zero_grad()
    with FlopCounterMode(display=False) as flops, enter_modes(Float64):
        model(**batch)["loss"].backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}, (
        flops.get_total_flops()
    )


def test_no_row_is_padded() -> None:
    """As many FLOPs as one expert after the other, forward and backward."""
    model, batch = models.tiny_model(layers=1), models.batch(0)
    expected, expected_flops = _gradients_and_flops(copy.deepcopy(model), batch)
    experts = model.layers[0].experts  # type: ignore[union-attr, index]
    replace(experts, match(experts, "grouped"))
    runs_before = backend_runs().get("reference", 0)
    actual, flops = _gradients_and_flops(model, batch)
    assert backend_runs()["reference"] == runs_before + 6  # two products and a gate, both ways
    assert flops == expected_flops
    for name, grad in expected.items():
        assert (actual[name] - grad).norm() <= 1e-12 * (grad.norm() + 1e-3), name


@pytest.mark.parametrize("kind", ["Mixtral", "GptOss"])
def test_experts_of_transformers(kind: str) -> None:
    """Unmodified experts of transformers, with and without biases, separate and interleaved."""
    pytest.importorskip("transformers")
    model, batch = models.transformers_model(kind, num_local_experts=4, head_dim=4)
    expected, _ = _gradients_and_flops(copy.deepcopy(model), batch)
    experts = [m for m in model.modules() if type(m).__name__.endswith("Experts")]
    assert len(experts) == 2
    for module in experts:
        replace(module, match(module, "grouped"))
    actual, _ = _gradients_and_flops(model, batch)
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        assert (actual[name] - grad).norm() <= 1e-12 * (grad.norm() + 1e-3), name
