"""Whether ranks sum gradients in the dtype that the program claims.

Bounds of a low dtype hide that. But a sum in a wider dtype has digits that the low dtype lacks. So
ranks sum a gradient that is stored in more bits in the low dtype if each of its elements is a
number of it, and they are, times a constant, what a reduction in it returns: gradients that are
only computed in a low dtype, and summed in a wide one or by nobody, are found in no such result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from schedlang.diagnostics.diagnostic import quote_names
from schedlang.passes.judge.record import RunRecord
from schedlang.passes.verify.observe import Condition
from schedlang.report import Gap, Row

KIND = "reduction dtype"
LEAST_VALUES = 16  # different ones, so that none are found by chance
MOST_VALUES, MOST_FILTERS, MOST_NAMES = 1024, 64, 4
ROUNDINGS = 2**-6  # of two elements of bfloat16, with a margin


def find_reductions(
    results: Sequence[tuple[str, str, Tensor]], record: RunRecord, rank: int
) -> dict[str, set[str]]:
    """Return the calls whose results are this rank's gradients, by parameter.

    `results` are function, line and result of the reductions of the first step without clipping.
    """
    found: dict[str, set[str]] = {}
    if record.reduce_dtype is None or record.holdings is None:
        return found
    claimed, world = getattr(torch, record.reduce_dtype), len(record.holdings.ranks)
    narrow = [
        (f"{_name(result)} by `{function}` ({line})", result, result.reshape(-1).double())
        for function, line, result in results
        if torch.finfo(result.dtype).eps > torch.finfo(claimed).eps
    ]
    dtypes = {result.dtype for _, result, _ in narrow}
    for (clipped, name), copies in record.copies.items():
        for copy in () if clipped else copies:
            values = copy.values if copy.rank == rank and dtypes else None
            if values is None:
                continue
            held = {dtype for dtype in dtypes if _fits(values, dtype, world)}
            for text, result, numbers in narrow:
                if result.dtype in held and _is_of(numbers, values.double(), world):
                    found.setdefault(name, set()).add(text)
    return found


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _fits(values: Tensor, dtype: torch.dtype, world: int) -> bool:
    """Return whether a dtype of fewer bits holds all values, or all times the number of ranks."""
    if torch.finfo(values.dtype).eps >= torch.finfo(dtype).eps:
        return False
    return any(torch.equal(n * values, (n * values).to(dtype).to(values.dtype)) for n in (1, world))


def _is_of(result: Tensor, gradient: Tensor, world: int) -> bool:
    """Return whether a gradient is a run of a result, or has it as one rank's part, times a
    constant."""
    if result.numel() * world < gradient.numel():
        return False
    long, short = sorted((result, gradient), key=Tensor.numel, reverse=True)
    if len(set(short[short != 0][:MOST_VALUES].tolist())) < LEAST_VALUES:
        return False
    starts = torch.arange(long.numel() - short.numel() + 1)
    anchor = int(short.abs().argmax())
    for number in short.nonzero().reshape(-1)[:MOST_FILTERS].tolist():
        starts = starts[_is_multiple(long, short, starts, anchor, number)]
        if starts.numel() < 2:
            break
    places = torch.arange(short.numel())
    return any(
        bool(_is_multiple(long, short, start, anchor, places).all())
        for start in starts[:MOST_FILTERS]
    )


def _is_multiple(
    long: Tensor, short: Tensor, starts: Tensor, anchor: int, number: int | Tensor
) -> Tensor:
    """Return whether elements of the run are to its anchor as in `short`, by their roundings."""
    here, there = long[starts + number] * short[anchor], long[starts + anchor] * short[number]
    return ((here - there).abs() <= ROUNDINGS * there.abs()) & (long[starts + anchor] != 0)


def reduction_rows(conditions: Sequence[Condition], record: RunRecord) -> Iterator[Row]:
    """Yield a failing row for each gradient that ranks sum in fewer bits than the program claims.

    Gradients of the first step without clipping are examined, as they are.
    """
    condition = next(c for c in conditions if "clipped" not in c.name)
    for name, calls in record.reductions.items():
        note = f"summed in {', '.join(sorted(calls))}, and `reduce_dtype` is {record.reduce_dtype}"
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
