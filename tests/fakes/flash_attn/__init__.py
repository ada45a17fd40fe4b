"""A fake `flash_attn` for tests on a CPU: its attention function, computed by plain products."""

from __future__ import annotations

import torch
from torch import Tensor


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Tensor:
    """Compute attention of [rows, length, heads, size], as the package documents it."""
    assert dropout_p == 0.0
    heads = q.shape[2] // k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = k.repeat_interleave(heads, 1), v.repeat_interleave(heads, 1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])[None]
    behind, ahead = (-1, 0) if causal else window_size
    visible = (distance <= behind if behind >= 0 else distance == distance) & (
        distance >= -ahead if ahead >= 0 else distance == distance
    )
    return (scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v).transpose(1, 2)
