"""Kernels by name (`replace_kernel`): match one against a module, and put it into a built module.

The kernel replaces what a module computes between its parameters; parameters, names and hooks stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from schedlang.kernels import liger
from schedlang.kernels.check import Case
from schedlang.kernels.norm import norm
from schedlang.kernels.norm_probes import LIBRARY_KERNELS, NormForm, probe_library_norm, probe_norm
from schedlang.kernels.probe import Mismatch
from schedlang.kernels.sharding_rules import register_rules
from schedlang.runtime.declined_calls import note_declined
from schedlang.runtime.forward import Layer, the_input, wrap
from schedlang.runtime.kernel_injection.add_norm import AddNorms, FusedAddNorm, probe_add_norms
from schedlang.runtime.kernel_injection.attention_kernels import (
    ATTENTIONS,
    KernelAttention,
    install_attention,
    match_kernel_attention,
)
from schedlang.runtime.kernel_injection.expert_kernel import (
    GroupedExperts,
    GroupedForm,
    probe_grouped,
)
from schedlang.runtime.kernel_injection.gated_mlp import GatedForm, GatedMlp, probe_gated
from schedlang.runtime.kernel_injection.rope import FusedRope, RotaryForm, probe_rope
from schedlang.runtime.kernel_injection.sdpa_attention import (
    ModuleCall,
    SdpaAttention,
    match_attention,
    replace_attention,
)
from schedlang.runtime.lazy_logits.lazy import Head, LazyHead, probe_head, probe_in_place_head
from schedlang.runtime.modes import without_modes

# -- norms -----------------------------------------------------------------------------------------


class FusedNorm:
    """A layer that computes a module's norm by a kernel, with the module's own parameters.

    For a norm with a gate, calls without a gate run the module's own forward.
    """

    def __init__(self, module: nn.Module, norm: NormForm) -> None:
        self.module, self.norm = module, norm
        self.kernel = norm.library or norm.kind

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Normalise the only input, or the input and the gate; then `inner` is not called."""
        norm_form, form, module = self.norm, self.norm.form, self.module
        gate: list[Tensor] = []
        if norm_form.inputs:
            x, *gate = _two_arguments(norm_form.inputs, args, kwargs)
            if not all(isinstance(t, Tensor) for t in (x, *gate)) or x.shape != gate[0].shape:
                reason = "it needs a gate of the shape of the input"
                note_declined(module, self.kernel, reason, x=x, gate=gate[0])
                return inner(*args, **kwargs)
        else:
            x = the_input(module, args, kwargs)
        if not norm_form.library and x.shape[-1] > form.longest:
            rows = "with a gate its rows" if gate else "its rows"
            reason = f"{rows} have at most {form.longest // form.groups} elements"
            note_declined(module, self.kernel, reason, x=x)
        compute: Callable[..., Tensor] = liger.norm if norm_form.library else norm
        return compute(x, *norm_form.vectors(module, x), form, *gate)


def _two_arguments(
    names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Any]:
    """Return the two arguments of a call by name; None for both unless exactly these are given."""
    arguments = dict(zip(names, args)) | kwargs
    are_known = len(args) <= len(names) and arguments.keys() <= set(names)
    return [arguments.get(name) if are_known else None for name in names]


# -- match and replace -----------------------------------------------------------------------------
# `match` probes a module by running a bare float64 copy and changes nothing; `replace` changes a
# built module.


KernelMatch = (
    NormForm
    | SdpaAttention
    | KernelAttention
    | Head
    | GatedForm
    | GroupedForm
    | RotaryForm
    | AddNorms
)


def _norm_probe(kind: str) -> Callable[[nn.Module, ModuleCall | None], NormForm | Mismatch]:
    def probe(module: nn.Module, call: ModuleCall | None) -> NormForm | Mismatch:
        norm_form = probe_norm(module, gates=True)
        if not isinstance(norm_form, Mismatch) and norm_form.kind != kind:
            return Mismatch(f"is a {norm_form.kind}: `replace_kernel({norm_form.kind})` fits")
        return norm_form

    return probe


def _attention_probe(
    kernel: str,
) -> Callable[[nn.Module, ModuleCall | None], KernelAttention | Mismatch]:
    return lambda module, call: match_kernel_attention(module, kernel, call)


def _library_probe(kernel: str) -> Callable[[nn.Module, ModuleCall | None], NormForm | Mismatch]:
    return lambda module, call: probe_library_norm(module, kernel)


KERNELS: Mapping[str, Callable[[nn.Module, ModuleCall | None], KernelMatch | Mismatch]] = {
    "rms_norm": _norm_probe("rms_norm"),
    "layer_norm": _norm_probe("layer_norm"),
    "gated": lambda module, call: probe_gated(module),
    "add_norm": lambda module, call: probe_add_norms(module),
    "rope": lambda module, call: probe_rope(module),
    "cross_entropy": lambda module, call: probe_in_place_head(module),
    "linear_cross_entropy": lambda module, call: probe_head(module),
    "sdpa": match_attention,
    **{name: _attention_probe(name) for name in ATTENTIONS},
    **{name: _library_probe(name) for name in LIBRARY_KERNELS},
    "grouped": lambda module, call: probe_grouped(module),
}


def match(module: nn.Module, kernel: str, call: ModuleCall | None = None) -> KernelMatch | Mismatch:
    """Match `kernel` (of KERNELS) against `module`; return what replaces it, or why it differs.

    `call` is an example of the module's arguments, on any device and in any dtype; only shapes and
    integer values are used. Without it, an attention is called with its parameters' common names.
    The module may be on the meta device.
    """
    with without_modes():  # without the modes of a proof: in float64, roundings would not show
        return KERNELS[kernel](module, call)


def replace(module: nn.Module, found: KernelMatch, chunk: int = 0) -> None:
    """Let a built module compute with the kernel that `match` found for it, in place.

    `chunk`: the bytes of logits that a head may hold at a time.
    """
    register_rules()  # for DTensors: neighbours may be sharded
    if isinstance(found, SdpaAttention):
        replace_attention(module, found)
    elif isinstance(found, KernelAttention):
        install_attention(module, found.kernel, found.modules)
    elif isinstance(found, Head):
        wrap(module, "kernel", LazyHead(module, found, chunk))
    else:
        wrap(module, "kernel", LAYERS[type(found)](module, found))


def cases_of(kernel_match: KernelMatch) -> list[Case]:
    """Return test cases of the kernel in the form found; none if the kernel is torch's own."""
    return [] if isinstance(kernel_match, SdpaAttention) else [*kernel_match.cases()]


LAYERS: Mapping[type, Callable[[nn.Module, Any], Layer]] = {
    NormForm: FusedNorm,
    GatedForm: GatedMlp,
    GroupedForm: GroupedExperts,
    RotaryForm: FusedRope,
    AddNorms: FusedAddNorm,
}
