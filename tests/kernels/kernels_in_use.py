"""Report which kernels a module uses and which fused regions it has run."""

from __future__ import annotations

from torch import nn

from schedlang.runtime.forward import layer_of
from schedlang.runtime.fusion.fuse import FusedRegions
from schedlang.runtime.fusion.rewrite import FusedRegion
from schedlang.runtime.kernel_injection.attention_kernels import ATTENTIONS
from schedlang.runtime.kernel_injection.sdpa_attention import attention_name


def kernels_of(module: nn.Module) -> tuple[str, ...]:
    """Return the KERNELS that `replace` put into this module itself, not into its children."""
    layers = (layer_of(module, kind) for kind in ("kernel", "attend"))
    names = [getattr(layer, "kernel", None) for layer in layers]
    attention = attention_name(module) or ""
    short_name = attention.removeprefix("schedlang_").removesuffix("_eager")
    injected = attention == "schedlang_sdpa" or short_name in ATTENTIONS
    names.append(short_name if injected else None)
    return tuple(name for name in names if name is not None)


def regions_of(module: nn.Module) -> list[FusedRegion]:
    """Return the fused regions that a module has run."""
    layer = layer_of(module, "fuse")
    if not isinstance(layer, FusedRegions):
        return []
    return [region for compiled in layer.made.values() for region in compiled.regions]
