"""Stand-ins on the meta device for computations that cannot run there, or run otherwise.

* Modules whose forward needs values (experts): the stand-in has the shapes and the dependencies.
* Attention by the fused operator that real devices use.  On meta, torch would decompose attention,
  and a forward would seem to save every attention score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack

from schedlang.runtime.modes import AmbientMode

ROUTED = ("experts",)  # kinds of modules whose own forward cannot run without values


def stand_in(rows: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Return a tensor of the shape of `rows` on the meta device, computed from rows and parameters.

    The rows are multiplied with a slice of each parameter, as experts multiply their rows: the
    result is linear in each parameter, so dtypes and gradients are those of the real computation.
    """
    assert rows.is_meta
    result = rows
    for parameter in parameters:
        result = result * parameter.flatten()[:1]
    return result


def is_simulating() -> bool:
    """Return whether a step is simulated now: operations are counted, dtypes are not followed."""
    stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(isinstance(mode, FusedAttention) for mode in stack)


def put_stand_ins(model: nn.Module, kinds: Mapping[str, str]) -> None:
    """Replace the forwards of modules of the kinds `ROUTED` with stand-ins.

    `kinds`: module name -> kind.
    """
    for fqn, kind in kinds.items():
        if kind in ROUTED:
            module = model.get_submodule(fqn)
            module.forward = _without_values(list(module.parameters()))


def _without_values(parameters: Sequence[Tensor]) -> Any:
    def forward(rows: Tensor, *_: Any, **__: Any) -> Tensor:
        return stand_in(rows, parameters)

    return forward


ATTENTION_ARGUMENTS = (
    "query",
    "key",
    "value",
    "attn_mask",
    "dropout_p",
    "is_causal",
    "scale",
    "enable_gqa",
)


def fused_attention(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the result of `scaled_dot_product_attention`; None where no fused operator applies.

    The conditions are torch's for a CPU: four dims, no dropout, and a mask without a gradient.
    """
    passed = {**dict(zip(ATTENTION_ARGUMENTS, args)), **kwargs}
    query, key, value = (passed[name] for name in ATTENTION_ARGUMENTS[:3])
    mask, causal = passed.get("attn_mask"), bool(passed.get("is_causal", False))
    equal_widths = query.shape[-1] == value.shape[-1] == key.shape[-1]
    needs_grad = query.requires_grad or key.requires_grad or value.requires_grad
    if not query.is_meta or query.dim() != 4 or not equal_widths or passed.get("dropout_p", 0.0):
        return None
    if mask is not None:
        if mask.requires_grad or (causal and needs_grad):
            return None
        if mask.dtype == torch.bool:
            mask = torch.where(mask, 0.0, float("-inf")).to(query.dtype)
        if mask.dim() not in (2, 4):
            return None
    output: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=mask, scale=passed.get("scale")
    )[0]
    return output


class FusedAttention(AmbientMode):
    """Mode that computes attention by the fused operator, in recomputations too."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the call; attention by the fused operator where this is possible."""
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            fused = fused_attention(args, kwargs)
            if fused is not None:
                return fused
        return self.run(func, types, args, kwargs)
