"""Kernels of installed libraries: the same norm, or a refusal; never in place."""

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
from tests.kernels.looking import kernels_of
from tests.proofs import planned, proven, refused


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package of that name, with its published functions; not there any more afterwards."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "fakes")
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "liger_kernel"]:
        del sys.modules[name]


def test_a_package_that_is_not_installed() -> None:
    """The refusal says what to install, and which kernel of ours does without."""
    said = refused(models.llama(1), "model.norm replace_kernel(liger.rms_norm)")
    assert "S876" in said and "`pip install liger-kernel`" in said
    assert "`replace_kernel(rms_norm)`" in said


def test_the_library_is_called_where_it_runs(fake: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its function computes the module, with its offset, eps and rounding; hooks and names stay."""
    monkeypatch.setattr(liger, "runs_liger", lambda x, weight: True)
    for module, kernel in [
        (nn.RMSNorm(12, eps=1e-5), "liger.rms_norm"),
        (nn.LayerNorm(12), "liger.layer_norm"),
    ]:
        found = match(module, kernel)
        x = torch.randn(3, 12, requires_grad=True)
        expected = module(x)
        (grad,) = torch.autograd.grad(expected.square().sum(), x)
        before = backend_runs().get("liger", 0)
        replace(module, found)
        assert kernels_of(module) == (kernel,)
        y = module(x)
        assert backend_runs()["liger"] == before + 1
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(torch.autograd.grad(y.square().sum(), x)[0], grad)
        checks = [check_case(case, "cpu") for case in cases_of(found)]
        assert checks and all(c.backend == "liger" and c.ok for c in checks)


def test_what_the_library_computes_otherwise_is_refused() -> None:
    """Another norm, one without a bias or weight: each by its reason."""
    for module, kernel, said in [
        (nn.LayerNorm(8), "liger.rms_norm", "is a layer_norm"),
        (nn.LayerNorm(8, bias=False), "liger.layer_norm", "has no bias"),
        (nn.RMSNorm(8, eps=1e-6, elementwise_affine=False), "liger.rms_norm", "has no weight"),
        (nn.Linear(8, 8), "liger.rms_norm", "has the parameters"),
    ]:
        found = match(module, kernel)
        assert isinstance(found, Mismatch) and said in found.reason


def test_the_whole_proof(fake: None, threads: Any) -> None:
    """In float64, and on a CPU, the norm is its reference: outputs, gradients, three steps."""
    rows = "model.layers.*.input_layernorm replace_kernel(liger.rms_norm)\nzero(stage=0, over=dp)"
    plan = planned(models.llama(1), rows, "dp=2")
    proven(threads, plan, [models.tokens(rows=4, seed=seed) for seed in (1, 2)])
    found = match(nn.RMSNorm(8, eps=1e-6), "liger.rms_norm")
    assert check_case(cases_of(found)[0], "cpu").backend == "reference"  # counted as not run
