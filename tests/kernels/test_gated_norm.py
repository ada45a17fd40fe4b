"""Norms with a gate: accuracy, which modules the kernel fits, results in Mamba-2."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.kernels.kernel_device import backend_runs
from schedlang.kernels.norm import Form, reference, reference_backward, reference_forward
from schedlang.kernels.norm_probes import NormForm
from schedlang.kernels.probe import Mismatch
from schedlang.runtime.declined_calls import declined_in
from schedlang.runtime.float64 import Float64
from schedlang.runtime.kernel_injection.kernel import match, replace
from schedlang.runtime.modes import enter_modes
from tests import models
from tests.engine import Threads
from tests.kernels.test_norm_kernels import GATES
from tests.proofs import assert_proven, make_plan


def random_leaves(dtype: torch.dtype, *shape: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, gate = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    weight = (torch.rand(shape[-1], generator=generator) + 0.5).to(dtype)
    return x.requires_grad_(), gate.requires_grad_(), weight.requires_grad_()


class GatedNorm(nn.Module):
    """A norm with a gate, with invented names and a forward that the test gives."""

    def __init__(self, form: Callable[..., Tensor], size: int = 24) -> None:
        super().__init__()
        self.gain, self.form = nn.Parameter(torch.ones(size)), form

    def forward(self, rows: Tensor, lever: Tensor | None = None) -> Tensor:
        return self.form(rows, lever, self.gain)


def rms(x: Tensor, eps: float = 1e-6, groups: int = 1) -> Tensor:
    parts = x.unflatten(-1, (groups, -1))
    return (parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps)).flatten(-2)


def gate_before(x: Tensor, z: Tensor | None, w: Tensor) -> Tensor:
    """Gate before the norm, as Mamba-2, which also allows no gate."""
    value = x.float() if z is None else x.float() * F.silu(z.float())
    return w * rms(value, 3e-5, 4).to(x.dtype)


def gate_after(x: Tensor, z: Tensor, w: Tensor) -> Tensor:
    """Gate by a sigmoid after the norm, with a weight plus one (Qwen3-Next)."""
    normal = (1 + w) * rms(x.float()).to(x.dtype)
    return (normal * torch.sigmoid(z.float())).to(x.dtype)


def rounded_once(x: Tensor, z: Tensor, w: Tensor) -> Tensor:
    """Round once at the end, as Kimi."""
    return (w.float() * rms(x.float()) * F.silu(z.float())).to(x.dtype)


EXPECTED_FORMS = [
    (gate_before, Form(False, 3e-5, 0.0, "early", "silu", True, 4)),
    (gate_after, Form(False, 1e-6, 1.0, "early", "sigmoid", False, 1)),
    (rounded_once, Form(False, 1e-6, 0.0, "late", "silu", False, 1)),
]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("form", "told"), EXPECTED_FORMS)
def test_names_every_form(form: Callable[..., Tensor], told: Form, device: str) -> None:
    """The gate, its place and its groups are found by what the module computes."""
    with torch.device(device):
        module = GatedNorm(form)
    assert match(module, "rms_norm") == NormForm(24, "gain", None, told, ("rows", "lever"))
    mismatch = match(module, "layer_norm")
    assert isinstance(mismatch, Mismatch) and "`replace_kernel(rms_norm)` fits" in mismatch.reason


def unequal_groups(x: Tensor, z: Tensor, w: Tensor) -> Tensor:
    left, right = x[..., :7], x[..., 7:]
    return w * torch.cat([rms(left), rms(right)], -1) * F.silu(z)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (lambda x, z, w: rounded_once(x, 1.702 * z, w), "differs from rms_norm with a gate"),
        (lambda x, z, w: rounded_once(x, z, w) * (1 + 1e-7), "nearest: silu after it"),
        (lambda x, z, w: gate_before(x, 1 + 1e-6 * z, w), "differs"),
        (lambda x, z, w: rounded_once(x, z.detach(), w), "gradients differ"),
        (lambda x, z, w: rounded_once(x, z, w.detach()), "gradients differ"),
        (lambda x, z, w: w * rms(x + z), "differs"),
        (lambda x, z, w: w * rms(x) * F.silu(z), "rounds differently"),
        (lambda x, z, w: w * rms(x.float(), 2.0**-52) * F.silu(z), "depends on the dtype"),
        (lambda x, z, w: w * rms(x.float()).to(x.dtype) * F.silu(z.float()), "rounds differently"),
        (lambda x, z, w: rounded_once(x, z, w.to(x.dtype)).float(), "rounds differently"),
        (unequal_groups, "groups of equal size"),
        (lambda x, z, w: rounded_once(x, z, w).sum(), "does not run"),
        (lambda x, z, w: (x.float() * F.silu(z.float()) * w).to(x.dtype), "differs"),
        (lambda x, z, w: F.layer_norm(x, w.shape, w) * F.silu(z), "differs"),
    ],
)
def test_refuses_what_only_resembles(form: Callable[..., Tensor], said: str) -> None:
    """Another gate, a detached gradient, unequal groups or rounding is refused, with the error."""
    mismatch = match(GatedNorm(form), "rms_norm")
    assert isinstance(mismatch, Mismatch)
    assert "takes `lever` beside its input" in mismatch.reason
    assert said in mismatch.reason
    if "differ" in said and "rounds" not in said:
        assert mismatch.error is not None and mismatch.error > 1e-8


@pytest.mark.parametrize(("form", "told"), EXPECTED_FORMS)
def test_a_module_with_the_kernel_gives_what_it_gave(
    form: Callable[..., Tensor], told: Form
) -> None:
    """Output and gradients, with the gate by position or name, for 2 to 4 dimensions."""
    module, plain = GatedNorm(form).double(), GatedNorm(form).double()
    with torch.no_grad():
        for variant in (module, plain):
            variant.gain.copy_(torch.linspace(0.5, 1.5, 24))
    replace(module, match(module, "rms_norm"))  # type: ignore[arg-type]
    for shape in ((5, 24), (2, 3, 24), (2, 3, 4, 24)):
        x, gate, _ = random_leaves(torch.float64, *shape)
        grad_output = torch.linspace(-1, 1, x.numel(), dtype=torch.float64).view(shape)
        for call in (lambda m: m(x, gate), lambda m: m(lever=gate, rows=x)):  # noqa: B023
            results = [
                [y, *torch.autograd.grad(y, [x, gate, m.gain], grad_output)]
                for m in (module, plain)
                for y in [call(m)]
            ]
            for a, b in zip(*results, strict=True):
                # the module's own casts to float32 stay casts
                assert (a - b).norm() <= 1e-6 * b.norm()
    assert not declined_in(module)


def test_a_call_without_a_gate_is_the_modules_own() -> None:
    """It runs the module's own code and is reported; so is a gate of another shape."""
    module, x = GatedNorm(gate_before), torch.randn(2, 3, 24)
    replace(module, match(module, "rms_norm"))  # type: ignore[arg-type]
    assert torch.equal(module(x), GatedNorm(gate_before)(x))
    gate = torch.randn(3, 24)
    assert torch.equal(module(x, gate), GatedNorm(gate_before)(x, gate))
    (declined,) = declined_in(module)
    assert declined.calls == 2 and "a gate of the shape of the input" in declined.reason


def test_the_references_of_both_ways_agree_on_half_precision() -> None:
    """In bfloat16 the reference's backward equals autograd's within a few roundings."""
    for form in GATES:
        x, gate, weight = random_leaves(torch.bfloat16, 64, 48)
        y = reference(x, weight, None, form, gate)
        grad_output = torch.randn_like(y)
        _, _, rstd = reference_forward(x, gate, weight, None, form)
        dx, dweight, _, dgate = reference_backward(grad_output, x, gate, weight, None, rstd, form)
        for a, b in zip(
            (dx, dgate, dweight),
            torch.autograd.grad(y, (x, gate, weight), grad_output),
            strict=True,
        ):
            assert (a.double() - b.double()).norm() <= 2e-2 * b.double().norm()


MAMBA = """at backbone.layers.*.mixer {
  norm  replace_kernel(rms_norm)
}
"""
SCHEDULES = [
    ("", "backbone.layers.* checkpoint()"),
    ("dp=2", "zero(stage=3, over=dp)"),
    ("pp=2", 'backbone.layers pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)'),
]


def mamba(layers: int = 2) -> nn.Module:
    """Return Mamba-2, unmodified: a gate before the norm of two groups of channels."""
    return models.hf(
        "Mamba2ForCausalLM",
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


def run_model(model: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    """Return logits, loss and every gradient, all in float64."""
    with enter_modes(Float64):
        out: Any = model(**batch)
        out.loss.backward()
    return [out.logits.detach(), out.loss.detach(), *(p.grad for p in model.parameters())]  # type: ignore[misc]


def test_a_model_with_the_kernel_is_the_model() -> None:
    """Mamba-2 with the kernel: the same logits, loss and gradients."""
    model, batch = mamba(), models.tokens(rows=3)
    expected = run_model(copy.deepcopy(model), batch)
    norms = [m for n, m in model.named_modules() if n.endswith("mixer.norm")]
    assert len(norms) == 2
    for gated_norm in norms:
        replace(gated_norm, match(gated_norm, "rms_norm"))  # type: ignore[arg-type]
    runs_before = backend_runs()["reference"]
    for a, b in zip(run_model(model, batch), expected, strict=True):
        assert (a - b).norm() <= 1e-12 * (b.norm() + 1e-3)
    assert backend_runs()["reference"] == runs_before + 4 and not declined_in(model)


@pytest.mark.deep
@pytest.mark.parametrize(("mesh", "rows"), SCHEDULES)
def test_the_whole_proof(threads: Threads, mesh: str, rows: str) -> None:
    """With recomputation, sharding or stages the proof holds."""
    plan = make_plan(mamba(), MAMBA + rows, mesh)
    assert_proven(threads, plan, [models.tokens(rows=4, seed=seed) for seed in (1, 2)])
