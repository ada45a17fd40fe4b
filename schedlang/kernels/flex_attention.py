"""Attention by torch's FlexAttention (Dong et al., 2024), and its reference by plain products.

Masks, soft caps, sinks and biases become functions of one score, which are compiled into the
kernel. It runs on a GPU, in float32 and below: there is no backward on a CPU, and none in float64.
Otherwise the reference is computed, as in eager attention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from schedlang.kernels import check
from schedlang.kernels.kernel_device import count_run, on_gpu, triton


@dataclass(frozen=True)
class ScoreRule:
    """Transformations of scores: times `scale` (None: 1 / sqrt(head size)), capped, masked.

    cap * tanh(score / cap) if `cap` is not 0; `causal` is aligned at the first key and query.
    """

    scale: float | None = None
    cap: float = 0.0
    causal: bool = False


@dataclass(frozen=True)
class AttentionCall:
    """One call of an attention: q, k and v [rows, heads, length, size], and changes of the scores.

    Keys and values may have fewer heads than queries.
    mask     [rows or 1, heads or 1, queries, keys]: True for visible keys, or added to scores
    bias     added to scores, [rows or 1, heads, queries, keys]
    sinks    a score for each head that takes weight and has no value
    dropout  of the weights; only the reference supports it
    """

    q: Tensor
    k: Tensor
    v: Tensor
    rule: ScoreRule
    mask: Tensor | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    dropout: float = 0.0


def flex_attention(query: AttentionCall) -> Tensor:
    """Compute an attention by FlexAttention if possible, else by plain products."""
    if not runs_flex(query.q):
        count_run("reference")
        return reference(query)
    count_run("torch")
    return _flex(query)


def runs_flex(q: Tensor) -> bool:
    """Return whether FlexAttention has a kernel, forward and backward, for such a tensor here."""
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    return on_gpu(q) and triton is not None and q.dtype in kinds


def reference(query: AttentionCall) -> Tensor:
    """Compute the attention by plain products, with the softmax in float32 at least, and
    dropout."""
    q, k, v, rule, mask = query.q, query.k, query.v, query.rule, query.mask
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if rule.scale is None else rule.scale)
    if rule.cap:
        scores = torch.tanh(scores / rule.cap) * rule.cap
    scores = scores if query.bias is None else scores + query.bias
    allowed = None if mask is None or mask.dtype != torch.bool else mask[..., : k.shape[2]]
    if mask is not None and allowed is None:
        scores = scores + mask[..., : k.shape[2]]
    if rule.causal:
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        allowed = ones if allowed is None else allowed & ones
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    dtype = torch.promote_types(q.dtype, torch.float32)
    weights = _weights(scores.to(dtype), allowed, query.sinks).to(q.dtype)
    return F.dropout(weights, query.dropout) @ v


def _weights(scores: Tensor, allowed: Tensor | None, sinks: Tensor | None) -> Tensor:
    """Return the softmax; a query that sees no key has zero weights."""
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    if allowed is None:
        return scores.softmax(-1)
    blind = ~allowed.any(-1, keepdim=True)
    return scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)


def _flex(call: AttentionCall) -> Tensor:
    q, k, rule, mask, bias = call.q, call.k, call.rule, call.mask, call.bias
    added = mask if mask is not None and mask.dtype != torch.bool else None

    def score(value: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if rule.cap:
            value = torch.tanh(value / rule.cap) * rule.cap
        for term in (bias, added):
            if term is not None:
                full = term.expand(*term.shape[:2], q.shape[2], term.shape[3])
                index = (row if term.shape[0] > 1 else 0, head if term.shape[1] > 1 else 0)
                value = value + full[(*index, query, key)]
        return value

    unmodified = not rule.cap and bias is None and added is None
    out, lse = compiled_flex()(
        q,
        k,
        call.v,
        score_mod=None if unmodified else score,
        block_mask=_blocks(q, k, rule, mask),
        scale=rule.scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_lse=True,
    )
    if call.sinks is None:
        return out  # type: ignore[no-any-return]
    # the sinks take weight: exp(lse) / (exp(lse) + exp(sink)) remains for the keys
    remaining = torch.sigmoid(lse - call.sinks.to(lse.dtype).view(1, -1, 1))
    return (out * remaining.unsqueeze(-1)).to(q.dtype)  # type: ignore[no-any-return]


@functools.cache
def compiled_flex() -> Callable[..., Any]:
    """Return torch's function, compiled once: uncompiled it would write all scores."""
    from torch.nn.attention.flex_attention import flex_attention as flex

    compiled: Callable[..., Any] = torch.compile(flex)
    return compiled


def _blocks(q: Tensor, k: Tensor, rule: ScoreRule, mask: Tensor | None) -> Any:
    """Return the blocks of scores to compute: those in which some query sees a key."""
    lengths = (q.shape[2], k.shape[2])
    if mask is None:
        return _causal_blocks(lengths, q.device) if rule.causal else None
    cached = _BLOCKS.setdefault(mask, {})
    key = (lengths, rule.causal)
    if key not in cached:  # layers share a mask
        cached[key] = _mask_blocks(mask.detach(), lengths, rule.causal)
    return cached[key]


_BLOCKS: MutableMapping[Tensor, dict[Any, Any]] = WeakTensorKeyDictionary()


@functools.lru_cache(maxsize=16)
def _causal_blocks(lengths: tuple[int, int], device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    return create_block_mask(seen, None, None, *lengths, device=device)


def _mask_blocks(mask: Tensor, lengths: tuple[int, int], causal: bool) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    visible = mask
    if mask.dtype != torch.bool:  # if a query sees no key, all its scores are equally low
        visible = mask > torch.finfo(mask.dtype).min / 2
        visible = visible | ~visible.any(-1, keepdim=True)
    rows, heads = visible.shape[:2]
    full = visible.expand(rows, heads, lengths[0], visible.shape[-1])

    def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        allowed = full[row if rows > 1 else 0, head if heads > 1 else 0, query, key]
        return allowed & (query >= key) if causal else allowed

    sizes = (rows if rows > 1 else None, heads if heads > 1 else None)
    return create_block_mask(seen, *sizes, *lengths, device=mask.device)


@dataclass(frozen=True)
class Case(check.Case):
    """A test case of an attention: `shape` is [rows, heads, length, size]."""

    kernel: ClassVar[str] = "flex_attention"
    dtype: str = "bfloat16"
    keys: int = 2
    cap: float = 0.0
    sinks: bool = False
    padded: bool = False

    def draw(self, normal: Callable[..., Tensor]) -> dict[str, Tensor]:
        """Return the differentiated tensors, in float32."""
        rows, _, length, size = self.shape
        kv = (rows, self.keys, length, size)
        tensors = {"query": normal(*self.shape), "key": normal(*kv), "value": normal(*kv)}
        return tensors | ({"sinks": normal(self.shape[1])} if self.sinks else {})

    def run(self, tensors: dict[str, Tensor], kernel: bool) -> Tensor:
        """Run the kernel, or its reference."""
        q, length = tensors["query"], self.shape[2]
        mask = None
        if self.padded:
            mask = torch.ones(self.shape[0], 1, length, length, dtype=torch.bool).tril()
            mask[0, :, 1:, 0] = False
            mask = mask.to(q.device)
        rule = ScoreRule(cap=self.cap, causal=not self.padded)
        call = flex_attention if kernel else reference
        query = AttentionCall(
            q, tensors["key"], tensors["value"], rule, mask, None, tensors.get("sinks")
        )
        return call(query)
