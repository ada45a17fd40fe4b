"""Queries whose keys are all hidden by an additive mask, for fused kernels, without a host wait.

If a mask is so low that a score is lost in the sum with it (transformers adds the lowest number of
the dtype), eager attention gives each key of such a query the same weight, and still gives
gradients to the scores. A fused kernel stores the logarithm of the sum of weights for its backward,
in which the number of keys is lost beside the mask: its gradients are too large by that factor.

So these queries enter the kernel as zeros under a mask of zeros: outputs and the gradients of
values, queries and masks are then those of eager attention. The gradient of keys lacks the
contribution of the query itself. Since all weights w of such a query are 1 / keys, it can be
computed without scores: with the output's gradient g and the output o it is the sum over these
queries of

    scale * w * (g . v_j - g . o) q  =  scale / keys * ((sum of q g^T) v_j - sum of (g . o) q).

Which queries these are is computed on the device and stays there: reading it would make the host
wait for all earlier work.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_LARGEST_SCORE = 1e4  # largest score that such a mask may absorb
UNEQUAL_ROWS = (
    "attention by `replace_kernel(sdpa)`: an additive mask hides all keys from a query by numbers"
    " that differ; hide keys by one number (torch.finfo(dtype).min), or drop the row"
)


class HiddenKeys(NamedTuple):
    """A mask for the fused kernel, and the queries whose keys the original mask hides.

    blind        [.., queries, 1]: whether the original mask hides all keys of a query
    replacement  the replacement of such a query: zero, or NaN where eager attention gives NaN
    mask         the mask; rows that hid all keys hide none, or only keys with still lower numbers
    unequal      whether there are rows of the latter kind
    """

    blind: Tensor
    replacement: Tensor
    mask: Tensor
    unequal: Tensor


class _ReplaceValues(torch.autograd.Function):
    """Replace the values of a tensor, and pass it the gradient of the new values."""

    @staticmethod
    def forward(x: Tensor, values: Tensor) -> Tensor:
        return values.clone() if values is x else values.view_as(values)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class _AddKeyGradient(torch.autograd.Function):
    """Identity on the output; in backward, add the contribution of blind queries to keys'
    gradients.

    out [rows, queries, heads, size]; q, k and v [rows, heads, length, size].
    """

    @staticmethod
    def forward(
        out: Tensor, q: Tensor, k: Tensor, v: Tensor, blind: Tensor, unequal: Tensor, scale: float
    ) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.scale = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        out, q, k, v, blind, unequal = ctx.saved_tensors
        torch._assert_async(~unequal, UNEQUAL_ROWS)
        grad, out = (x.transpose(1, 2).to(q.dtype) for x in (grads[0], out))
        grad = torch.where(blind, grad, 0)
        own_share = torch.where(blind, (grad * out).sum(-1, keepdim=True), 0)
        groups = q.shape[1] // k.shape[1]
        outer, own_sums = (_sum_groups(x.mT @ q, groups) for x in (grad, own_share))
        key_grad = (v.to(q.dtype) @ outer - own_sums) * (ctx.scale / k.shape[2])
        return grads[0], None, key_grad.to(k.dtype).sum_to_size(k.shape), None, None, None, None


def _sum_groups(x: Tensor, groups: int) -> Tensor:
    """Sum over the query heads that share a key head."""
    rows, heads = x.shape[:2]
    return x if groups == 1 else x.view(rows, heads // groups, groups, *x.shape[2:]).sum(2)


_cache: MutableMapping[Tensor, tuple[int, HiddenKeys]] = WeakTensorKeyDictionary()


def find_hidden_keys(mask: Tensor) -> HiddenKeys:
    """Find where an additive mask [.., queries, keys] hides all keys; cached for all layers."""
    if torch.compiler.is_compiling() or mask.requires_grad or mask.is_inference():
        return _find_hidden(mask)
    version, hidden = _cache.get(mask, (-1, None))
    # the mask may be a buffer that each step modifies
    if hidden is None or version != mask._version:
        hidden = _find_hidden(mask)
        if not hidden.mask.is_inference():
            _cache[mask] = mask._version, hidden
    return hidden


def _find_hidden(score_mask: Tensor) -> HiddenKeys:
    mask = score_mask.detach()
    info = torch.finfo(mask.dtype)
    top = mask.amax(-1, keepdim=True)
    blind = top <= max(info.min / 2, -_LARGEST_SCORE / info.eps)
    is_top = mask == top
    # from other rows the largest number is subtracted: otherwise it would be lost in the logarithm
    unblinded = torch.where(blind, torch.where(is_top, 0.0, -math.inf), mask - top.clamp(max=0))
    filled = torch.where(top == -math.inf, math.nan, 0.0)
    return HiddenKeys(
        blind, filled, _replace_values(score_mask, unblinded), (blind & ~is_top).any()
    )


def _replace_values(x: Tensor, values: Tensor) -> Tensor:
    values = values.to(x.dtype)
    if not (torch.is_grad_enabled() and x.requires_grad):
        return values
    replaced: Tensor = _ReplaceValues.apply(x, values)  # type: ignore[no-untyped-call]
    return replaced


def replace_blind_queries(q: Tensor, hidden: HiddenKeys) -> Tensor:
    """Return queries [rows, heads, length, size] as the kernel gets them, under `found.mask`."""
    return _replace_values(q, torch.where(hidden.blind, hidden.replacement, q.detach()))


def add_blind_key_gradients(
    out: Tensor, tensors: tuple[Tensor, Tensor, Tensor], hidden: HiddenKeys, scale: float | None
) -> Tensor:
    """Return the kernel's output [rows, queries, heads, size], with the complete gradient of keys.

    `tensors` are the original queries, keys and values; `scale` of scores, None: 1 / sqrt(size). In
    backward, the device raises asynchronously for rows that `hidden` calls unlike.
    """
    q, k, v = tensors
    if not (torch.is_grad_enabled() and k.requires_grad):
        return out
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    inputs = (out, q, k, v, hidden.blind, hidden.unequal, scale)
    output: Tensor = _AddKeyGradient.apply(*inputs)  # type: ignore[no-untyped-call]
    return output
