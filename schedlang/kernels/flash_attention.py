"""Attention by the package flash_attn (Dao, "FlashAttention-2", 2023), where it is installed.

It takes no masks but the causal one and a window, so that a mask is looked at once, and what is
neither is computed by plain products; so are float32 and float64, which it has not.
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
from schedlang.kernels.device import note, on_gpu
from schedlang.kernels.flex_attention import Query, Rule, reference

PACKAGE = "flash_attn"
_LARGEST = 256  # numbers of a head
Window = tuple[int, int] | None  # keys seen before and behind one's own, -1: all; None: no window


def flash_attention(query: Query) -> Tensor:
    """Compute an attention as the package does where it can, else by plain products."""
    q, rule = query.q, query.rule
    window = window_of(query) if runs_flash(q) else None
    if window is None or query.bias is not None or query.sinks is not None:
        note("reference")
        return reference(query)
    attend = import_module(PACKAGE).flash_attn_func
    note("torch")
    lines = [t.transpose(1, 2) for t in (q, query.k, query.v)]
    more: dict[str, Any] = {"softcap": rule.cap} if rule.cap else {}
    causal = window == (-1, 0)
    out: Tensor = attend(
        *lines,
        softmax_scale=rule.scale,
        causal=causal,
        window_size=(-1, -1) if causal else window,
        **more,
    )
    return out.transpose(1, 2)


def runs_flash(q: Tensor) -> bool:
    """Tell whether the package has a kernel for tensors like this one."""
    return on_gpu(q) and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= _LARGEST


def unfit(query: Query) -> str:
    """Say why the package would not compute this attention on a GPU; empty where it would.

    A mask without values (of a graph, of the meta device) is taken for a window.
    """
    q, mask = query.q, query.mask
    if query.bias is not None or query.sinks is not None:
        return "it supports no bias and no sinks in the scores"
    if q.shape[-1] > _LARGEST:
        return f"it takes heads of at most {_LARGEST} elements"
    if on_gpu(q) and q.dtype == torch.float32:
        return "it takes bfloat16 and float16"
    known = mask is None or (type(mask) is Tensor and not mask.is_meta)
    if known and window_of(query) is None:
        return (
            "its mask is not a window (padding is not one)"
            if mask is not None
            else ("a causal mask needs as many queries as keys")
        )
    return ""


def window_of(query: Query) -> Window:
    """Read a mask as a window around each query's own place; None where it is no window."""
    rule, mask = query.rule, query.mask
    square = query.q.shape[2] == query.k.shape[2]
    if mask is None:
        return None if rule.causal and not square else (-1, 0) if rule.causal else (-1, -1)
    known = _WINDOWS.setdefault(mask, {})
    if rule not in known:  # layers share a mask: it is read once
        known[replace(rule)] = _read(mask.detach(), rule.causal) if square else None
    return known[rule]


_WINDOWS: MutableMapping[Tensor, dict[Rule, Window]] = WeakTensorKeyDictionary()


def _read(mask: Tensor, causal: bool) -> Window:
    seen = mask
    if mask.dtype != torch.bool:
        lowest = torch.finfo(mask.dtype).min / 2
        if bool(((mask != 0) & (mask > lowest)).any()):
            return None  # it adds something
        seen = mask > lowest
    length = seen.shape[-1]
    if seen.shape[-2] != length:
        return (-1, -1) if bool(seen.all()) and not causal else None
    far = torch.arange(length, device=seen.device)
    far = far[:, None] - far[None, :]  # how far a key lies before a query
    if causal:
        seen = seen & (far >= 0)
    shown = far[seen.flatten(0, -3).any(0)]
    if not shown.numel():
        return None
    back, ahead = int(shown.max()), -int(shown.min())
    if not bool((seen == ((far <= back) & (far >= -ahead))).all()):
        return None
    return (-1 if back == length - 1 else back, -1 if ahead == length - 1 else ahead)


class Case(flex_attention.Case):
    """One attention to run, as those of flex_attention."""

    kernel = "flash_attention"

    def run(self, given: dict[str, Tensor], kernel: bool) -> Tensor:
        """Run the kernel, or its reference."""
        call = flash_attention if kernel else reference
        rule = Rule(cap=self.cap, causal=True)
        return call(Query(given["query"], given["key"], given["value"], rule))
