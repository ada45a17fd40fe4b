"""Tell which kernels a module was given, and which regions it has run."""

from __future__ import annotations

from torch import nn

from schedlang.runtime.forward import layer_of
from schedlang.runtime.fusion.fuse import FusedRegions
from schedlang.runtime.fusion.rewrite import FusedRegion
from schedlang.runtime.kernel_injection.attention_kernels import ATTENTIONS
from schedlang.runtime.kernel_injection.sdpa_attention import attention_name


def kernels_of(module: nn.Module) -> tuple[str, ...]:
    """Return the KERNELS that `replace` gave to this module itself."""
    put = (layer_of(module, kind) for kind in ("kernel", "attend"))
    found = [getattr(one, "kernel", None) for one in put]
    used = attention_name(module) or ""
    named = used.removeprefix("schedlang_").removesuffix("_eager")
    mine = used == "schedlang_sdpa" or named in ATTENTIONS
    found.append(named if mine else None)
    return tuple(name for name in found if name is not None)


def regions_of(module: nn.Module) -> list[FusedRegion]:
    """The regions that a module has run."""
    layer = layer_of(module, "fuse")
    if not isinstance(layer, FusedRegions):
        return []
    return [region for made in layer.made.values() for region in made.regions]
