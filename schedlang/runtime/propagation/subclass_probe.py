"""Probe of subclasses: does a module compute the same as the class that it inherits from?"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.kernels.probe import bare_copy


def computes_like(module: nn.Module, kind: str) -> bool:
    """Return whether a copy with random values computes a plain Linear, Conv1D or Embedding.

    `kind` is the name of the plain class.  The copy runs in training mode, and may have no
    parameters other than weight and bias.  A module with its own forward may be plain (Falcon's
    linear layers) or not (embeddings that add positions); an embedding that scales its rows is
    plain.  A module is not plain if it cannot be called with one tensor, or has buffers on meta.
    """
    if kind == "EmbeddingBag":
        return False  # a subclass with its own forward
    if any(buffer.is_meta for buffer in module.buffers()):
        return False
    twin = bare_copy(module, torch.float64, 0).train()
    weight, bias = twin._parameters.get("weight"), twin._parameters.get("bias")
    parameter_names = {name for name, _ in twin.named_parameters()}
    if weight is None or weight.ndim != 2 or parameter_names - {"weight", "bias"}:
        return False
    generator = torch.Generator().manual_seed(1)
    if kind == "Embedding":
        trial_input = torch.randint(weight.shape[0], (2, 3), generator=generator)
    else:
        width = weight.shape[1 if kind == "Linear" else 0]
        trial_input = torch.randn(2, 3, width, generator=generator, dtype=torch.float64)
    try:
        with torch.no_grad():
            output = twin(trial_input)
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return False
    expected = _plain(kind, trial_input, weight, bias)
    if kind == "Embedding" and isinstance(output, Tensor) and output.shape == expected.shape:
        expected = expected * (output.norm() / expected.norm())  # scaled by a constant
    return (
        isinstance(output, Tensor)
        and output.shape == expected.shape
        and torch.allclose(output, expected, rtol=1e-10, atol=1e-12)
    )


def _plain(kind: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if kind == "Embedding":
        return F.embedding(x, weight)
    return F.linear(x, weight if kind == "Linear" else weight.t(), bias)
