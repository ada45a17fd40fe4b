"""Norms by a kernel that an installed library names; probed as for our own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.kernels import liger
from schedlang.kernels.check import Case
from schedlang.kernels.device import wide
from schedlang.kernels.norms import Norm, probe_norm
from schedlang.kernels.probe import Mismatch
from schedlang.runtime.forward import the_input


@dataclass(frozen=True)
class Named:
    """A norm that a library's kernel computes too; `kernel` is one of NAMED."""

    kernel: str
    norm: Norm

    def cases(self) -> list[Case]:
        """Runs of the library's kernel in the form that was found."""
        runs = [("float32", 7), ("bfloat16", 7)]
        norm = self.norm
        fields: dict[str, Any] = {"eps": norm.eps or 1e-6, "rounding": norm.rounding}
        fields |= {"offset": norm.offset} if norm.kind == "rms_norm" else {"bias": True}
        return [liger.Case(shape=(rows, norm.size), dtype=dtype, **fields) for dtype, rows in runs]


NAMED = ("liger.rms_norm", "liger.layer_norm")


def probe_named(module: nn.Module, kernel: str) -> Named | Mismatch:
    """Whether the library's kernel computes what `module` does, or why not."""
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
        x, norm = the_input(self.module, args, kwargs), self.norm
        assert norm.weight is not None
        weight: Tensor = getattr(self.module, norm.weight)
        eps = torch.finfo(wide(x, weight)).eps if norm.eps is None else norm.eps
        if norm.bias is None:
            return liger.rms_norm(x, weight, eps, norm.offset, norm.rounding)
        return liger.layer_norm(x, weight, getattr(self.module, norm.bias), eps)
