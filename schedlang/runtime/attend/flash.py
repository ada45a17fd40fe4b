"""Whole runs of tokens by torch's own flash attention, which also gives the log-sum-exp.

Only for what its operators can express: all keys seen, or a plain causal square, below float64.  An
operator is used on a device only after it has given there what plain products give, forward and
backward.  All that is used of torch's private parts stands here.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from schedlang.runtime.attend.reach import Reach
from schedlang.runtime.device import on_host

SMALL = (torch.float32, torch.bfloat16, torch.float16)


def form(reach: Reach, queries: range, keys: range) -> tuple[slice, slice, bool] | None:
    """Which queries, which keys, and whether causally; None where no one operator does it."""
    if reach.everything(queries, keys):
        return slice(0, len(queries)), slice(0, len(keys)), False
    if reach != Reach(ahead=0) or len(queries) != len(keys) or queries.step != keys.step:
        return None
    late = keys.start - queries.start
    if -keys.step < late <= 0:  # key i is seen by query i and all after it
        return slice(0, len(queries)), slice(0, len(keys)), True
    if 0 < late < keys.step and len(keys) > 1:  # by query i+1 and all after it
        return slice(1, len(queries)), slice(0, len(keys) - 1), True
    return None


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The result, and its log-sum-exp in float32."""
    k, v = _as_many(k, q), _as_many(v, q)
    if on_host(q):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=scale
        )
        return out, lse
    found = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False, scale=scale
    )
    return found[0], found[1][:, :, : q.shape[2]]


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What these keys give to the gradients; `out` and `lse` are those over all keys."""
    heads, (k, v) = k.shape[1], (_as_many(k, q), _as_many(v, q))
    if on_host(q):
        lse = lse.transpose(1, 2).contiguous().transpose(1, 2)  # as the operator lays it out
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )
    else:
        none = torch.zeros(2, dtype=torch.int64, device=q.device)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal,
            none, none, scale=scale,
        )  # fmt: skip
    return dq, _summed(dk, heads), _summed(dv, heads)


def _as_many(x: Tensor, q: Tensor) -> Tensor:
    copies = q.shape[1] // x.shape[1]
    return x if copies == 1 else x.repeat_interleave(copies, 1)


def _summed(x: Tensor, heads: int) -> Tensor:
    """The gradient of heads that were copied."""
    rows, _, tokens, width = x.shape
    return x if x.shape[1] == heads else x.float().view(rows, heads, -1, tokens, width).sum(2)


def usable(q: Tensor, v: Tensor) -> bool:
    """Whether torch has an operator for such tensors that has been seen to be right here."""
    same = q.shape[-1] == v.shape[-1]
    return same and not q.is_meta and q.dtype in SMALL and _right(q.dtype, q.device, q.shape[-1])


@lru_cache(maxsize=64)
def _right(dtype: torch.dtype, device: torch.device, width: int) -> bool:
    """Both operators against plain products on a small example, causal and not."""
    bound = max(4 * torch.finfo(dtype).eps, 1e-5)
    try:
        return all(_error(dtype, device, width, causal) < bound for causal in (False, True))
    except (RuntimeError, NotImplementedError):  # the operator is not there, or not for this
        return False


def _error(dtype: torch.dtype, device: torch.device, width: int, causal: bool) -> float:
    """The largest relative error of result, log-sum-exp and gradients."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, 2, 48, width, generator=generator) for _ in range(4)]
    q, k, v, grad = (x.to(device, dtype) for x in drawn)
    out, lse = forward(q, k, v, causal, 0.3)
    found = [out, lse, *backward(grad, q, k, v, out, lse, causal, 0.3)]
    with torch.enable_grad():
        leaves = [x.double().detach().requires_grad_() for x in (q, k, v)]
        scores = leaves[0] @ leaves[1].mT * 0.3
        if causal:
            hidden = torch.ones(48, 48, dtype=torch.bool, device=device).triu(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        right = scores.softmax(-1) @ leaves[2]
        wanted = [right, scores.logsumexp(-1), *torch.autograd.grad(right, leaves, grad.double())]
    return max(float((a - b).detach().norm() / b.detach().norm()) for a, b in zip(found, wanted))
