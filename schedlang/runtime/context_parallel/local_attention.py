"""Local attention: one rank's queries against packets of keys and values, forward and backward.

* Blockwise softmax: scores exist for one block of queries and keys at a time.  Blocks are combined
  by their log-sum-exp (Milakov, Gimelshein: Online normalizer calculation for softmax, 2018; Dao:
  FlashAttention-2, 2023), in float32, or in float64 for float64 tensors.
* Runs of tokens by torch's flash attention, which also returns the log-sum-exp.  Only for masks
  that its operators support: all keys visible, or a causal square; below float64.  An operator is
  used on a device only after its results there, forward and backward, have agreed with plain
  products.  Only this file uses these private operators of torch.
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
    AttentionDropout,
    PositionMask,
    Runs,
    TokenTags,
    key_distances,
    split_runs,
    visible_keys,
)
from schedlang.runtime.device import on_host

FLASH_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def flash_form(
    reach: PositionMask, queries: range, keys: range
) -> tuple[slice, slice, bool] | None:
    """Return (queries, keys, causal) of one flash call that computes a block; None: none does."""
    if reach.shows_all(queries, keys):
        return slice(0, len(queries)), slice(0, len(keys)), False
    if reach != PositionMask(ahead=0) or len(queries) != len(keys) or queries.step != keys.step:
        return None
    late = keys.start - queries.start
    if -keys.step < late <= 0:  # query i and all later queries see key i
        return slice(0, len(queries)), slice(0, len(keys)), True
    if 0 < late < keys.step and len(keys) > 1:  # query i+1 and all later queries see key i
        return slice(1, len(queries)), slice(0, len(keys) - 1), True
    return None


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute flash attention; return the result, and its log-sum-exp in float32."""
    k, v = _repeat_heads(k, q), _repeat_heads(v, q)
    if on_host(q):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=scale
        )
        return out, lse
    results = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False, scale=scale
    )
    return results[0], results[1][:, :, : q.shape[2]]


def flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v for these keys; `out` and `lse` are those of all keys."""
    heads, (k, v) = k.shape[1], (_repeat_heads(k, q), _repeat_heads(v, q))
    if on_host(q):
        lse = lse.transpose(1, 2).contiguous().transpose(1, 2)  # the operator's memory layout
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
    return dq, _sum_copies(dk, heads), _sum_copies(dv, heads)


def _repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    copies = q.shape[1] // x.shape[1]
    return x if copies == 1 else x.repeat_interleave(copies, 1)


def _sum_copies(x: Tensor, heads: int) -> Tensor:
    """Sum the gradients of copied heads."""
    rows, _, tokens, width = x.shape
    return x if x.shape[1] == heads else x.float().view(rows, heads, -1, tokens, width).sum(2)


def can_use_flash(q: Tensor, v: Tensor) -> bool:
    """Return whether torch has a flash operator for these tensors that passed its check here."""
    same_width = q.shape[-1] == v.shape[-1]
    return (
        same_width
        and not q.is_meta
        and q.dtype in FLASH_DTYPES
        and _right(q.dtype, q.device, q.shape[-1])
    )


@lru_cache(maxsize=64)
def _right(dtype: torch.dtype, device: torch.device, width: int) -> bool:
    """Return whether both operators agree with plain products on a small example.

    Runs in a new thread, without the caller's modes and hooks: at the gradients of the example, the
    hooks of a checkpoint would recompute its region, with all its communication.
    """
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(_agrees_with_products, dtype, device, width).result()


def _agrees_with_products(dtype: torch.dtype, device: torch.device, width: int) -> bool:
    bound = max(4 * torch.finfo(dtype).eps, 1e-5)
    try:
        return all(_error(dtype, device, width, causal) < bound for causal in (False, True))
    except (RuntimeError, NotImplementedError):  # no operator, or not for these tensors
        return False


def _error(dtype: torch.dtype, device: torch.device, width: int, causal: bool) -> float:
    """Return the largest relative error of result, log-sum-exp and gradients."""
    generator = torch.Generator().manual_seed(0)
    samples = [torch.randn(1, 2, 48, width, generator=generator) for _ in range(4)]
    q, k, v, grad = (x.to(device, dtype) for x in samples)
    out, lse = flash_forward(q, k, v, causal, 0.3)
    actual = [out, lse, *flash_backward(grad, q, k, v, out, lse, causal, 0.3)]
    with torch.enable_grad():
        leaves = [x.double().detach().requires_grad_() for x in (q, k, v)]
        scores = leaves[0] @ leaves[1].mT * 0.3
        if causal:
            hidden = torch.ones(48, 48, dtype=torch.bool, device=device).triu(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        y = scores.softmax(-1) @ leaves[2]
        expected = [y, scores.logsumexp(-1), *torch.autograd.grad(y, leaves, grad.double())]
    return max(float((a - b).detach().norm() / b.detach().norm()) for a, b in zip(actual, expected))


BLOCK_TOKENS = 256  # tokens


@dataclass(frozen=True)
class PlacedTokens:
    """The tokens of one place: their positions in the sequence, and their tags."""

    runs: Runs
    tags: TokenTags


@dataclass(frozen=True)
class BlockRules:
    """The options of all blocks of an attention call; slopes and rows as in `AttentionMask`."""

    reach: PositionMask
    scale: float
    cap: float | None = None
    slopes: Tensor | None = None
    rows: Tensor | None = None
    dropout: AttentionDropout | None = None
    block: int = BLOCK_TOKENS


@dataclass(frozen=True)
class BlockPair:
    """A block of queries and a block of keys; at least one query sees at least one key.

    rows, cols     their places among the local queries and keys
    queries, keys  their positions
    at, to         the tags of the queries and of the keys
    """

    rows: slice
    cols: slice
    queries: range
    keys: range
    at: TokenTags
    to: TokenTags


@dataclass(frozen=True)
class FlashPair:
    """A run of queries and a run of keys for one call of flash attention."""

    rows: slice
    cols: slice
    causal: bool


def split_work(
    rules: BlockRules, queries: PlacedTokens, keys: PlacedTokens, quick: bool
) -> Iterator[FlashPair | BlockPair]:
    """Yield the pairs of queries and visible keys: for flash attention if possible, else blocks.

    `quick`: whether flash attention may be used.
    """
    no_extras = not (
        rules.cap or rules.dropout or any(t is not None for t in (*keys.tags, *queries.tags))
    )
    quick = quick and no_extras and rules.slopes is None and rules.rows is None
    start = 0
    for q_run in queries.runs:
        key_start = 0
        for k_run in keys.runs:
            flash = flash_form(rules.reach, q_run, k_run) if quick else None
            if flash is not None:
                rows, cols, causal = flash
                yield FlashPair(_shift_slice(rows, start), _shift_slice(cols, key_start), causal)
            else:
                yield from split_blocks(
                    rules,
                    PlacedTokens((q_run,), queries.tags),
                    PlacedTokens((k_run,), keys.tags),
                    start,
                    key_start,
                )
            key_start += len(k_run)
        start += len(q_run)


def split_blocks(
    rules: BlockRules, queries: PlacedTokens, keys: PlacedTokens, start: int = 0, key_start: int = 0
) -> Iterator[BlockPair]:
    """Yield the blocks that positions alone do not hide.

    `start` and `key_start` are the indices of the first query and of the first key.
    """
    columns = split_runs(keys.runs, rules.block)
    for begin, q_run in split_runs(queries.runs, rules.block):
        rows = _shift_slice(slice(0, len(q_run)), start + begin)
        row_tags = queries.tags.narrow(rows.start, rows.stop)
        for begins, k_run in columns:
            if not rules.reach.hides_all(q_run, k_run):
                cols = _shift_slice(slice(0, len(k_run)), key_start + begins)
                yield BlockPair(
                    rows, cols, q_run, k_run, row_tags, keys.tags.narrow(cols.start, cols.stop)
                )


def _shift_slice(part: slice, offset: int) -> slice:
    return slice(part.start + offset, part.stop + offset)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which attention is accumulated."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class BlockwiseForward:
    """The forward over packets of keys.

    `out` is the normalized result so far, `lse` its log-sum-exp.
    """

    def __init__(self, rules: BlockRules, q: Tensor, tokens: PlacedTokens, width: int) -> None:
        self.rules, self.q, self.tokens = rules, q, tokens
        kind = accumulation_dtype(q.dtype)
        self.out = q.new_zeros((*q.shape[:3], width), dtype=kind)
        self.lse = q.new_full(q.shape[:3], -math.inf, dtype=kind)

    def add(self, k: Tensor, v: Tensor, keys: PlacedTokens) -> None:
        """Attend to the keys of one more packet."""
        if self.q.is_meta:
            return  # only shapes matter, and a long sequence has very many blocks
        for part in split_work(self.rules, self.tokens, keys, can_use_flash(self.q, v)):
            if isinstance(part, FlashPair):
                q, cols = self.q[:, :, part.rows], part.cols
                out, lse = flash_forward(
                    q, k[:, :, cols], v[:, :, cols], part.causal, self.rules.scale
                )
                self._merge(part.rows, out.to(self.out.dtype), lse)
            else:
                self._block(part, k, v)

    def _block(self, pair: BlockPair, k: Tensor, v: Tensor) -> None:
        scores, _ = _scores(self.rules, self.q, k, pair)
        lse = scores.logsumexp(-1)
        weights = (scores - replace_infinite(lse)[..., None]).exp_()
        if self.rules.dropout is not None:
            weights *= self.rules.dropout.factor(pair.queries, pair.keys, weights)
        self._merge(pair.rows, _times(weights, v[:, :, pair.cols]), lse)

    def _merge(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Combine a block's result with the result so far, by their shares of the softmax."""
        old_lse = self.lse[:, :, rows]
        # the two sigmoids add up to 1 for scores of any size; exp(lse - logaddexp) would not, as
        # lse is rounded relative to its size.  A query without visible keys keeps 0 and -inf
        excess = (lse - old_lse).nan_to_num_(0.0, math.inf, -math.inf)
        self.out[:, :, rows] *= (-excess).sigmoid_()[..., None]
        self.out[:, :, rows] += out.mul_(excess.sigmoid_()[..., None])
        self.lse[:, :, rows] = torch.logaddexp(old_lse, lse)


class BlockwiseBackward:
    """The backward over packets of keys: gradients of one rank's queries, and of each packet.

    `inner` is, for each query, the sum of result times gradient, minus the gradient of the
    log-sum-exp.  `out` is the result, if the log-sum-exp has no gradient: then flash attention may
    be used.
    """

    def __init__(
        self,
        rules: BlockRules,
        q: Tensor,
        tokens: PlacedTokens,
        lse: Tensor,
        grad: Tensor,
        inner: Tensor,
        out: Tensor | None = None,
    ) -> None:
        self.rules, self.q, self.tokens = rules, q, tokens
        self.lse, self.grad, self.inner, self.out = lse, grad, inner, out
        self.dq = torch.zeros_like(q, dtype=lse.dtype)
        self.slopes = _zeros_like(rules.slopes, lse.dtype)
        self.rows = _zeros_like(rules.rows, lse.dtype) if _is_additive(rules.rows) else None

    def add(self, k: Tensor, v: Tensor, keys: PlacedTokens) -> tuple[Tensor, Tensor]:
        """Return the partial gradients of a packet's keys and values; add the queries' to `dq`."""
        kind = self.lse.dtype
        dk, dv = torch.zeros_like(k, dtype=kind), torch.zeros_like(v, dtype=kind)
        if self.q.is_meta:
            return dk, dv
        quick = self.out is not None and can_use_flash(self.q, v)
        for part in split_work(self.rules, self.tokens, keys, quick):
            if isinstance(part, FlashPair):
                self._quick(part, k, v, dk, dv)
            else:
                self._block(part, k, v, dk, dv)
        return dk, dv

    def _quick(self, part: FlashPair, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor) -> None:
        rows, cols, kind = part.rows, part.cols, self.q.dtype
        assert self.out is not None
        grads = flash_backward(
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

    def _block(self, pair: BlockPair, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor) -> None:
        rules, rows, cols = self.rules, pair.rows, pair.cols
        grad = self.grad[:, :, rows]
        scores, slope = _scores(rules, self.q, k, pair)
        weights = (scores - replace_infinite(self.lse[:, :, rows])[..., None]).exp_()
        d = _times(grad, v[:, :, cols].mT)
        dropped = weights
        if rules.dropout is not None:
            factor = rules.dropout.factor(pair.queries, pair.keys, weights)
            d, dropped = d * factor, weights * factor
        dv[:, :, cols] += _transposed_times(dropped, grad, v.shape[1])
        d = (d - self.inner[:, :, rows, None]).mul_(weights)
        if self.slopes is not None:
            distances = key_distances(pair.queries, pair.keys, pair.at, pair.to, d)
            self.slopes -= (d * distances).sum((0, 2, 3))
        if self.rows is not None:
            row_grads = _rows(self.rows, pair)
            row_grads += d.sum_to_size(row_grads.shape)
        if slope is not None:
            d = d * slope
        d *= rules.scale
        self.dq[:, :, rows] += _times(d, k[:, :, cols])
        dk[:, :, cols] += _transposed_times(d, self.q[:, :, rows], k.shape[1])


def _scores(
    rules: BlockRules, q: Tensor, k: Tensor, pair: BlockPair
) -> tuple[Tensor, Tensor | None]:
    """Return a block's scores, -inf where masked, and the derivative of the cap, if any."""
    slope = None
    scores = _times(q[:, :, pair.rows], k[:, :, pair.cols].mT).mul_(rules.scale)
    if rules.cap is not None:
        scores = (scores / rules.cap).tanh_()
        slope = 1 - scores * scores
        scores *= rules.cap
    if rules.slopes is not None:
        distances = key_distances(pair.queries, pair.keys, pair.at, pair.to, scores)
        scores -= rules.slopes.to(scores.dtype)[:, None, None] * distances
    if rules.rows is not None:
        added = _rows(rules.rows, pair)
        scores = scores + added if _is_additive(added) else scores.masked_fill_(~added, -math.inf)
    visible = visible_keys(rules.reach, pair.queries, pair.keys, pair.at, pair.to, scores.device)
    return (scores if visible is None else scores.masked_fill_(~visible, -math.inf)), slope


def _rows(rows: Tensor, pair: BlockPair) -> Tensor:
    """Return a block's part of `Rules.rows`, whose keys are in the order of the sequence."""
    keys, queries = pair.keys, slice(None) if rows.shape[2] == 1 else pair.rows
    return rows[:, :, queries, keys.start : keys.stop : keys.step]


def _is_additive(rows: Tensor | None) -> bool:
    return rows is not None and rows.dtype != torch.bool


def _zeros_like(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if x is None else torch.zeros_like(x, dtype=dtype)


def _times(x: Tensor, y: Tensor) -> Tensor:
    """Return x @ y for each head; y may have fewer heads, each shared by consecutive heads of x."""
    kind = accumulation_dtype(x.dtype)
    rows, heads, count, width = x.shape
    x = x.to(kind).reshape(rows, y.shape[1], heads // y.shape[1] * count, width)
    return (x @ y.to(kind)).view(rows, heads, count, y.shape[-1])


def _transposed_times(x: Tensor, y: Tensor, heads: int) -> Tensor:
    """Return x.mT @ y, summed over the query heads that share one of `heads` key-value heads."""
    kind = accumulation_dtype(x.dtype)
    x, y = (t.to(kind).reshape(t.shape[0], heads, -1, t.shape[-1]) for t in (x, y))
    return x.mT @ y


def replace_infinite(lse: Tensor) -> Tensor:
    """Replace -inf with 0, so that weights of a query that sees no key become 0, not NaN."""
    return lse.masked_fill(lse == -math.inf, 0)
