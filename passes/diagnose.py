"""Diagnose: by what arithmetic a wrong tensor comes from the right one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from schedlang.passes.observe import Key, Observation
from schedlang.report import Row

if TYPE_CHECKING:
    from torch import Tensor

_FITS = 1e-6  # relative error below which a pattern is said to fit


def diagnose(
    actual: Tensor | None,
    expected: Tensor | None,
    sizes: Mapping[str, int],
    others: Mapping[str, Tensor | None] | None = None,
) -> str:
    """The pattern that fits, in words; "" if none does.

    `sizes` are the numbers that a mistake may have divided, multiplied or cut by: mesh axes,
    microbatches. `others` are right tensors of other names (or steps) that may have taken this
    one's place.
    """
    if actual is None or expected is None:
        return "there is none: detached, or never reduced to its owner" if actual is None else ""
    if actual.shape != expected.shape:
        return f"shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    if not actual.numel():
        return ""
    x, r = actual.double(), expected.double()
    if not bool(x.isfinite().all()):
        return f"{int((~x.isfinite()).sum())} of {x.numel()} elements are not finite"
    if not x.any():
        return "it is zero: detached, or never received" if r.any() else ""
    return (
        _ratio(x, r, sizes)
        or _taken(x, r, others or {})
        or _blocks(x, r, sizes)
        or _permuted(x, r)
        or _rounded(x, r)
        or "no simple pattern fits"
    )


def explain(row: Row, expected: Observation, actual: Observation, sizes: Mapping[str, int]) -> str:
    """The pattern behind a failing row of `compare`, and what came out right just before it."""
    key = next((k for k in expected.tensors if _is_of(k, row)), None)
    if key is None:
        return ""
    others = {
        k.name if k.name != key.name else f"{k.name} after step {k.step}": value
        for k, value in expected.tensors.items()
        if k != key and k[:2] == key[:2] and (k.step == key.step or k.name == key.name)
    }
    found = diagnose(actual.tensors.get(key), expected.tensors[key], sizes, others)
    order = expected.order
    if row.kind == "gradients" and row.name in order[1:]:
        found += f"; equal just before it in backward: {order[order.index(row.name) - 1]}"
    return found


def _is_of(key: Key, row: Row) -> bool:
    return key == (row.condition, row.kind, row.step, row.name)


def _fits(x: Tensor, r: Tensor) -> bool:
    return float((x - r).norm()) <= _FITS * float(r.norm())


def _ratio(x: Tensor, r: Tensor, sizes: Mapping[str, int]) -> str:
    """The same number times the right tensor everywhere."""
    if not float(r.norm()):
        return ""
    factor = float((x * r).sum() / (r * r).sum())
    if not factor or not _fits(x, factor * r) or abs(factor - 1) <= _FITS:
        return ""
    for words, value in _numbers(sizes):
        if math.isclose(factor, value, rel_tol=_FITS):
            return f"{words} times the right value everywhere"
    return f"{factor:.6g} times the right value everywhere"


def _numbers(sizes: Mapping[str, int]) -> Iterator[tuple[str, float]]:
    """Signed products and quotients of sizes, named; then small integers and their inverses."""
    named = [(name, size) for name, size in sizes.items() if size > 1]
    for count in (1, 2, 3):
        for group in itertools.combinations(named, count):
            words = " · ".join(name for name, _ in group)
            value = math.prod(size for _, size in group)
            inverse = f"1/({words})" if count > 1 else f"1/{words}"
            yield from ((words + f" = {value}", value), (f"{inverse} = 1/{value}", 1 / value))
    for (a, m), (b, n) in itertools.permutations(named, 2):
        yield f"{a}/{b} = {m}/{n}", m / n
    yield "-1", -1.0
    for n in range(2, 17):
        yield from ((str(n), float(n)), (f"1/{n}", 1 / n))


def _taken(x: Tensor, r: Tensor, others: Mapping[str, Tensor | None]) -> str:
    """Another tensor stands in its place."""
    for name, other in others.items():
        if other is None or other.shape != x.shape or not other.any():
            continue
        other = other.double()
        if _fits(x, other) and not _fits(r, other):
            return f"it is the value of {name}"
        if _fits(x - r, other):
            return f"the value of {name} has been added"
    return ""


def _blocks(x: Tensor, r: Tensor, sizes: Mapping[str, int]) -> str:
    """Of n equal blocks along one dim some are right and others not, or all are out of order."""
    for dim, (name, n) in itertools.product(range(x.dim()), sizes.items()):
        if n < 2 or x.shape[dim] % n:
            continue
        ours, right = x.chunk(n, dim), r.chunk(n, dim)
        scale = float(r.norm()) * _FITS
        wrong = [i for i in range(n) if float((ours[i] - right[i]).norm()) > scale]
        where = f"of {n} blocks along dim {dim} ({name} = {n})"
        order = [next((j for j in range(n) if _fits(ours[i], right[j])), None) for i in range(n)]
        if None not in order and order != list(range(n)):
            return f"blocks are out of order: {order} {where}"
        if 0 < len(wrong) < n:
            zero = all(not ours[i].any() for i in wrong)
            which = ", ".join(map(str, wrong))
            return f"only block {which} {where} {'is zero' if zero else 'is wrong'}"
    return ""


def _permuted(x: Tensor, r: Tensor) -> str:
    """The same slices in another order."""
    for dim in range(x.dim()):
        ours, right = (t.movedim(dim, 0).reshape(t.shape[dim], -1) for t in (x, r))
        if len(ours) < 2 or _fits(ours, right):
            continue
        sums = [t.norm(dim=1).sort() for t in (ours, right)]
        if _fits(sums[0].values, sums[1].values) and _fits(
            ours[sums[0].indices], right[sums[1].indices]
        ):
            return f"the right slices along dim {dim}, in another order"
    if x.dim() == 2 and x.shape[0] == x.shape[1] and _fits(x, r.T):
        return "it is transposed"
    return ""


def _rounded(x: Tensor, r: Tensor) -> str:
    """An error of the size of a lower precision's rounding."""
    size = float((x - r).norm() / r.norm()) if float(r.norm()) else math.inf
    for name, low, high in (("float32", 1e-9, 3e-7), ("bfloat16 or float16", 2e-5, 1e-2)):
        if low <= size <= high:
            return f"off by {size:.0e}, the size of {name} rounding: something is not in float64"
    return ""
