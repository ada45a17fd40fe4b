"""A fake `liger_kernel` for tests on a CPU: two norms with its arguments, by plain operations."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def liger_rms_norm(
    X: Tensor,
    W: Tensor,
    eps: float,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = True,
) -> Tensor:
    """Compute an RMSNorm; `in_place` must be off, since it would overwrite the gradient."""
    assert not in_place
    x = X.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if casting_mode == "llama":
        return x.to(X.dtype) * (offset + W)
    assert casting_mode == "gemma"
    return (x * (offset + W.float())).to(X.dtype)


def liger_layer_norm(X: Tensor, W: Tensor, B: Tensor, eps: float) -> Tensor:
    """Compute torch's layer norm."""
    return F.layer_norm(X, W.shape, W, B, eps)
