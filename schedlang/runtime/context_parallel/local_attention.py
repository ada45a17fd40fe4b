"""One rank's queries against passing keys and values: blockwise, or by torch's flash kernel.

* Whole runs of tokens by torch's own flash attention, which also gives the log-sum-exp. Only for
  what its operators can express: all keys seen, or a plain causal square, below float64. An
  operator is used on a device only after it has given there what plain products give, forward and
  backward.  All that is used of torch's private parts stands here.
* Which blocks of queries and keys there are to compute, and what holds for all of them.
* One rank's queries against keys and values that pass by: blockwise softmax, forward and
  backward. Scores exist for a block of queries and keys only.  Blocks are joined by their log-
  sum-exp (Milakov, Gimelshein: Online normalizer calculation for softmax, 2018; Dao:
  FlashAttention-2, 2023), in float32, or float64 for such tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from schedlang.runtime.context_parallel.token_layout import (
    Dropout,
    Reach,
    Runs,
    Tags,
    distance,
    pieces,
    seen,
)
from schedlang.runtime.device import on_host

SMALL = (torch.float32, torch.bfloat16, torch.float16)


def form(reach: Reach, queries: range, keys: range) -> tuple[slice, slice, bool] | None:
    """Return the queries, the keys, and whether causal, of the one operator that does a block; else
    None."""
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
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return these keys' part of the gradients of q, k and v; `out` and `lse` are those over all
    keys."""
    heads, (k, v) = k.shape[1], (_as_many(k, q), _as_many(v, q))
    if on_host(q):
        lse = lse.transpose(1, 2).contiguous().transpose(1, 2)  # as the operator lays it out
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )
    else:
        none = torch.zeros(2, dtype=torch.int64, device=q.device)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad,
            q,
            k,
            v,
            out,
            lse.contiguous(),
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            causal,
            none,
            none,
            scale=scale,
        )
    return dq, _summed(dk, heads), _summed(dv, heads)


def _as_many(x: Tensor, q: Tensor) -> Tensor:
    copies = q.shape[1] // x.shape[1]
    return x if copies == 1 else x.repeat_interleave(copies, 1)


def _summed(x: Tensor, heads: int) -> Tensor:
    """The gradient of heads that were copied."""
    rows, _, tokens, width = x.shape
    return x if x.shape[1] == heads else x.float().view(rows, heads, -1, tokens, width).sum(2)


def usable(q: Tensor, v: Tensor) -> bool:
    """Return whether torch has an operator for such tensors that has been seen to be right here."""
    same = q.shape[-1] == v.shape[-1]
    return same and not q.is_meta and q.dtype in SMALL and _right(q.dtype, q.device, q.shape[-1])


@lru_cache(maxsize=64)
def _right(dtype: torch.dtype, device: torch.device, width: int) -> bool:
    """Both operators against plain products on a small example, causal and not.

    In a thread of its own, where no modes or hooks of the call that asks hold: those of a
    checkpoint would run its region again, messages and all, at the gradients of the example.
    """
    with ThreadPoolExecutor(1) as alone:
        return alone.submit(_compared, dtype, device, width).result()


def _compared(dtype: torch.dtype, device: torch.device, width: int) -> bool:
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


BLOCK = 256  # tokens


@dataclass(frozen=True)
class Tokens:
    """Tokens of one place: where they lie in the sequence, and what else is known of them."""

    runs: Runs
    tags: Tags


@dataclass(frozen=True)
class Rules:
    """The rules for all blocks of a call; slopes and rows as in `Mask`."""

    reach: Reach
    scale: float
    cap: float | None = None
    slopes: Tensor | None = None
    rows: Tensor | None = None
    dropout: Dropout | None = None
    block: int = BLOCK


@dataclass(frozen=True)
class Pair:
    """A block of queries and a block of keys that see each other somewhere."""

    rows: slice
    cols: slice
    queries: range
    keys: range
    at: Tags
    to: Tags


@dataclass(frozen=True)
class Quick:
    """Runs of queries and of keys that torch's flash attention can do at once."""

    rows: slice
    cols: slice
    causal: bool


def parts(rules: Rules, queries: Tokens, keys: Tokens, quick: bool) -> Iterator[Quick | Pair]:
    """Yield the pairs of queries and keys they see, as blocks, or for flash attention where it
    can."""
    plain = not (
        rules.cap or rules.dropout or any(t is not None for t in (*keys.tags, *queries.tags))
    )
    quick = quick and plain and rules.slopes is None and rules.rows is None
    start = 0
    for run in queries.runs:
        first = 0
        for other in keys.runs:
            made = form(rules.reach, run, other) if quick else None
            if made is not None:
                rows, cols, causal = made
                yield Quick(_moved(rows, start), _moved(cols, first), causal)
            else:
                yield from pairs(
                    rules, Tokens((run,), queries.tags), Tokens((other,), keys.tags), start, first
                )
            first += len(other)
        start += len(run)


def pairs(
    rules: Rules, queries: Tokens, keys: Tokens, start: int = 0, first: int = 0
) -> Iterator[Pair]:
    """All blocks that positions alone do not rule out; tokens begin at `start` and `first`."""
    columns = pieces(keys.runs, rules.block)
    for begin, where in pieces(queries.runs, rules.block):
        rows = _moved(slice(0, len(where)), start + begin)
        at = queries.tags.cut(rows.start, rows.stop)
        for begins, other in columns:
            if not rules.reach.nothing(where, other):
                cols = _moved(slice(0, len(other)), first + begins)
                yield Pair(rows, cols, where, other, at, keys.tags.cut(cols.start, cols.stop))


def _moved(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)


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
        for part in parts(self.rules, self.tokens, keys, usable(self.q, v)):
            if isinstance(part, Quick):
                q, cols = self.q[:, :, part.rows], part.cols
                out, lse = forward(q, k[:, :, cols], v[:, :, cols], part.causal, self.rules.scale)
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
        # the two shares add up to 1 however large the scores are, which lse is rounded by; those of
        # exp(lse - logaddexp) do not.  A query that has seen nothing yet, and nothing now, has none
        more = (lse - before).nan_to_num_(0.0, math.inf, -math.inf)
        self.out[:, :, rows] *= (-more).sigmoid_()[..., None]
        self.out[:, :, rows] += out.mul_(more.sigmoid_()[..., None])
        self.lse[:, :, rows] = torch.logaddexp(before, lse)


class Backward:
    """Gradients of one rank's queries, and of each packet of keys that passes by.

    `inner` is, for each query, the sum of result times its gradient, less the log-sum-exp's own;
    `out` the result, where the log-sum-exp has no gradient and flash attention may be used.
    """

    def __init__(
        self,
        rules: Rules,
        q: Tensor,
        tokens: Tokens,
        lse: Tensor,
        grad: Tensor,
        inner: Tensor,
        out: Tensor | None = None,
    ) -> None:
        self.rules, self.q, self.tokens = rules, q, tokens
        self.lse, self.grad, self.inner, self.out = lse, grad, inner, out
        self.dq = torch.zeros_like(q, dtype=lse.dtype)
        self.slopes = _like(rules.slopes, lse.dtype)
        self.rows = _like(rules.rows, lse.dtype) if _added(rules.rows) else None

    def add(self, k: Tensor, v: Tensor, keys: Tokens) -> tuple[Tensor, Tensor]:
        """Return this rank's part of the gradients of keys and values; add to the queries' own in
        `dq`."""
        kind = self.lse.dtype
        dk, dv = torch.zeros_like(k, dtype=kind), torch.zeros_like(v, dtype=kind)
        if self.q.is_meta:
            return dk, dv
        quick = self.out is not None and usable(self.q, v)
        for part in parts(self.rules, self.tokens, keys, quick):
            if isinstance(part, Quick):
                self._quick(part, k, v, dk, dv)
            else:
                self._block(part, k, v, dk, dv)
        return dk, dv

    def _quick(self, part: Quick, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor) -> None:
        rows, cols, kind = part.rows, part.cols, self.q.dtype
        assert self.out is not None
        grads = backward(
            self.grad[:, :, rows].to(kind),
            self.q[:, :, rows],
            k[:, :, cols],
            v[:, :, cols],
            self.out[:, :, rows],
            self.lse[:, :, rows],
            part.causal,
            self.rules.scale,
        )
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
