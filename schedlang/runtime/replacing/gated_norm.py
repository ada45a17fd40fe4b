"""A norm that is called with a gate: both by one kernel, from the module's own weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from schedlang.kernels.gated_norm import LONGEST, gated_norm
from schedlang.kernels.gated_norms import GatedNorm
from schedlang.runtime.left import leave


class GatedNormed:
    """The layer that computes a norm and its gate; a call without a gate is the module's own."""

    kernel = "rms_norm"

    def __init__(self, module: nn.Module, norm: GatedNorm) -> None:
        self.module, self.norm = module, norm

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute both, where the gate has the shape of the input."""
        norm, module = self.norm, self.module
        x, gate = _given(norm.inputs, args, kwargs)
        if not isinstance(x, Tensor) or not isinstance(gate, Tensor) or x.shape != gate.shape:
            leave(module, self.kernel, "it needs a gate of the shape of the input", x=x, gate=gate)
            return inner(*args, **kwargs)
        if x.shape[-1] > LONGEST * norm.form.groups:
            leave(module, self.kernel, f"with a gate its rows have at most {LONGEST} elements", x=x)
        weight = x.new_ones(norm.size) if norm.weight is None else getattr(module, norm.weight)
        return gated_norm(x, gate, weight, norm.form)


def _given(names: tuple[str, str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """What a call gives for the two names; None where it gives nothing, or more."""
    given = dict(zip(names, args)) | kwargs
    known = len(args) <= len(names) and given.keys() <= set(names)
    return [given.get(name) if known else None for name in names]
