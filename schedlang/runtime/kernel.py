"""Replace what a module computes between its parameters; parameters, names and hooks stay.

`match` judges a module by running a bare float64 copy of it and touches nothing; `replace` acts on
a built module.  Two kernels: `rms_norm`, ours, and `sdpa`, torch's fused attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from schedlang.diagnostic import Diagnostic, Refusal
from schedlang.kernels.probe import Mismatch, Norm, probe_norm
from schedlang.kernels.rms_norm import rms_norm
from schedlang.runtime.attention import (
    Attention,
    Call,
    is_fused,
    match_attention,
    replace_attention,
)
from schedlang.runtime.forward import layers_of, wrap

KERNELS = ("rms_norm", "sdpa")


def match(module: nn.Module, kernel: str, call: Call | None = None) -> Norm | Attention | Mismatch:
    """Whether `kernel` (of KERNELS) computes what `module` does, or the measured reason why not.

    `call` is one example of the module's arguments, of any device or dtype; only shapes and integer
    values are used.  Without it an attention is called by the common names of its parameters.  The
    module may lie on the meta device.
    """
    assert kernel in KERNELS, kernel
    if kernel == "sdpa":
        return match_attention(module, call)
    found = probe_norm(module)
    if isinstance(found, Norm) and found.kind != "rms_norm":
        return Mismatch(f"is a {found.kind}, for which torch has a kernel already")
    return found


def replace(module: nn.Module, found: Norm | Attention) -> None:
    """Let a built module compute with the kernel that `match` found for it, in place."""
    if isinstance(found, Norm):
        wrap(module, "kernel", RmsNorm(module, found))
        return
    replace_attention(module, found)


class RmsNorm:
    """The layer that computes a module's RMSNorm by our kernel, from the module's own weight."""

    def __init__(self, module: nn.Module, norm: Norm) -> None:
        assert norm.kind == "rms_norm" and norm.rounding is not None, norm
        self.module = module
        self.norm = norm
        self.rounding = norm.rounding

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
        """Normalise the one input; `inner` is not called."""
        given = [*args, *(value for value in kwargs.values() if value is not None)]
        if len(given) != 1:
            name = type(self.module).__name__
            raise Refusal(
                Diagnostic(
                    "S821",
                    f"`{name}` was called with {len(given)} arguments, its kernel takes one",
                    helps=("leave this module as it is",),
                )
            )
        weight: Tensor = getattr(self.module, self.norm.weight)
        return rms_norm(given[0], weight, self.norm.eps, self.norm.offset, self.rounding)


def kernel_of(module: nn.Module) -> str | None:
    """Which of KERNELS `replace` gave to this module itself, if any."""
    layers = layers_of(module)
    if layers is not None and "kernel" in layers.kinds:
        return "rms_norm"
    return "sdpa" if is_fused(module) else None
