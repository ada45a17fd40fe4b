"""Queries that an additive mask hides all keys from, beside a fused kernel, without a host wait.

Where a mask is so low that a score is lost in the sum with it (transformers adds its type's lowest
number), eager attention gives each key of such a query the same weight, and the scores their
gradient all the same.  A fused kernel keeps the logarithm of a sum of weights for its backward, in
which the count of keys is lost beside the mask: its gradients are as many times too large.

So these queries go into the kernel as zeros under a mask of zeros: values and gradients of values,
queries and masks are those of eager attention then.  Of the gradient of keys what a query itself
adds is missing.  Since all weights w of a query are 1 / keys, it needs no scores: with the
output's gradient g and the output o it is the sum over these queries of

    scale * w * (g . v_j - g . o) q  =  scale / keys * ((sum of q g^T) v_j - sum of (g . o) q).

Which queries these are is found on the device and stays there: a host that asked would wait for
all that was computed before.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_LARGEST = 1e4  # of scores that a mask loses
UNLIKE = (
    "attention by `replace_kernel(sdpa)`: an additive mask hides all keys from a query by numbers"
    " that differ; hide keys by one number (torch.finfo(dtype).min), or drop the row"
)


class Hidden(NamedTuple):
    """A mask as a fused kernel is given it, and where it hides all keys.

    blind   [.., queries, 1]: where it does, for the original mask
    filled  what such a query is instead: zero, and NaN where eager attention gives that
    mask    rows that hide all keys hide none, or those that they hid by a lower number still
    unlike  whether there are rows of the latter kind
    """

    blind: Tensor
    filled: Tensor
    mask: Tensor
    unlike: Tensor


class _Instead(torch.autograd.Function):
    """Other values for a tensor, which gets their gradient."""

    @staticmethod
    def forward(x: Tensor, values: Tensor) -> Tensor:
        return values.clone() if values is x else values.view_as(values)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class _KeysOfBlind(torch.autograd.Function):
    """The output as it is; in backward what blind queries add to the gradient of keys.

    out [rows, queries, heads, size]; q, k and v [rows, heads, length, size].
    """

    @staticmethod
    def forward(
        out: Tensor, q: Tensor, k: Tensor, v: Tensor, blind: Tensor, unlike: Tensor, scale: float
    ) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.scale = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        out, q, k, v, blind, unlike = ctx.saved_tensors
        torch._assert_async(~unlike, UNLIKE)
        grad, out = (x.transpose(1, 2).to(q.dtype) for x in (grads[0], out))
        grad = torch.where(blind, grad, 0)
        alone = torch.where(blind, (grad * out).sum(-1, keepdim=True), 0)
        groups = q.shape[1] // k.shape[1]
        outer, once = (_grouped(x.mT @ q, groups) for x in (grad, alone))
        found = (v.to(q.dtype) @ outer - once) * (ctx.scale / k.shape[2])
        return grads[0], None, found.to(k.dtype).sum_to_size(k.shape), None, None, None, None


def _grouped(x: Tensor, groups: int) -> Tensor:
    """Summed over the heads of queries that share one of keys."""
    rows, heads = x.shape[:2]
    return x if groups == 1 else x.view(rows, heads // groups, groups, *x.shape[2:]).sum(2)


_known: MutableMapping[Tensor, tuple[int, Hidden]] = WeakTensorKeyDictionary()


def hidden(mask: Tensor) -> Hidden:
    """Find where an additive mask [.., queries, keys] hides all keys; once for all layers."""
    if torch.compiler.is_compiling() or mask.requires_grad or mask.is_inference():
        return _hidden(mask)
    version, found = _known.get(mask, (-1, None))
    if found is None or version != mask._version:  # a buffer that each step writes into
        found = _hidden(mask)
        if not found.mask.is_inference():
            _known[mask] = mask._version, found
    return found


def _hidden(given: Tensor) -> Hidden:
    mask = given.detach()
    info = torch.finfo(mask.dtype)
    top = mask.amax(-1, keepdim=True)
    blind = top <= max(info.min / 2, -_LARGEST / info.eps)
    same = mask == top
    # of other rows the largest number is taken off: as it is lost in a logarithm, if not here
    other = torch.where(blind, torch.where(same, 0.0, -math.inf), mask - top.clamp(max=0))
    filled = torch.where(top == -math.inf, math.nan, 0.0)
    return Hidden(blind, filled, _instead(given, other), (blind & ~same).any())


def _instead(x: Tensor, values: Tensor) -> Tensor:
    values = values.to(x.dtype)
    if not (torch.is_grad_enabled() and x.requires_grad):
        return values
    made: Tensor = _Instead.apply(x, values)  # type: ignore[no-untyped-call]
    return made


def without_blind(q: Tensor, found: Hidden) -> Tensor:
    """Queries [rows, heads, length, size] as the kernel is given them, under `found.mask`."""
    return _instead(q, torch.where(found.blind, found.filled, q.detach()))


def with_keys_of_blind(
    out: Tensor, lines: tuple[Tensor, Tensor, Tensor], found: Hidden, scale: float | None
) -> Tensor:
    """The kernel's output [rows, queries, heads, size], with the whole gradient of keys.

    `lines` are queries, keys and values as they were; `scale` of scores, None: 1 / sqrt(size).
    Raises in backward, when the device comes to it, for rows that `found` calls unlike.
    """
    q, k, v = lines
    if not (torch.is_grad_enabled() and k.requires_grad):
        return out
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    given = (out, q, k, v, found.blind, found.unlike, scale)
    made: Tensor = _KeysOfBlind.apply(*given)  # type: ignore[no-untyped-call]
    return made
