"""Projections whose frozen weight is stored in codes, and decoded for each pass.

The weight of a module is decoded for its forward. Autograd saves a reference instead of the decoded
values, and a backward decodes them again: between the two passes only codes are in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.runtime.forward import wrap
from schedlang.runtime.mixed_precision import device_of, used_as
from schedlang.runtime.storage.coded import Coded
from schedlang.runtime.storage.saved import Pack, View, Viewed, outside, place, slot


class Decoding:
    """The layer around the forward of a module; if the module is cast, the weight is decoded
    cast."""

    def __init__(self, module: nn.Module, held: Coded) -> None:
        self.module, self.held = module, held

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `inner` with the decoded weight."""
        held = self.held
        dtype = used_as(self.module, held.scales, device_of(args, kwargs))
        weight = held.show(dtype)  # its memory is not reused before this ends
        try:
            if not torch.is_grad_enabled() or not weight.numel():
                return inner(*args, **kwargs)
            with slot(_pack(held, dtype, place(weight))):
                return inner(*args, **kwargs)
        finally:
            held.hide()


def _pack(held: Coded, dtype: torch.dtype, weight_key: int) -> Pack:
    """Return a pack function: a reference for the weight; other tensors go to the outer hooks."""
    outer = outside()

    def pack(tensor: Tensor) -> Any:
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
        if plain and place(tensor) == weight_key:
            return Viewed(partial(held.value, dtype), View.of(tensor))
        return outer(tensor)

    return pack


def decode(module: nn.Module, held: Coded) -> None:
    """Decode the weight of `module` for its forwards and backwards only, in place."""
    wrap(module, "decode", Decoding(module, held))
