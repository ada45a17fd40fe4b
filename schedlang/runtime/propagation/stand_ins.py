"""Computations that cannot run without values, as stand-ins on the meta device.

* A stand-in for a computation that cannot run without values: shapes and what depends on what.
* Attention on the meta device by the fused operator that real devices take. There torch would
  spell it out, and a forward would seem to keep every attention score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack

from schedlang.runtime.modes import Ambient

ROUTED = ("experts",)  # kinds whose own forward cannot run without values


def stand_in(rows: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Something of the shape of `rows` on the meta device, computed from them and parameters.

    A product with each, as experts multiply their rows: linear in the parameters' parts, so that
    types and gradients are those of the real computation.
    """
    assert rows.is_meta
    out = rows
    for parameter in parameters:
        out = out * parameter.flatten()[:1]
    return out


def playing() -> bool:
    """Return whether a step is played, which counts operations, and follows no types."""
    stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(isinstance(mode, Fused) for mode in stack)


def put_stand_ins(model: nn.Module, kinds: Mapping[str, str]) -> None:
    """Give modules that cannot run without values a forward that needs none."""
    for fqn, kind in kinds.items():
        if kind in ROUTED:
            module = model.get_submodule(fqn)
            module.forward = _without_values(list(module.parameters()))


def _without_values(parameters: Sequence[Tensor]) -> Any:
    def forward(rows: Tensor, *_: Any, **__: Any) -> Tensor:
        return stand_in(rows, parameters)

    return forward


NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def attention(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The result of `scaled_dot_product_attention`; None where no fused operator takes these.

    As torch decides on a CPU: four dims, no dropout, and a mask that wants no gradient.
    """
    given = {**dict(zip(NAMES, args)), **kwargs}
    query, key, value = (given[name] for name in NAMES[:3])
    mask, causal = given.get("attn_mask"), bool(given.get("is_causal", False))
    same = query.shape[-1] == value.shape[-1] == key.shape[-1]
    wanted = query.requires_grad or key.requires_grad or value.requires_grad
    if not query.is_meta or query.dim() != 4 or not same or given.get("dropout_p", 0.0):
        return None
    if mask is not None:
        if mask.requires_grad or (causal and wanted):
            return None
        if mask.dtype == torch.bool:
            mask = torch.where(mask, 0.0, float("-inf")).to(query.dtype)
        if mask.dim() not in (2, 4):
            return None
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=mask, scale=given.get("scale")
    )[0]
    return out


class Fused(Ambient):
    """Takes the fused operator wherever attention is computed, in recomputations too."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the call, fused where it is attention that can be."""
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            found = attention(args, kwargs)
            if found is not None:
                return found
        return self.run(func, types, args, kwargs)
