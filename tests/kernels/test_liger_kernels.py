"""Kernels of liger_kernel: the same norm, never in place, or a refusal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from schedlang.kernels import liger
from schedlang.kernels.check import check_case
from schedlang.kernels.kernel_device import backend_runs
from schedlang.kernels.probe import Mismatch
from schedlang.runtime.kernel_injection.kernel import cases_of, match, replace
from tests import models
from tests.kernels.kernels_in_use import kernels_of
from tests.proofs import assert_proven, make_plan, refusal_text


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Provide a fake `liger_kernel` with the published functions; remove it afterwards."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "fakes")
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "liger_kernel"]:
        del sys.modules[name]


def test_a_package_that_is_not_installed() -> None:
    """The refusal says what to install, and which kernel of schedlang needs no package."""
    message = refusal_text(models.llama(1), "model.norm replace_kernel(liger.rms_norm)")
    assert "S876" in message and "`pip install liger-kernel`" in message
    assert "`replace_kernel(rms_norm)`" in message


def test_the_library_is_called_where_it_runs(fake: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's function computes the norm, with its offset, eps and rounding."""
    monkeypatch.setattr(liger, "runs_liger", lambda x, weight: True)
    for module, kernel in [
        (nn.RMSNorm(12, eps=1e-5), "liger.rms_norm"),
        (nn.LayerNorm(12), "liger.layer_norm"),
    ]:
        norm_form = match(module, kernel)
        x = torch.randn(3, 12, requires_grad=True)
        expected = module(x)
        (grad,) = torch.autograd.grad(expected.square().sum(), x)
        runs_before = backend_runs().get("liger", 0)
        replace(module, norm_form)
        assert kernels_of(module) == (kernel,)
        y = module(x)
        assert backend_runs()["liger"] == runs_before + 1
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(torch.autograd.grad(y.square().sum(), x)[0], grad)
        checks = [check_case(case, "cpu") for case in cases_of(norm_form)]
        assert checks and all(c.backend == "liger" and c.ok for c in checks)


def test_what_the_library_computes_otherwise_is_refused() -> None:
    """Another norm, and norms without a bias or weight, each with the reason."""
    for module, kernel, reason in [
        (nn.LayerNorm(8), "liger.rms_norm", "is a layer_norm"),
        (nn.LayerNorm(8, bias=False), "liger.layer_norm", "has no bias"),
        (nn.RMSNorm(8, eps=1e-6, elementwise_affine=False), "liger.rms_norm", "has no weight"),
        (nn.Linear(8, 8), "liger.rms_norm", "has the parameters"),
    ]:
        mismatch = match(module, kernel)
        assert isinstance(mismatch, Mismatch) and reason in mismatch.reason


def test_the_whole_proof(fake: None, threads: Any) -> None:
    """In float64 on a CPU the reference runs: outputs, gradients and three steps are equal."""
    rows = "model.layers.*.input_layernorm replace_kernel(liger.rms_norm)\nzero(stage=0, over=dp)"
    plan = make_plan(models.llama(1), rows, "dp=2")
    assert_proven(threads, plan, [models.tokens(rows=4, seed=seed) for seed in (1, 2)])
    norm_form = match(nn.RMSNorm(8, eps=1e-6), "liger.rms_norm")
    assert check_case(cases_of(norm_form)[0], "cpu").backend == "reference"  # counted as not run
