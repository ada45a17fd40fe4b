"""Probing norms: their form is found by what they compute; mismatches give the error."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from schedlang.kernels.norm import Form
from schedlang.kernels.norm_probes import NormForm, probe_norm
from schedlang.kernels.probe import Mismatch, bare_copy
from schedlang.runtime.float64 import Float64
from schedlang.runtime.kernel_injection.kernel import match
from schedlang.runtime.modes import enter_modes


class CustomNorm(nn.Module):
    """An RMSNorm with invented names and a forward that the test gives."""

    def __init__(self, size, form):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(size))
        self.form = form

    def forward(self, rows):
        return self.form(rows, self.gain)


def inverse_rms(x, eps=1e-6, size=None):
    return (x.square().sum(-1, keepdim=True) / (size or x.shape[-1]) + eps).rsqrt()


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("form", "offset", "eps", "rounding"),
    [
        (lambda x, w: w * (x.float() * inverse_rms(x.float())).to(x.dtype), 0.0, 1e-6, "early"),
        (
            lambda x, w: (x.float() * inverse_rms(x.float(), 3e-5) * w.float()).to(x.dtype),
            0.0,
            3e-5,
            "late",
        ),
        (
            lambda x, w: (x.float() * inverse_rms(x.float()) * (1 + w.float())).to(x.dtype),
            1.0,
            1e-6,
            "late",
        ),
        (lambda x, w: torch.rms_norm(x, w.shape, w), 0.0, None, "late"),
    ],
)
def test_names_every_form(form, offset, eps, rounding, device):
    """Offset, eps and rounding order are found by behaviour, with or without real parameters."""
    with torch.device(device):
        module = CustomNorm(24, form)
    assert probe_norm(module) == NormForm(24, "gain", None, Form(False, eps, offset, rounding))


def test_layer_norm():
    """LayerNorm is distinguished from RMSNorm; its bias is found."""
    norm_form = probe_norm(nn.LayerNorm(12, eps=1e-12))
    assert norm_form == NormForm(12, "weight", "bias", Form(True, 1e-12))
    assert probe_norm(nn.LayerNorm(12, bias=False)).bias is None


@pytest.mark.parametrize(
    ("form", "offset", "rounding"),
    [
        (lambda x, w: (normalized(x.float()) * w.float()).to(x.dtype), 0.0, "late"),
        (lambda x, w: normalized(x.float()).to(x.dtype) * w, 0.0, "early"),
        (lambda x, w: nn.functional.layer_norm(x, w.shape, w + 1, None, 1e-5), 1.0, "late"),
    ],
)
def test_names_every_form_of_a_layer_norm(form, offset, rounding):
    """Cohere's without a bias, one that rounds before the weight, Nemotron's with weight plus
    one."""
    expected = NormForm(24, "gain", None, Form(True, 1e-5, offset, rounding))
    assert probe_norm(CustomNorm(24, form)) == expected


def normalized(x):
    """Return the input with mean zero and deviation one."""
    x = x - x.mean(-1, keepdim=True)
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (lambda x, w: x * inverse_rms(x, size=x.shape[-1] - 1) * w, "differs from rms_norm"),
        (lambda x, w: x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-3) * w, "differs"),
        (lambda x, w: x * inverse_rms(x).detach() * w, "gradients differ"),
        (lambda x, w: x * inverse_rms(x) * w.detach(), "gradients differ"),
        (lambda x, w: (x * inverse_rms(x) * w).sum(), "does not run"),
        (lambda x, w: torch.tanh(x) * w, "differs"),
        (lambda x, w: x * inverse_rms(x) * w, "rounds differently"),
    ],
)
def test_refuses_what_only_resembles(form, said):
    """A wrong divisor, a foreign eps, a detached gradient or other rounding is a mismatch."""
    mismatch = probe_norm(CustomNorm(24, form))
    assert isinstance(mismatch, Mismatch)
    assert said in mismatch.reason
    if "differ" in said and "rounds" not in said:
        assert mismatch.error > 1e-5


def test_refuses_by_structure():
    """Modules that cannot be norms are refused with what they have."""
    for module, reason in [
        (nn.Linear(3, 3), "parameters weight (3, 3)"),
        (nn.BatchNorm1d(3), "buffers"),
        (nn.Sequential(nn.LayerNorm(3)), "submodules"),
        (nn.GELU(), "differs from"),
    ]:
        assert reason in probe_norm(module).reason


def test_norms_without_a_weight():
    """Norms without parameters are found; other modules without parameters are not."""
    for module, kind, size in [
        (nn.RMSNorm(12, eps=1e-6, elementwise_affine=False), "rms_norm", 12),
        (nn.LayerNorm(12, eps=1e-6, elementwise_affine=False), "layer_norm", 12),
        (WeightlessNorm(), "rms_norm", 24),
    ]:
        norm_form = probe_norm(module)
        assert (norm_form.kind, norm_form.size, norm_form.weight, norm_form.bias) == (
            kind,
            size,
            None,
            None,
        )
        assert norm_form.form.offset == 0.0 and norm_form.form.eps == 1e-6
    assert "does not run" in probe_norm(nn.LayerNorm((3, 4), elementwise_affine=False)).reason


class WeightlessNorm(nn.Module):
    """An RMSNorm without a weight, for rows of any size."""

    def forward(self, x):
        return (x.float() * inverse_rms(x.float(), 1e-6)).to(x.dtype)


@pytest.mark.parametrize("shape", [(1200, 4096), (4096, 1200), (3, 1400, 1100)])
def test_wide_weights_have_no_two_rows_or_columns_alike(shape):
    """Numbers in wide weights repeat, but no two rows, columns or matrices are equal, and all are
    in range; narrow weights have distinct numbers."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.empty(shape, device="meta"))
    weight = bare_copy(module, torch.float64, spread=lambda _: 2.0).weight.detach()
    assert weight.shape == shape and weight.dtype == torch.float64
    assert -1.0 <= float(weight.min()) < -0.999 and 0.999 < float(weight.max()) <= 1.0
    rows, columns = weight.flatten(0, -2)[:, :3], weight.flatten(0, -2)[:3].mT
    for vectors in (rows, columns):
        assert len(vectors.unique(dim=0)) == len(vectors)
    assert len(bare_copy(nn.Linear(40, 50), torch.float64).weight.unique()) > 1990


def test_leaves_no_trace():
    """Hooks do not run; random state, parameters, gradients and the training flag stay."""
    module = nn.RMSNorm(8, eps=1e-6)
    module.register_forward_hook(lambda *_: pytest.fail("a hook ran"))
    state, before = torch.get_rng_state(), module.weight.clone()
    assert isinstance(probe_norm(module), NormForm)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(module.weight, before) and module.weight.grad is None
    assert module.training


def test_the_modes_of_a_proof_change_nothing():
    """Under the float64 mode, or with meta as default device, the rounding order is still found."""
    norm = CustomNorm(24, lambda x, w: normalized(x.float()).to(x.dtype) * w)
    with enter_modes(Float64()), torch.device("meta"):
        norm_form = match(norm, "layer_norm")
        assert torch.ones(1).is_meta and torch.get_default_dtype() == torch.float64
    assert isinstance(norm_form, NormForm) and norm_form.form.rounding == "early"
    assert torch.get_default_dtype() == torch.float32


def test_transformers_norms():
    """The norms of Llama and Gemma, which are in no list, are found on the meta device."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    gemma = pytest.importorskip("transformers.models.gemma.modeling_gemma")
    with torch.device("meta"):
        first, second = llama.LlamaRMSNorm(16, eps=1e-5), gemma.GemmaRMSNorm(16)
    assert probe_norm(first) == NormForm(16, "weight", None, Form(False, 1e-5, rounding="early"))
    assert probe_norm(second) == NormForm(16, "weight", None, Form(offset=1.0))
