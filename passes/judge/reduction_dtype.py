"""Whether ranks sum gradients in the dtype that the program claims.

Bounds of a low dtype hide that. But a sum in a wider dtype has digits that the low dtype lacks: if
each element of a gradient that is stored in more bits is a number of the low dtype, and ranks call
a reduction in it for as many elements, they sum in the low dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from schedlang.diagnostics.diagnostic import quote_names
from schedlang.passes.judge.record import RunRecord
from schedlang.passes.verify.observe import Condition, Key, Observation
from schedlang.report import Gap, Row

KIND = "reduction dtype"
LEAST_NONZERO = 16  # elements that are not zero, so that no sum is rounded by chance
MOST_NAMES = 4


def reduction_rows(
    dtype: str | None, conditions: Sequence[Condition], actual: Observation, record: RunRecord
) -> Iterator[Row]:
    """Yield a failing row for each gradient that ranks sum in fewer bits than the program claims.

    `dtype` is the low dtype of the judgement. Gradients of the first step without clipping are
    examined, as they are, and times the number of ranks.
    """
    narrow = _narrow_dtype(dtype, record)
    if narrow is None:
        return
    assert record.holdings is not None
    condition = next(c for c in conditions if "clipped" not in c.name)
    for name in _wide_names(narrow, record):
        value = actual.tensors.get(Key(condition.name, "gradients", 0, name))
        sizes = [
            math.prod(t.shape) for rank in record.holdings.ranks for t in rank if name in t.pieces
        ]
        calls = [call for call, size in record.reductions.items() if size >= min(sizes, default=0)]
        if value is None or not calls or int((value != 0).sum()) < LEAST_NONZERO:
            continue
        ranks = len(record.holdings.ranks)
        if any(torch.equal(n * value, (n * value).to(narrow).to(value.dtype)) for n in (1, ranks)):
            places = ", ".join(f"`{func}` ({line})" for func, line in sorted(calls))
            note = f"summed in {dtype} by {places}, and `reduce_dtype` is {record.reduce_dtype}"
            yield Row(condition.name, KIND, name, math.inf, 0.0, False, 0, note)


def explain_reductions(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """Describe rows of `reduction_rows`, grouped by the calls."""
    names: dict[str, list[str]] = {}
    for row in rows:
        names.setdefault(row.note, []).append(row.name)
    return ((KIND, f"{len(n)} ({quote_names(n, MOST_NAMES)}): {k}") for k, n in names.items())


def reduction_gaps(dtype: str | None, record: RunRecord) -> Iterator[Gap]:
    """Yield a gap if the program claims a dtype that this judgement does not show."""
    if record.reduce_dtype is None:
        return
    narrow = _narrow_dtype(dtype, record)
    if narrow is not None and any(_wide_names(narrow, record)):
        return
    text = "float64 stands in for all dtypes: `--dtype bfloat16` judges it"
    if narrow is not None:
        text = f"gradients are stored in {dtype}, and rounded to it in any case"
    elif dtype is not None:
        text = f"no gradient is stored in fewer bits than {record.reduce_dtype}"
    yield Gap(f"`reduce_dtype` ({text})", "gradients that are summed in few bits")


def _narrow_dtype(dtype: str | None, record: RunRecord) -> torch.dtype | None:
    """Return the dtype of a judgement if it has fewer bits than the claim."""
    if dtype is None or record.reduce_dtype is None:
        return None
    narrow, claimed = getattr(torch, dtype), getattr(torch, record.reduce_dtype)
    return narrow if torch.finfo(narrow).eps > torch.finfo(claimed).eps else None


def _wide_names(narrow: torch.dtype, record: RunRecord) -> list[str]:
    """Return the parameters that ranks store in more bits."""
    assert record.holdings is not None
    eps, dtypes = torch.finfo(narrow).eps, record.holdings.dtypes
    return [name for name, stored in dtypes.items() if torch.finfo(stored).eps < eps]
