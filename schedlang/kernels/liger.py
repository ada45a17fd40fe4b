"""Norms by the kernels of the package liger_kernel, where it is installed and can run.

Its functions are called as they are published (Hsu et al., "Liger Kernel", 2024), never in place:
by default it writes the gradient of a norm's input over that of its result, which another module
may still read.  Its gated activations write over what forward saved and cannot be told not to, so
that a second backward would be wrong: they are not offered.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor

from schedlang.kernels import layer_norm as layers
from schedlang.kernels import rms_norm as roots
from schedlang.kernels.device import note, on_gpu, triton

_CASTING = {"early": "llama", "late": "gemma"}  # its words for where it rounds


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, rounding: str) -> Tensor:
    """RMSNorm over the last dim, as `kernels.rms_norm` means its arguments."""
    if not runs_liger(x, weight):
        note("reference")
        return roots.reference(x, weight, eps, offset, rounding)
    note("liger")
    call = _functional().liger_rms_norm
    y: Tensor = call(x, weight, eps, offset=offset, casting_mode=_CASTING[rounding], in_place=False)
    return y


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm over the last dim, computed in float32 and rounded once."""
    if not runs_liger(x, weight):
        note("reference")
        return layers.reference(x, weight, bias, eps)
    note("liger")
    y: Tensor = _functional().liger_layer_norm(x, weight, bias, eps)
    return y


def runs_liger(x: Tensor, weight: Tensor) -> bool:
    """Whether its kernels take these tensors: on a GPU, in float32 and below."""
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    return on_gpu(x) and triton is not None and x.dtype in kinds and weight.dtype in kinds


def _functional() -> Any:
    return import_module("liger_kernel.transformers.functional")


@dataclass(frozen=True)
class _Rms(roots.Case):
    kernel: ClassVar[str] = "liger"

    def run(self, given: dict[str, Tensor], kernel: bool) -> Tensor:
        call = rms_norm if kernel else roots.reference
        return call(given["input"], given["weight"], self.eps, self.offset, self.rounding)


@dataclass(frozen=True)
class _Layer(layers.Case):
    kernel: ClassVar[str] = "liger"

    def run(self, given: dict[str, Tensor], kernel: bool) -> Tensor:
        call = layer_norm if kernel else layers.reference
        return call(given["input"], given["weight"], given["bias"], self.eps)


def Case(**fields: Any) -> _Rms | _Layer:  # noqa: N802
    """One norm to run: of layers where `bias` is said, else of roots."""
    return _Layer(**fields) if "bias" in fields else _Rms(**fields)
