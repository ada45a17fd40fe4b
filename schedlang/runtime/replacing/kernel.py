"""Replace what a module computes between its parameters; parameters, names and hooks stay.

`match` judges a module by running a bare float64 copy of it and touches nothing; `replace` acts on
a built module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.kernels.check import Case
from schedlang.kernels.device import LONGEST, wide
from schedlang.kernels.gated_norms import GatedNorm, probe_gated_norm, takes_gate
from schedlang.kernels.layer_norm import LONGEST as LONGEST_CENTRED
from schedlang.kernels.layer_norm import layer_norm
from schedlang.kernels.norms import Norm, probe_norm
from schedlang.kernels.probe import Mismatch
from schedlang.kernels.rms_norm import rms_norm
from schedlang.kernels.sharding import install
from schedlang.runtime.forward import Layer, layers_of, the_input, wrap
from schedlang.runtime.left import leave
from schedlang.runtime.logits.head import Head, Waiting, probe_head, probe_held
from schedlang.runtime.modes import outside
from schedlang.runtime.replacing.adapters import Adapted, match_adapter
from schedlang.runtime.replacing.add_norm import Sums, probe_sums
from schedlang.runtime.replacing.attended import ATTENTIONS, kernel_in, put_in
from schedlang.runtime.replacing.attention import (
    Attention,
    Call,
    is_fused,
    match_attention,
    replace_attention,
)
from schedlang.runtime.replacing.expert_kernel import GroupedExperts, GroupedForm, probe_grouped
from schedlang.runtime.replacing.gated_norm import GatedNormed
from schedlang.runtime.replacing.mlp import Gated, GatedMlp
from schedlang.runtime.replacing.named import NAMED, Named, NamedNorm, probe_named
from schedlang.runtime.replacing.rope import Rotary, probe_rope
from schedlang.runtime.replacing.summing import Summing
from schedlang.runtime.replacing.told_mlp import probe_gated
from schedlang.runtime.replacing.turned import Turning

Found = Norm | GatedNorm | Attention | Adapted | Head | Gated | GroupedForm | Named | Rotary | Sums


def _norm(kind: str) -> Callable[[nn.Module, Call | None], Norm | GatedNorm | Mismatch]:
    def probe(module: nn.Module, call: Call | None) -> Norm | GatedNorm | Mismatch:
        found = probe_gated_norm(module) if takes_gate(module) else probe_norm(module)
        if not isinstance(found, Mismatch) and found.kind != kind:
            return Mismatch(f"is a {found.kind}: `replace_kernel({found.kind})` fits")
        return found

    return probe


def _adapter(kernel: str) -> Callable[[nn.Module, Call | None], Adapted | Mismatch]:
    return lambda module, call: match_adapter(module, kernel, call)


def _library(kernel: str) -> Callable[[nn.Module, Call | None], Named | Mismatch]:
    return lambda module, call: probe_named(module, kernel)


KERNELS: Mapping[str, Callable[[nn.Module, Call | None], Found | Mismatch]] = {
    "rms_norm": _norm("rms_norm"),
    "layer_norm": _norm("layer_norm"),
    "gated": lambda module, call: probe_gated(module),
    "add_norm": lambda module, call: probe_sums(module),
    "rope": lambda module, call: probe_rope(module),
    "cross_entropy": lambda module, call: probe_held(module),
    "linear_cross_entropy": lambda module, call: probe_head(module),
    "sdpa": match_attention,
    **{name: _adapter(name) for name in ATTENTIONS},
    **{name: _library(name) for name in NAMED},
    "grouped": lambda module, call: probe_grouped(module),
}


def match(module: nn.Module, kernel: str, call: Call | None = None) -> Found | Mismatch:
    """Whether `kernel` (of KERNELS) computes what `module` does, or the measured reason why not.

    `call` is one example of the module's arguments, of any device or dtype; only shapes and integer
    values are used.  Without it an attention is called by the common names of its parameters.  The
    module may lie on the meta device.
    """
    with outside():  # a proof computes everything in float64, and roundings would not show
        return KERNELS[kernel](module, call)


def replace(module: nn.Module, found: Found, chunk: int = 0) -> None:
    """Let a built module compute with the kernel that `match` found for it, in place.

    `chunk` are the bytes of logits that a head may hold at a time.
    """
    install()  # of our operators on DTensors, for whoever splits what lies around
    if isinstance(found, Attention):
        replace_attention(module, found)
    elif isinstance(found, Adapted):
        put_in(module, found.kernel, found.modules)
    elif isinstance(found, Head):
        wrap(module, "kernel", Waiting(module, found, chunk))
    else:
        wrap(module, "kernel", LAYERS[type(found)](module, found))


def cases_of(found: Found) -> list[Case]:
    """Runs of the kernel itself, in the form found; none where the kernel is torch's own."""
    return [] if isinstance(found, Attention) else [*found.cases()]


class Normed:
    """The layer that computes a module's norm by our kernel, from the module's own parameters."""

    kernel: str

    def __init__(self, module: nn.Module, norm: Norm) -> None:
        self.module, self.norm = module, norm
        self.kernel = norm.kind

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
        """Normalise the one input; `inner` is not called."""
        x = the_input(self.module, args, kwargs)
        norm = self.norm
        longest = LONGEST if norm.kind == "rms_norm" else LONGEST_CENTRED
        if x.shape[-1] > longest:
            leave(self.module, norm.kind, f"its rows have at most {longest} elements", x=x)
        if norm.weight is None:
            weight = x.new_ones(x.shape[-1])  # its gradient is made as well, and left
        else:
            weight = getattr(self.module, norm.weight)
        if norm.kind == "rms_norm":
            return rms_norm(x, weight, norm.eps, norm.offset, norm.rounding)
        bias = getattr(self.module, norm.bias) if norm.bias is not None else None
        eps = torch.finfo(wide(x, weight)).eps if norm.eps is None else norm.eps
        return layer_norm(x, weight, bias, eps, norm.offset, norm.rounding)


LAYERS: Mapping[type, Callable[[nn.Module, Any], Layer]] = {
    Norm: Normed, GatedNorm: GatedNormed, Gated: GatedMlp, GroupedForm: GroupedExperts,
    Named: NamedNorm, Rotary: Turning, Sums: Summing,
}  # fmt: skip


def kernels_of(module: nn.Module) -> tuple[str, ...]:
    """Which of KERNELS `replace` gave to this module itself."""
    layers = layers_of(module)
    put = layers.kinds if layers is not None else {}
    found = [getattr(put[kind], "kernel", None) for kind in ("kernel", "attend") if kind in put]
    found.append("sdpa" if is_fused(module) else kernel_in(module))
    return tuple(name for name in found if name is not None)


def kernel_of(module: nn.Module) -> str | None:
    """The first of them, if any."""
    return next(iter(kernels_of(module)), None)
