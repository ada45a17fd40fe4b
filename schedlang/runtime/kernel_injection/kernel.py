"""Replace what a module computes between its parameters; parameters, names and hooks stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from schedlang.kernels import liger
from schedlang.kernels.check import Case
from schedlang.kernels.gated_norm import LONGEST as LONGEST_GATED
from schedlang.kernels.gated_norm import gated_norm
from schedlang.kernels.norm import norm
from schedlang.kernels.norm_probes import (
    GatedNorm,
    Norm,
    probe_gated_norm,
    probe_norm,
    takes_gate,
)
from schedlang.kernels.probe import Mismatch
from schedlang.kernels.sharding import install
from schedlang.runtime.forward import Layer, layer_of, the_input, wrap
from schedlang.runtime.kernel_injection.add_norm import Summing, Sums, probe_sums
from schedlang.runtime.kernel_injection.attention import (
    Attention,
    Call,
    is_fused,
    match_attention,
    replace_attention,
)
from schedlang.runtime.kernel_injection.attention_adapters import (
    ATTENTIONS,
    Adapted,
    kernel_in,
    match_adapter,
    put_in,
)
from schedlang.runtime.kernel_injection.expert_kernel import (
    GroupedExperts,
    GroupedForm,
    probe_grouped,
)
from schedlang.runtime.kernel_injection.gated_mlp import Gated, GatedMlp, probe_gated
from schedlang.runtime.kernel_injection.rope import Rotary, Turning, probe_rope
from schedlang.runtime.lazy_logits.head import Head, Waiting, probe_head, probe_held
from schedlang.runtime.left import leave
from schedlang.runtime.modes import outside

# -- norms by the kernel of an installed library ---------------------------------------------------


@dataclass(frozen=True)
class Named:
    """A norm that a library's kernel computes too; `kernel` is one of NAMED."""

    kernel: str
    norm: Norm

    def cases(self) -> list[Case]:
        """Runs of the library's kernel in the form that was found."""
        kinds = ("float32", "bfloat16")
        shape, bias = (7, self.norm.size), self.norm.bias is not None
        return [liger.Case(shape, kind, self.norm.form, bias) for kind in kinds]


NAMED = ("liger.rms_norm", "liger.layer_norm")


def probe_named(module: nn.Module, kernel: str) -> Named | Mismatch:
    """Match the library's kernel against `module`, or say why it differs."""
    found = probe_norm(module)
    wanted = kernel.rpartition(".")[2]
    if isinstance(found, Mismatch):
        return found
    if found.kind != wanted:
        return Mismatch(f"is a {found.kind}, which `{kernel}` is not")
    if found.weight is None:
        return Mismatch(f"has no weight, and `{kernel}` needs one")
    plain = found.offset == 0.0 and found.rounding == "late" and found.bias is not None
    if wanted == "layer_norm" and not plain:
        what = "no bias" if found.bias is None else "an offset, or rounds before its weight"
        return Mismatch(f"has {what}, which `{kernel}` does not compute")
    return Named(kernel, found)


class NamedNorm:
    """The layer that computes a module's norm by a library's kernel."""

    def __init__(self, module: nn.Module, named: Named) -> None:
        self.module, self.norm, self.kernel = module, named.norm, named.kernel

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
        """Normalise the one input; `inner` is not called."""
        x, found = the_input(self.module, args, kwargs), self.norm
        assert found.weight is not None
        weight: Tensor = getattr(self.module, found.weight)
        bias = None if found.bias is None else getattr(self.module, found.bias)
        return liger.norm(x, weight, bias, found.form)


# -- norms with a gate -----------------------------------------------------------------------------


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
        if x.shape[-1] > LONGEST_GATED * norm.form.groups:
            leave(
                module,
                self.kernel,
                f"with a gate its rows have at most {LONGEST_GATED} elements",
                x=x,
            )
        weight = x.new_ones(norm.size) if norm.weight is None else getattr(module, norm.weight)
        return gated_norm(x, gate, weight, norm.form)


def _given(names: tuple[str, str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the two arguments of a call by name; None where one is missing, or more are given."""
    given = dict(zip(names, args)) | kwargs
    known = len(args) <= len(names) and given.keys() <= set(names)
    return [given.get(name) if known else None for name in names]


# -- match and replace -----------------------------------------------------------------------------
# `match` judges a module by running a bare float64 copy of it and touches nothing; `replace` acts
# on a built module.


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
    """Match `kernel` (of KERNELS) against `module`, or return the measured reason why it differs.

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
        found, form = self.norm, self.norm.form
        if x.shape[-1] > form.longest:
            leave(self.module, found.kind, f"its rows have at most {form.longest} elements", x=x)
        if found.weight is None:
            weight = x.new_ones(x.shape[-1])  # its gradient is made as well, and left
        else:
            weight = getattr(self.module, found.weight)
        bias = None if found.bias is None else getattr(self.module, found.bias)
        return norm(x, weight, bias, form)


LAYERS: Mapping[type, Callable[[nn.Module, Any], Layer]] = {
    Norm: Normed,
    GatedNorm: GatedNormed,
    Gated: GatedMlp,
    GroupedForm: GroupedExperts,
    Named: NamedNorm,
    Rotary: Turning,
    Sums: Summing,
}


def kernels_of(module: nn.Module) -> tuple[str, ...]:
    """Return the KERNELS that `replace` gave to this module itself."""
    put = (layer_of(module, kind) for kind in ("kernel", "attend"))
    found = [getattr(one, "kernel", None) for one in put]
    found.append("sdpa" if is_fused(module) else kernel_in(module))
    return tuple(name for name in found if name is not None)


def kernel_of(module: nn.Module) -> str | None:
    """The first of them, if any."""
    return next(iter(kernels_of(module)), None)
