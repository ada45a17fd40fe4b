"""Every kernel against its torch reference: forward and gradients, by dtypes, ragged sizes too.

The rule is that of schedlang/kernels/check.py: both are compared with float64, and a kernel may err
twice as much as eager torch in its dtype, or by a rounding.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from schedlang.kernels import (
    check,
    flash_attention,
    flex_attention,
    gated,
    grouped,
    liger,
    linear_cross_entropy,
    norm,
    rope,
)
from schedlang.kernels.check import Comparison
from schedlang.kernels.flex_attention import AttentionCall, ScoreRule, reference
from schedlang.kernels.kernel_device import INTERPRETED, count_run, triton
from schedlang.runtime.kernel_injection.blind_queries import (
    add_blind_key_gradients,
    find_hidden_keys,
    replace_blind_queries,
)
from schedlang.testing.gpu import contests
from schedlang.testing.gpu.case import Case, Setup, Skipped, Told, Wrong

TYPES = ("float32", "bfloat16", "float16")


def cases(setup: Setup) -> list[Case]:
    """Return a case for each computation, shape and dtype."""
    # unwritten memory becomes NaN; operators without a deterministic form still run
    torch.use_deterministic_algorithms(True, warn_only=True)
    sizes = contests.sizes_of(setup)
    kernel_cases = [
        Case(_case_name(case), functools.partial(_check_kernel, case, setup))
        for case in checks(sizes)
    ]
    chains = [
        Case(
            f"rowwise {dtype} {rows}x{width}",
            functools.partial(_check_chain, sizes, rows, width, dtype, setup),
        )
        for dtype in TYPES
        for rows, width in ((sizes.rows, sizes.width), (3, sizes.width - 3))
    ]
    return kernel_cases + chains


def checks(sizes: contests.Sizes) -> list[Any]:
    """Return cases of each kernel in each dtype: of a size that fills a GPU, and ragged ones."""
    all_cases = [
        case
        for dtype in TYPES
        for case in (*_regular_cases(sizes, dtype), *_ragged_cases(sizes, dtype))
    ]
    if sizes.device == "cuda":  # torch's kernels and packages, which have no interpreter
        all_cases += _package_cases(sizes)
    return all_cases


def _regular_cases(sizes: contests.Sizes, dtype: str) -> Iterator[Any]:
    rows, width = min(sizes.rows, 2048), sizes.width
    odd, heads, size = width * 3 // 4 - 1, sizes.heads, sizes.size
    yield norm.Case((rows, width), dtype, norm.Form(rounding="early"))
    yield norm.Case((rows, odd), dtype, norm.Form(offset=1.0))
    yield norm.Case((rows, width), dtype, norm.Form(True), True)
    yield gated.Case((rows, width), dtype)
    yield gated.Case((rows, width), dtype, "gelu_tanh", "gate first")
    yield norm.Case((rows, width), dtype, add=True)
    yield norm.Case((rows, odd), dtype, norm.Form(True, rounding="early"), True, add=True)
    yield norm.Case((rows, width), dtype, norm.Form(rounding="early", act="silu"))
    yield norm.Case((rows, odd + 1), dtype, norm.Form(act="silu", first=True, groups=4))
    yield rope.Case((2, rows // 2, *heads, size), dtype)
    yield rope.Case((2, rows // 2, 5, 3, 96), dtype, 64, rope.Form(True, True), shared=False)
    yield linear_cross_entropy.Case((rows, 128), dtype, 500, rows=max(1, rows // 3))
    yield linear_cross_entropy.Case((rows, 128), dtype, 500, held=True)


def _ragged_cases(sizes: contests.Sizes, dtype: str) -> Iterator[Any]:
    """Yield one row, rows that fill no block, strided rows, and small numbers."""
    few, odd = 5, sizes.width // 2 + 3
    yield norm.Case((1, odd), dtype)
    yield norm.Case((few, odd), dtype, strided=True)
    yield norm.Case((few, odd), dtype, scale=1e-3)  # eps counts
    yield norm.Case((few, odd), dtype, norm.Form(True))
    yield gated.Case((3, few, odd), dtype, "gelu")
    yield norm.Case((1, odd), dtype, add=True)
    yield norm.Case((few, odd), dtype, norm.Form(act="silu"))
    yield rope.Case((3, 7, 3, 1, 24), dtype, 16)
    yield linear_cross_entropy.Case((few, 33), dtype, 301, bias=True, smoothing=0.1, cap=5.0)
    yield linear_cross_entropy.Case((few, 33), dtype, 301, bias=True, smoothing=0.1, held=True)
    heads, length, size = sizes.heads, min(sizes.length, 500), sizes.size
    yield Blind((2, heads[0], length, size), dtype, heads[1])
    yield Blind((2, heads[0], length, size), dtype, heads[1], "row")


@dataclass(frozen=True)
class Blind(check.Case):
    """Torch's attention under an additive mask that hides all keys from some queries.

    shape   [rows, heads, length, size]; keys and values have `keys` heads
    padded  "left": the first tokens of the last row are padding; "row": all tokens of it are
    """

    kernel: ClassVar[str] = "sdpa"
    dtype: str = "bfloat16"
    keys: int = 2
    padded: str = "left"

    def draw(self, normal: Callable[..., Tensor]) -> dict[str, Tensor]:
        """Return the tensors to differentiate by, in float32."""
        kv = (self.shape[0], self.keys, *self.shape[2:])
        return {"query": normal(*self.shape), "key": normal(*kv), "value": normal(*kv)}

    def run(self, tensors: dict[str, Tensor], kernel: bool) -> Tensor:
        """Run torch's kernel as `replace_kernel(sdpa)` does, or attention written out."""
        q, k, v = lines = tensors["query"], tensors["key"], tensors["value"]
        mask = self._mask(q)
        if not kernel:
            return reference(AttentionCall(q, k, v, ScoreRule(), mask))
        count_run("torch")
        hidden, groups = find_hidden_keys(mask), q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(groups, 1) for x in (k, v))
        masked_query = replace_blind_queries(q, hidden)
        out = F.scaled_dot_product_attention(masked_query, keys, values, hidden.mask)
        contiguous = out.transpose(1, 2).contiguous()
        return add_blind_key_gradients(contiguous, lines, hidden, None).transpose(1, 2)

    def _mask(self, query: Tensor) -> Tensor:
        rows, _, length, _ = self.shape
        allowed = torch.ones(rows, 1, length, length, dtype=torch.bool, device=query.device)
        if self.padded == "row":
            allowed[-1] = False
        else:
            allowed = allowed.tril()
            allowed[-1, :, :, : length // 3] = False
        lowest = torch.finfo(query.dtype).min
        return torch.zeros_like(allowed, dtype=query.dtype).masked_fill(~allowed, lowest)


def _package_cases(sizes: contests.Sizes) -> Iterator[Any]:
    heads, size = sizes.heads, sizes.size
    rows, length = min(sizes.rows, 2048), min(sizes.length, 500)
    for padded, cap in ((False, 0.0), (True, 5.0)):
        shape = (2, heads[0], length, size)
        yield flex_attention.Case(shape, keys=heads[1], padded=padded, cap=cap)
    yield flash_attention.Case((2, heads[0], length, size), keys=heads[1])
    for across in (False, True):
        yield grouped.Case((rows, 256), "bfloat16", 8, 512, across)
    for dtype in TYPES:
        yield liger.Case((rows, sizes.width), dtype)
        yield liger.Case((rows, sizes.width), dtype, norm.Form(True), True)


NEEDS = {"flash_attention": "flash_attn", "liger": "liger_kernel"}  # packages of kernels


def _case_name(case: Any) -> str:
    unusual = [*_unusual_fields(case, type(case)(shape=case.shape, dtype=case.dtype))]
    if hasattr(case, "form"):
        unusual += _unusual_fields(case.form, type(case.form)())
    kind = case.kernel if case.kernel in NEEDS else getattr(case, "name", case.kernel)
    return " ".join([kind, case.dtype, "x".join(map(str, case.shape)), *unusual])


def _unusual_fields(instance: Any, default: Any) -> Iterator[str]:
    """Yield the fields that differ from the defaults."""
    for name, value in vars(instance).items():
        if name not in ("form", "held") and value != getattr(default, name):
            yield f"{name}={value}"


def _check_kernel(case: Any, setup: Setup) -> Told:
    _require_triton(setup)
    package = NEEDS.get(case.kernel)
    if package is not None and importlib.util.find_spec(package) is None:
        raise Skipped(f"`{package}` is not installed")
    result = check.check_case(case, setup.device)
    gc.collect()
    if result.backend == "reference":
        raise Wrong("the kernel itself did not run: its torch reference did")
    return judged(result.comparisons, result.backend)


def _check_chain(sizes: contests.Sizes, rows: int, width: int, dtype: str, setup: Setup) -> Told:
    _require_triton(setup)
    contest = contests.chain(sizes, rows, width)
    return judged(contests.judged(contest, setup.device, getattr(torch, dtype)), "")


def _require_triton(setup: Setup) -> None:
    if triton is None:
        raise Skipped("Triton is not installed")
    if not setup.timed and not INTERPRETED:
        raise Skipped("Triton compiles nothing for this device")


def judged(comparisons: Iterator[Comparison] | Any, backend: str) -> Told:
    """Return the largest share of the allowed error; raise `Wrong` if it is above 1."""
    comparisons = list(comparisons)
    for item in comparisons:
        if not item.ok:
            raise Wrong(
                f"{item.name} is {item.error:.2g} off (allowed {item.allowed:.2g}), at worst "
                f"{item.peak:.2g} (allowed {item.peak_allowed:.2g})"
            )
    share = max(item.error / item.allowed for item in comparisons)
    return Told(
        f"{share:.2f} of the allowed error{f', {backend}' if backend else ''}", {"share": share}
    )
