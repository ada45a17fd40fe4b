"""Rotary position embeddings of queries and keys: one Triton kernel, both in one launch.

Su et al., "RoFormer: enhanced transformer with rotary position embedding" (2021): pairs of numbers
of a head are rotated by angles that depend on the token. A pair (a, b) of the first `width` numbers
of a head becomes a * cos - b * sin and b * cos + a * sin; the other numbers stay. A gradient is
rotated back by the same kernel. `Form` says which numbers form a pair, and which angle belongs to
each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from schedlang.kernels import check
from schedlang.kernels.kernel_device import (
    can_run_kernel,
    compute_dtype,
    count_kernel_run,
    launch_kernel,
    tl,
    triton,
)

if triton is not None:
    from schedlang.kernels.kernel_device import rounded


@dataclass(frozen=True)
class Form:
    """The layout of a rotation in a model.

    pairs   pair j is (2j, 2j + 1), else (j, j + width / 2)
    paired  the same for the result
    own     each number has cosine and sine at its position in the result, else pair j has the j-th
    heads   the dim of heads: 1 for [rows, heads, tokens, size], 2 for [rows, tokens, heads, size]
    early   both products and the sum are rounded; else only the sum
    keeps   the result has the dtype of its input, even if the angles' dtype is wider
    """

    pairs: bool = False
    paired: bool = False
    own: bool = True
    heads: int = 1
    early: bool = True
    keeps: bool = False


def rotate(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, width: int, form: Form) -> Any:
    """Rotate q and k; only q if `k` is None. `cos` and `sin` are [rows or 1, tokens, angles].

    Differentiable in `q` and `k`, any number of times.
    """
    options = (form.pairs, form.paired, form.own, form.heads, form.early, form.keeps)
    turned, turned_k = rope_turn(q, k, cos, sin, width, *options, False)
    return turned if k is None else (turned, turned_k)


def reference(x: Tensor, cos: Tensor, sin: Tensor, width: int, form: Form) -> Tensor:
    """Rotate one tensor by plain torch operations."""
    return _rotate(x, cos, sin, width, form, False)


def _result_dtype(x: Tensor, cos: Tensor, form: Form) -> torch.dtype:
    keeps = form.keeps or not form.early
    return x.dtype if keeps else torch.promote_types(x.dtype, cos.dtype)


def _split(x: Tensor, pairs: bool) -> tuple[Tensor, Tensor]:
    if pairs:
        return x[..., 0::2], x[..., 1::2]
    first, second = x.chunk(2, -1)
    return first, second


def _join(a: Tensor, b: Tensor, pairs: bool) -> Tensor:
    return torch.stack((a, b), -1).flatten(-2) if pairs else torch.cat((a, b), -1)


def _angles(table: Tensor, width: int, form: Form) -> tuple[Tensor, Tensor]:
    """Return the angles of both numbers of each pair, with a dim for heads."""
    table = table.unsqueeze(form.heads)
    if form.own:
        return _split(table[..., :width], form.paired)
    return table[..., : width // 2], table[..., : width // 2]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, width: int, form: Form, inverse: bool) -> Tensor:
    kind = _result_dtype(x, cos, form)
    if not form.early:
        inner = compute_dtype(x, cos)
        x, cos, sin = x.to(inner), cos.to(inner), sin.to(inner)
    a, b = _split(x[..., :width], form.paired if inverse else form.pairs)
    (c, d), (s, t) = _angles(cos, width, form), _angles(sin, width, form)
    rotated = (a * c + b * t, b * d - a * s) if inverse else (a * c - b * s, b * d + a * t)
    turned = _join(*rotated, form.pairs if inverse else form.paired).to(kind)
    return torch.cat((turned, x[..., width:].to(kind)), -1) if width < x.shape[-1] else turned


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _load(x, line, valid, half, PAIRS, LINES: tl.constexpr, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
        """Load both numbers of each pair in float32; `line` [LINES, 1] is the start of each
        line."""
        if PAIRS:  # adjacent: one access, split in registers
            column = tl.arange(0, 2 * HALF)[None, :]
            pair = tl.load(x + line + column, mask=valid & (column < 2 * half), other=0.0)
            first, second = tl.split(tl.reshape(pair.to(tl.float32), (LINES, HALF, 2)))
        else:
            column = tl.arange(0, HALF)[None, :]
            inside = valid & (column < half)
            first = tl.load(x + line + column, mask=inside, other=0.0).to(tl.float32)
            second = tl.load(x + line + half + column, mask=inside, other=0.0).to(tl.float32)
        return first, second

    @triton.jit  # type: ignore[untyped-decorator]
    def _store(y, line, valid, half, first, second, PAIRS, LINES: tl.constexpr, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
        """Write both numbers of each pair."""
        first = first.to(y.dtype.element_ty)
        second = second.to(y.dtype.element_ty)
        if PAIRS:
            column = tl.arange(0, 2 * HALF)[None, :]
            pair = tl.reshape(tl.join(first, second), (LINES, 2 * HALF))
            tl.store(y + line + column, pair, mask=valid & (column < 2 * half))
        else:
            column = tl.arange(0, HALF)[None, :]
            inside = valid & (column < half)
            tl.store(y + line + column, first, mask=inside)
            tl.store(y + line + half + column, second, mask=inside)

    @triton.jit  # type: ignore[untyped-decorator]
    def _turn(  # type: ignore[no-untyped-def]
        x,
        y,
        heads,
        half,
        size,
        x_head,
        y_head,
        c,
        d,
        s,
        t,
        SOURCE,
        TARGET,
        EARLY,
        BACK,
        LINES: tl.constexpr,
        HALF: tl.constexpr,
        REST: tl.constexpr,
    ):
        """Rotate all heads of one token."""
        for start in range(0, heads, LINES):
            head = (start + tl.arange(0, LINES)[:, None]).to(tl.int64)
            valid = head < heads
            a, b = _load(x, head * x_head, valid, half, SOURCE, LINES, HALF)
            if BACK:
                left, right, under, over = a * c, b * t, b * d, -(a * s)
            else:
                left, right, under, over = a * c, -(b * s), b * d, a * t
            if EARLY:
                left, right = rounded(left, x), rounded(right, x)
                under, over = rounded(under, x), rounded(over, x)
            line = head * y_head
            _store(y, line, valid, half, left + right, under + over, TARGET, LINES, HALF)
            if REST > 0:
                column = 2 * half + tl.arange(0, REST)[None, :]
                inside = valid & (column < size)
                passed = tl.load(x + head * x_head + column, mask=inside, other=0.0)
                tl.store(y + line + column, passed.to(y.dtype.element_ty), mask=inside)

    @triton.jit  # type: ignore[untyped-decorator]
    def turn_kernel(  # type: ignore[no-untyped-def]
        q,
        k,
        yq,
        yk,
        cos,
        sin,
        tokens,
        q_heads,
        k_heads,
        half,
        size,
        q_row,
        q_token,
        q_head,
        k_row,
        k_token,
        k_head,
        yq_row,
        yq_token,
        yq_head,
        yk_row,
        yk_token,
        yk_head,
        cos_row,
        cos_token,
        sin_row,
        sin_token,
        SOURCE: tl.constexpr,
        TARGET: tl.constexpr,
        OWN: tl.constexpr,
        PAIRED: tl.constexpr,
        EARLY: tl.constexpr,
        BACK: tl.constexpr,
        KEYS: tl.constexpr,
        Q_LINES: tl.constexpr,
        K_LINES: tl.constexpr,
        HALF: tl.constexpr,
        REST: tl.constexpr,
    ):
        """Rotate the query and the key of one token."""
        number = tl.program_id(0).to(tl.int64)
        row = number // tokens
        token = number % tokens
        cos += row * cos_row + token * cos_token
        sin += row * sin_row + token * sin_token
        none = tl.zeros((1, 1), tl.int64)
        if OWN:
            c, d = _load(cos, none, none == 0, half, PAIRED, 1, HALF)
            s, t = _load(sin, none, none == 0, half, PAIRED, 1, HALF)
        else:
            column = tl.arange(0, HALF)[None, :]
            c = tl.load(cos + column, mask=column < half, other=0.0).to(tl.float32)
            s = tl.load(sin + column, mask=column < half, other=0.0).to(tl.float32)
            d = c
            t = s
        x = q + row * q_row + token * q_token
        y = yq + row * yq_row + token * yq_token
        _turn(
            x,
            y,
            q_heads,
            half,
            size,
            q_head,
            yq_head,
            c,
            d,
            s,
            t,
            SOURCE,
            TARGET,
            EARLY,
            BACK,
            Q_LINES,
            HALF,
            REST,
        )
        if KEYS:
            x = k + row * k_row + token * k_token
            y = yk + row * yk_row + token * yk_token
            _turn(
                x,
                y,
                k_heads,
                half,
                size,
                k_head,
                yk_head,
                c,
                d,
                s,
                t,
                SOURCE,
                TARGET,
                EARLY,
                BACK,
                K_LINES,
                HALF,
                REST,
            )


def heads_per_program(heads: int, half: int) -> int:
    """Return the number of heads that a program rotates at a time."""
    return max(1, min(_next_power(heads), 2048 // _next_power(half)))


def _next_power(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def _with_dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(x: Tensor, heads: int) -> tuple[int, int, int]:
    return x.stride(0), x.stride(3 - heads), x.stride(heads)


def _launch(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, width: int, form: Form, inverse: bool
) -> tuple[Tensor, Tensor]:
    """Rotate both in one launch; each result has the memory layout of its input."""
    inputs = [_with_dense_rows(x) for x in ((q,) if k is None else (q, k))]
    outputs = [torch.empty_like(x, dtype=_result_dtype(x, cos, form)) for x in inputs]
    first, last = inputs[0], inputs[-1]
    tables = [_with_dense_rows(t) for t in (cos, sin)]
    rows, tokens, size = q.shape[0], q.shape[3 - form.heads], q.shape[3]
    early = form.early and torch.promote_types(q.dtype, cos.dtype) == q.dtype
    half = width // 2
    heads = [x.shape[form.heads] for x in (first, last)]
    strides = [s for x in (first, last, outputs[0], outputs[-1]) for s in _strides(x, form.heads)]
    angles = [s for t in tables for s in (t.stride(0) if t.shape[0] > 1 else 0, t.stride(1))]
    launch_kernel(
        turn_kernel,
        (rows * tokens,),
        first,
        last,
        outputs[0],
        outputs[-1],
        *tables,
        tokens,
        *heads,
        half,
        size,
        *strides,
        *angles,
        SOURCE=form.paired if inverse else form.pairs,
        TARGET=form.pairs if inverse else form.paired,
        OWN=form.own,
        PAIRED=form.paired,
        EARLY=early,
        BACK=inverse,
        KEYS=k is not None,
        Q_LINES=heads_per_program(heads[0], half),
        K_LINES=heads_per_program(heads[1], half),
        HALF=_next_power(half),
        REST=_next_power(size - width) if size > width else 0,
        warps=4,
    )
    return outputs[0], q.new_empty(0) if k is None else outputs[1]


@torch.library.custom_op("schedlang::rope_turn", mutates_args=())
def rope_turn(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    width: int,
    pairs: bool,
    paired: bool,
    own: bool,
    heads: int,
    early: bool,
    keeps: bool,
    inverse: bool,
) -> tuple[Tensor, Tensor]:
    """Rotate (q, k), or rotate them back; the second result is empty without `k`."""
    form = Form(pairs, paired, own, heads, early, keeps)
    kernel = can_run_kernel(q, k, cos, sin, longest=None)
    count_kernel_run(kernel)
    return (_launch if kernel else _by_torch)(q, k, cos, sin, width, form, inverse)


@rope_turn.register_fake
def _(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    width, *form, inverse = args
    return _by_torch(q, k, cos, sin, width, Form(*form), inverse)


def _by_torch(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, width: int, form: Form, inverse: bool
) -> tuple[Tensor, Tensor]:
    """Rotate both by plain torch operations; each result has the memory layout of its input."""
    outputs = []
    for x in (q,) if k is None else (q, k):
        y = torch.empty_like(_with_dense_rows(x), dtype=_result_dtype(x, cos, form))
        outputs.append(y.copy_(_rotate(x, cos, sin, width, form, inverse)))
    return outputs[0], q.new_empty(0) if k is None else outputs[1]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, cos, sin, *ctx.form, ctx.back = inputs
    ctx.kinds = q.dtype, None if k is None else k.dtype
    ctx.save_for_backward(cos, sin)


def _differentiate(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
    assert not (ctx.needs_input_grad[2] or ctx.needs_input_grad[3]), "angles that are learned"
    first, second = ctx.kinds
    cos, sin = ctx.saved_tensors
    q, k = rope_turn(dq, None if second is None else dk, cos, sin, *ctx.form, not ctx.back)
    return q.to(first), None if second is None else k.to(second), *(None,) * 10


rope_turn.register_autograd(_differentiate, setup_context=_save)


@dataclass(frozen=True)
class Case(check.Case):
    """A test case of a rotation: `shape` is [rows, tokens, heads of q, heads of k, size of a head].

    If strided, the heads of a token are adjacent, as projections return them.
    """

    kernel: ClassVar[str] = "rope"
    width: int = 0  # 0: the full head
    form: Form = Form()
    shared: bool = True  # all rows have the same angles
    scale: float = 1.0

    def draw(self, normal: Callable[..., Tensor]) -> dict[str, Tensor]:
        """Return the differentiated tensors, in float32."""
        rows, tokens, *heads, size = self.shape
        by_head = self.form.heads == 1
        shapes = [(rows, n, tokens, size) if by_head else (rows, tokens, n, size) for n in heads]
        return {n: normal(*s) * self.scale for n, s in zip(("query", "key"), shapes)}

    def run(self, tensors: dict[str, Tensor], kernel: bool) -> Tensor:
        """Run the kernel, or its reference."""
        width = self.width or self.shape[-1]
        rows, tokens = 1 if self.shared else self.shape[0], self.shape[1]
        generator = torch.Generator().manual_seed(self.seed + 1)
        angle = torch.rand((rows, tokens, width), generator=generator) * 7
        q, k = tensors["query"], tensors["key"]
        cos, sin = (t.to(q.device, q.dtype) for t in (angle.cos(), angle.sin()))
        if kernel:
            turned = rotate(q, k, cos, sin, width, self.form)
        else:
            turned = tuple(reference(x, cos, sin, width, self.form) for x in (q, k))
        return torch.cat(turned, self.form.heads)
