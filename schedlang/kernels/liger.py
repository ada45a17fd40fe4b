"""Norms by the kernels of the package liger_kernel, if it is installed and can run.

Its functions are called as published (Hsu et al., "Liger Kernel", 2024), but never in place: by
default the library writes the gradient of a norm's input over the gradient of its result, which
another module may still read. Its gated activations overwrite tensors that forward saved, without
an option against it, so a second backward would be wrong: they are not offered.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor

from schedlang.kernels import norm as norms
from schedlang.kernels.kernel_device import compute_dtype, count_run, on_gpu, triton

_CASTING = {"early": "llama", "late": "gemma"}  # the library's names for the order of rounding


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, form: norms.Form) -> Tensor:
    """Compute `kernels.norm.norm`; a LayerNorm has a bias, no offset, and rounds late."""
    if not runs_liger(x, weight):
        count_run("reference")
        return norms.reference(x, weight, bias, form)
    count_run("liger")
    functional: Any = import_module("liger_kernel.transformers.functional")
    eps = torch.finfo(compute_dtype(x, weight)).eps if form.eps is None else form.eps
    if form.centred:
        y: Tensor = functional.liger_layer_norm(x, weight, bias, eps)
        return y
    options = {"offset": form.offset, "casting_mode": _CASTING[form.rounding], "in_place": False}
    y = functional.liger_rms_norm(x, weight, eps, **options)
    return y


def runs_liger(x: Tensor, weight: Tensor) -> bool:
    """Return whether its kernels support these tensors: on a GPU, in float32 or a narrower
    dtype."""
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    return on_gpu(x) and triton is not None and x.dtype in kinds and weight.dtype in kinds


@dataclass(frozen=True)
class Case(norms.Case):
    """A test case of a norm, like those of our own kernel."""

    kernel: ClassVar[str] = "liger"

    def run(self, tensors: dict[str, Tensor], kernel: bool) -> Tensor:
        """Run the library's kernel, or the reference."""
        call = norm if kernel else norms.reference
        return call(tensors["input"], tensors["weight"], tensors.get("bias"), self.form)
