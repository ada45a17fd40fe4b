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
from schedlang.runtime.mixed_precision import device_kind_of, product_dtype
from schedlang.runtime.storage.quantized_parameters import QuantizedParameter
from schedlang.runtime.storage.saved_tensors_slot import (
    LazyView,
    Pack,
    View,
    memory_key,
    outer_pack,
    pack_hooks,
)


class DecodedWeight:
    """The layer around the forward of a module; if the module is cast, the weight is decoded
    cast."""

    def __init__(self, module: nn.Module, quantized: QuantizedParameter) -> None:
        self.module, self.held = module, quantized

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `inner` with the decoded weight."""
        quantized = self.held
        dtype = product_dtype(self.module, quantized.scales, device_kind_of(args, kwargs))
        weight = quantized.materialize(dtype)  # its memory is not reused before this ends
        try:
            if not torch.is_grad_enabled() or not weight.numel():
                return inner(*args, **kwargs)
            with pack_hooks(_pack(quantized, dtype, memory_key(weight))):
                return inner(*args, **kwargs)
        finally:
            quantized.release()


def _pack(quantized: QuantizedParameter, dtype: torch.dtype, weight_key: int) -> Pack:
    """Return a pack function: a reference for the weight; other tensors go to the outer hooks."""
    outer = outer_pack()

    def pack(tensor: Tensor) -> Any:
        is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
        if is_plain and memory_key(tensor) == weight_key:
            return LazyView(partial(quantized.value, dtype), View.of(tensor))
        return outer(tensor)

    return pack


def decode_weight(module: nn.Module, quantized: QuantizedParameter) -> None:
    """Decode the weight of `module` for its forwards and backwards only, in place."""
    wrap(module, "decode", DecodedWeight(module, quantized))
