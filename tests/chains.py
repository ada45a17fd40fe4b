"""Chains of pointwise operators and row reductions, as models contain them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def _rms_norm(x: Tensor, w: Tensor) -> Tensor:
    x_float = x.float()
    return w * (x_float * torch.rsqrt(x_float.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


Chains = dict[str, tuple[Callable[..., Any], tuple[str, ...]]]
CHAINS: Chains = {  # "m": rows of numbers, "n": one row
    "rmsnorm": (_rms_norm, ("m", "n")),
    "add_rmsnorm": (lambda x, r, w: (x + r, _rms_norm(x + r, w)), ("m", "m", "n")),
    "bias_gelu": (lambda x, b: F.gelu(x + b, approximate="tanh"), ("m", "n")),
    "swiglu": (lambda a, b: F.silu(a) * b, ("m", "m")),
    "geglu": (lambda a, b: F.gelu(a) * b, ("m", "m")),
    "softmax": (lambda x: torch.softmax(x, -1), ("m",)),
    "log_softmax": (lambda x, b: torch.log_softmax(x * 0.3 + b, -1), ("m", "n")),
    "layernorm": (lambda x, r, w, b: r + F.layer_norm(x, x.shape[-1:], w, b), ("m", "m", "n", "n")),
}
