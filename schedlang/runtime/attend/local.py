"""One rank's queries against keys and values that pass by: blockwise softmax, forward and backward.

Scores exist for a block of queries and keys only.  Blocks are joined by their log-sum-exp (Milakov,
Gimelshein: Online normalizer calculation for softmax, 2018; Dao: FlashAttention-2, 2023), in
float32, or float64 for such tensors.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from schedlang.runtime.attend import flash
from schedlang.runtime.attend.blocks import Pair, Quick, Rules, Tokens, parts
from schedlang.runtime.attend.mask import distance, seen


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which attention is added up."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Forward:
    """The result so far, normalized, and its log-sum-exp: `out` and `lse`."""

    def __init__(self, rules: Rules, q: Tensor, tokens: Tokens, width: int) -> None:
        self.rules, self.q, self.tokens = rules, q, tokens
        kind = wide(q.dtype)
        self.out = q.new_zeros((*q.shape[:3], width), dtype=kind)
        self.lse = q.new_full(q.shape[:3], -math.inf, dtype=kind)

    def add(self, k: Tensor, v: Tensor, keys: Tokens) -> None:
        """Let the queries see more keys."""
        if self.q.is_meta:
            return  # shapes are known, and a long sequence has very many blocks
        for part in parts(self.rules, self.tokens, keys, flash.usable(self.q, v)):
            if isinstance(part, Quick):
                q, cols = self.q[:, :, part.rows], part.cols
                out, lse = flash.forward(
                    q, k[:, :, cols], v[:, :, cols], part.causal, self.rules.scale
                )
                self._merge(part.rows, out.to(self.out.dtype), lse)
            else:
                self._block(part, k, v)

    def _block(self, pair: Pair, k: Tensor, v: Tensor) -> None:
        scores, _ = _scores(self.rules, self.q, k, pair)
        lse = scores.logsumexp(-1)
        weights = (scores - finite(lse)[..., None]).exp_()
        if self.rules.dropout is not None:
            weights *= self.rules.dropout.factor(pair.queries, pair.keys, weights)
        self._merge(pair.rows, _times(weights, v[:, :, pair.cols]), lse)

    def _merge(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Join what a block gives to what is known: both by their share of the sum of exponents."""
        before = self.lse[:, :, rows]
        both = torch.logaddexp(before, lse)
        base = finite(both)
        self.out[:, :, rows] *= (before - base).exp_()[..., None]
        self.out[:, :, rows] += out.mul_((lse - base).exp_()[..., None])
        self.lse[:, :, rows] = both


class Backward:
    """Gradients of one rank's queries, and of each packet of keys that passes by.

    `inner` is, for each query, the sum of result times its gradient, less the log-sum-exp's own;
    `out` the result, where the log-sum-exp has no gradient and flash attention may be used.
    """

    def __init__(
        self, rules: Rules, q: Tensor, tokens: Tokens, lse: Tensor, grad: Tensor, inner: Tensor,
        out: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.rules, self.q, self.tokens = rules, q, tokens
        self.lse, self.grad, self.inner, self.out = lse, grad, inner, out
        self.dq = torch.zeros_like(q, dtype=lse.dtype)
        self.slopes = _like(rules.slopes, lse.dtype)
        self.rows = _like(rules.rows, lse.dtype) if _added(rules.rows) else None

    def add(self, k: Tensor, v: Tensor, keys: Tokens) -> tuple[Tensor, Tensor]:
        """What this rank's queries give to keys and values; their own gradient grows in `dq`."""
        kind = self.lse.dtype
        dk, dv = torch.zeros_like(k, dtype=kind), torch.zeros_like(v, dtype=kind)
        if self.q.is_meta:
            return dk, dv
        quick = self.out is not None and flash.usable(self.q, v)
        for part in parts(self.rules, self.tokens, keys, quick):
            if isinstance(part, Quick):
                self._quick(part, k, v, dk, dv)
            else:
                self._block(part, k, v, dk, dv)
        return dk, dv

    def _quick(self, part: Quick, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor) -> None:
        rows, cols, kind = part.rows, part.cols, self.q.dtype
        assert self.out is not None
        grads = flash.backward(
            self.grad[:, :, rows].to(kind), self.q[:, :, rows], k[:, :, cols], v[:, :, cols],
            self.out[:, :, rows], self.lse[:, :, rows], part.causal, self.rules.scale,
        )  # fmt: skip
        self.dq[:, :, rows] += grads[0]
        dk[:, :, cols] += grads[1]
        dv[:, :, cols] += grads[2]

    def _block(self, pair: Pair, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor) -> None:
        rules, rows, cols = self.rules, pair.rows, pair.cols
        grad = self.grad[:, :, rows]
        scores, slant = _scores(rules, self.q, k, pair)
        weights = (scores - finite(self.lse[:, :, rows])[..., None]).exp_()
        d = _times(grad, v[:, :, cols].mT)
        kept = weights
        if rules.dropout is not None:
            factor = rules.dropout.factor(pair.queries, pair.keys, weights)
            d, kept = d * factor, weights * factor
        dv[:, :, cols] += _onto(kept, grad, v.shape[1])
        d = (d - self.inner[:, :, rows, None]).mul_(weights)
        if self.slopes is not None:
            far = distance(pair.queries, pair.keys, pair.at, pair.to, d)
            self.slopes -= (d * far).sum((0, 2, 3))
        if self.rows is not None:
            into = _rows(self.rows, pair)
            into += d.sum_to_size(into.shape)
        if slant is not None:
            d = d * slant
        d *= rules.scale
        self.dq[:, :, rows] += _times(d, k[:, :, cols])
        dk[:, :, cols] += _onto(d, self.q[:, :, rows], k.shape[1])


def _scores(rules: Rules, q: Tensor, k: Tensor, pair: Pair) -> tuple[Tensor, Tensor | None]:
    """A block's scores, -inf where masked; and the derivative of the cap, if there is one."""
    slant = None
    scores = _times(q[:, :, pair.rows], k[:, :, pair.cols].mT).mul_(rules.scale)
    if rules.cap is not None:
        scores = (scores / rules.cap).tanh_()
        slant = 1 - scores * scores
        scores *= rules.cap
    if rules.slopes is not None:
        far = distance(pair.queries, pair.keys, pair.at, pair.to, scores)
        scores -= rules.slopes.to(scores.dtype)[:, None, None] * far
    if rules.rows is not None:
        made = _rows(rules.rows, pair)
        scores = scores + made if _added(made) else scores.masked_fill_(~made, -math.inf)
    visible = seen(rules.reach, pair.queries, pair.keys, pair.at, pair.to, scores.device)
    return (scores if visible is None else scores.masked_fill_(~visible, -math.inf)), slant


def _rows(rows: Tensor, pair: Pair) -> Tensor:
    """A block's part of a mask over all keys, which lie in the order of the sequence."""
    keys, queries = pair.keys, slice(None) if rows.shape[2] == 1 else pair.rows
    return rows[:, :, queries, keys.start : keys.stop : keys.step]


def _added(rows: Tensor | None) -> bool:
    return rows is not None and rows.dtype != torch.bool


def _like(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if x is None else torch.zeros_like(x, dtype=dtype)


def _times(x: Tensor, y: Tensor) -> Tensor:
    """x @ y by heads, where y may have fewer: x's heads share them in runs."""
    kind = wide(x.dtype)
    rows, heads, count, width = x.shape
    x = x.to(kind).reshape(rows, y.shape[1], heads // y.shape[1] * count, width)
    return (x @ y.to(kind)).view(rows, heads, count, y.shape[-1])


def _onto(x: Tensor, y: Tensor, heads: int) -> Tensor:
    """x.mT @ y, summed over the queries' heads that share one of `heads`."""
    kind = wide(x.dtype)
    x, y = (t.to(kind).reshape(t.shape[0], heads, -1, t.shape[-1]) for t in (x, y))
    return x.mT @ y


def finite(lse: Tensor) -> Tensor:
    """The same with 0 for a query that sees nothing, so that its weights become 0 and not NaN."""
    return lse.masked_fill(lse == -math.inf, 0)
