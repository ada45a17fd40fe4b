"""Attention by the package flash_attn (Dao, "FlashAttention-2", 2023), if it is installed.

It supports no masks except the causal one and a window: a mask is read once, and an attention with
any other mask is computed by plain products. So are float32 and float64, which it does not support.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from schedlang.kernels import flex_attention
from schedlang.kernels.flex_attention import AttentionCall, ScoreRule, reference
from schedlang.kernels.kernel_device import count_run, on_gpu

PACKAGE = "flash_attn"
_LARGEST = 256  # elements of a head
# visible keys before and after a query's own position, -1: all; None: no window
Window = tuple[int, int] | None


def flash_attention(query: AttentionCall) -> Tensor:
    """Compute an attention by the package if possible, else by plain products."""
    q, rule = query.q, query.rule
    window = window_of(query) if runs_flash(q) else None
    if window is None or query.bias is not None or query.sinks is not None:
        count_run("reference")
        return reference(query)
    attend = import_module(PACKAGE).flash_attn_func
    count_run("torch")
    lines = [t.transpose(1, 2) for t in (q, query.k, query.v)]
    options: dict[str, Any] = {"softcap": rule.cap} if rule.cap else {}
    causal = window == (-1, 0)
    out: Tensor = attend(
        *lines,
        softmax_scale=rule.scale,
        causal=causal,
        window_size=(-1, -1) if causal else window,
        **options,
    )
    return out.transpose(1, 2)


def runs_flash(q: Tensor) -> bool:
    """Return whether the package has a kernel for tensors like this one."""
    return on_gpu(q) and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= _LARGEST


def why_declined(query: AttentionCall) -> str:
    """Return why the package would not compute this attention on a GPU; "" if it would.

    A mask without values (in a graph, on the meta device) is assumed to be a window.
    """
    q, mask = query.q, query.mask
    if query.bias is not None or query.sinks is not None:
        return "it supports no bias and no sinks in the scores"
    if q.shape[-1] > _LARGEST:
        return f"it takes heads of at most {_LARGEST} elements"
    if on_gpu(q) and q.dtype == torch.float32:
        return "it takes bfloat16 and float16"
    readable = mask is None or (type(mask) is Tensor and not mask.is_meta)
    if readable and window_of(query) is None:
        return (
            "its mask is not a window (padding is not one)"
            if mask is not None
            else ("a causal mask needs as many queries as keys")
        )
    return ""


def window_of(query: AttentionCall) -> Window:
    """Return a mask as a window around each query's own position; None if it is no window."""
    rule, mask = query.rule, query.mask
    square = query.q.shape[2] == query.k.shape[2]
    if mask is None:
        return None if rule.causal and not square else (-1, 0) if rule.causal else (-1, -1)
    windows = _WINDOWS.setdefault(mask, {})
    if rule not in windows:  # layers share a mask: it is read once
        windows[replace(rule)] = _read_window(mask.detach(), rule.causal) if square else None
    return windows[rule]


_WINDOWS: MutableMapping[Tensor, dict[ScoreRule, Window]] = WeakTensorKeyDictionary()


def _read_window(mask: Tensor, causal: bool) -> Window:
    allowed = mask
    if mask.dtype != torch.bool:
        lowest = torch.finfo(mask.dtype).min / 2
        if bool(((mask != 0) & (mask > lowest)).any()):
            return None  # it adds other values
        allowed = mask > lowest
    length = allowed.shape[-1]
    if allowed.shape[-2] != length:
        return (-1, -1) if bool(allowed.all()) and not causal else None
    distance = torch.arange(length, device=allowed.device)
    # the number of positions between a key and a later query
    distance = distance[:, None] - distance[None, :]
    if causal:
        allowed = allowed & (distance >= 0)
    visible = distance[allowed.flatten(0, -3).any(0)]
    if not visible.numel():
        return None
    behind, ahead = int(visible.max()), -int(visible.min())
    if not bool((allowed == ((distance <= behind) & (distance >= -ahead))).all()):
        return None
    return (-1 if behind == length - 1 else behind, -1 if ahead == length - 1 else ahead)


class Case(flex_attention.Case):
    """A test case of an attention, like those of flex_attention."""

    kernel = "flash_attention"

    def run(self, tensors: dict[str, Tensor], kernel: bool) -> Tensor:
        """Run the kernel, or its reference."""
        call = flash_attention if kernel else reference
        rule = ScoreRule(cap=self.cap, causal=True)
        return call(AttentionCall(tensors["query"], tensors["key"], tensors["value"], rule))
