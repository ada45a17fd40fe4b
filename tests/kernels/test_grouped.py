"""Experts by grouped products: what the module computes, no row more, alone and spread."""

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
from tests.proofs import planned, proven, refused, static_holds

KERNEL = "layers.*.experts  replace_kernel(grouped)\n"
SPREAD = "layers.*.experts  expert_parallel(over={})\n"
DP = "zero(stage={}, over=dp)\n"
BATCHES = [models.batch(0), models.batch(1, rows=4)]
CASES = {
    "sent": (KERNEL + SPREAD.format("dp") + DP.format(0), "dp=2"),
    "cut inside": (KERNEL + SPREAD.format("dp, inner=tp") + DP.format(0), "dp=2, tp=2"),
    "fetched": (
        KERNEL + SPREAD.format("ep, dispatch=fetch") + DP.format(3),
        "dp=2, tp=2)\nview ep of (dp, tp",
    ),
    "stages": (
        KERNEL + SPREAD.format("dp") + "layers.*  checkpoint()\n"
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
    plan = planned(models.tiny(layers=2 if "pp" in mesh else 1), rows, mesh)
    proven(threads, plan, BATCHES)
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
    """As right as eager products in bfloat16, with a group that has no rows; so are gradients."""
    found = check_case(Case(shape, dtype, across=across), "cpu")
    assert found.backend == backend and all(one.ok for one in found.comparisons)


def test_the_operator_is_whole() -> None:
    """Shapes without values, strides and the backward are what torch expects of an operator."""
    x, weight = (
        torch.randn(*s, dtype=torch.double, requires_grad=True) for s in ((5, 3), (2, 4, 3))
    )
    ends = torch.tensor([0, 5], dtype=torch.int32)
    result = torch.library.opcheck(
        torch.ops.schedlang.grouped_forward.default, (x, weight, ends, True)
    )
    assert set(result.values()) == {"SUCCESS"}
    assert torch.autograd.gradcheck(lambda *two: grouped_product(*two, ends, True), (x, weight))


@pytest.mark.parametrize("across", [False, True])
def test_each_half_of_a_backward_makes_its_own(across: bool) -> None:
    """First the gradient of what experts are given, then that of their weights: a product each."""
    sizes = (3, 5, 4) if across else (3, 4, 5)
    x, weight = (torch.randn(*s, dtype=torch.double, requires_grad=True) for s in ((6, 4), sizes))
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)
    y = grouped_product(x * 1, weight * 1, ends, across).square().sum()
    expected = torch.autograd.grad(y, (x, weight), retain_graph=True)
    for leaf, grad in zip((x, weight), expected, strict=True):
        with FlopCounterMode(display=False) as counted:
            (found,) = torch.autograd.grad(y, leaf, retain_graph=True)
        assert counted.get_total_flops() == 2 * 6 * 4 * 5
        assert torch.equal(found, grad)


@pytest.mark.deep
def test_compiles_as_one_graph() -> None:
    """How many tokens an expert has is not asked for: nothing breaks the graph."""
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


class Form(nn.Module):
    """Experts whose parameters lie, and whose middle is, as a test wants."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], middle: Any) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(4, *shape)))
        self.act, self.middle = nn.Tanh(), middle

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The sum over each token's experts, one after the other."""
        out = torch.zeros_like(x)
        for expert in range(len(self.down)):
            token, slot = torch.where(index == expert)
            y = self.middle(self, x[token], expert)
            out = out.index_add(0, token, y * weights[token, slot, None])
        return out


def _apart(m: Any, x: Tensor, e: int) -> Tensor:
    return (F.gelu(x @ m.one[e].T) * (x @ m.two[e].T)) @ m.down[e].T


def _in_turn(m: Any, x: Tensor, e: int) -> Tensor:
    both = x @ m.up[e] + m.bias[e]
    return (F.silu(both[:, ::2]) * both[:, 1::2]) @ m.down[e]


def _plain(m: Any, x: Tensor, e: int) -> Tensor:
    return m.act(F.linear(x, m.up[e])) @ m.down[e]


def _squared(m: Any, x: Tensor, e: int) -> Tensor:
    return F.linear(x, m.up[e]).square() @ m.down[e]


FORMS = {
    "apart": (
        dict(one=(10, 6), two=(10, 6), down=(6, 10)),
        _apart,
        GroupedForm(
            (ExpertMatrix("one", None, True), ExpertMatrix("two", None, True)),
            ExpertActivation("gelu", "apart"),
            ExpertMatrix("down", None, True),
            (4, 6, 10),
        ),
    ),
    "in turn": (
        dict(up=(6, 20), bias=(20,), down=(10, 6)),
        _in_turn,
        GroupedForm(
            (ExpertMatrix("up", "bias", False),),
            ExpertActivation("silu", "in turn"),
            ExpertMatrix("down", None, False),
            (4, 6, 20),
        ),
    ),
    "plain": (
        dict(up=(10, 6), down=(10, 6)),
        _plain,
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
    """Which parameter is what, how it lies and what stands between: by trying, on meta too."""
    shapes, middle, expected = FORMS[name]
    module = Form(shapes, middle)
    assert match(module, "grouped") == expected
    assert match(module.to("meta"), "grouped") == expected


def test_what_is_no_such_module_is_refused() -> None:
    """A middle that no form has is measured; what is not a module of experts says why."""
    found = match(Form(dict(up=(10, 6), down=(10, 6)), _squared), "grouped")
    assert isinstance(found, Mismatch) and "differs from experts" in found.reason
    assert found.error is not None and found.error > 1e-3
    said = refused(models.tiny(layers=1), "layers.*.router  replace_kernel(grouped)")
    assert "S410" in said and "dim 0 counts the experts" in said
    module = models.Experts().double()
    replace(module, match(module, "grouped"))
    with pytest.raises(Refusal, match="S821|called with 2 arguments"):
        module(torch.zeros(2, 6), torch.zeros(2, 1).long())


def _results(model: nn.Module, batch: Any) -> tuple[dict[str, Tensor], int]:
    model.zero_grad()
    with FlopCounterMode(display=False) as flops, enter_modes(Float64):
        model(**batch)["loss"].backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}, (
        flops.get_total_flops()
    )


def test_no_row_is_padded() -> None:
    """As many multiplications as one expert after the other, forward and backward."""
    model, batch = models.tiny(layers=1), models.batch(0)
    plain, counted = _results(copy.deepcopy(model), batch)
    experts = model.layers[0].experts  # type: ignore[union-attr, index]
    replace(experts, match(experts, "grouped"))
    before = backend_runs().get("reference", 0)
    found, again = _results(model, batch)
    assert backend_runs()["reference"] == before + 6  # two products and a gate, both ways
    assert again == counted
    for name, grad in plain.items():
        assert (found[name] - grad).norm() <= 1e-12 * (grad.norm() + 1e-3), name


@pytest.mark.parametrize("kind", ["Mixtral", "GptOss"])
def test_experts_of_transformers(kind: str) -> None:
    """Its unmodified modules, whichever way they compute: with and without biases, and in turn."""
    pytest.importorskip("transformers")
    model, batch = models.transformers_model(kind, num_local_experts=4, head_dim=4)
    plain, _ = _results(copy.deepcopy(model), batch)
    experts = [m for m in model.modules() if type(m).__name__.endswith("Experts")]
    assert len(experts) == 2
    for module in experts:
        replace(module, match(module, "grouped"))
    found, _ = _results(model, batch)
    assert found.keys() == plain.keys()
    for name, grad in plain.items():
        assert (found[name] - grad).norm() <= 1e-12 * (grad.norm() + 1e-3), name
