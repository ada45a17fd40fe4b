"""What each row of a timeline costs, in ticks: whole numbers where the costs are exact."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedlang.cost import Cost, Number
from schedlang.timeline.clock import Ticks
from schedlang.timeline.table import Kind, Rows, Timeline

Costs = Cost | Mapping[Kind, Number] | NDArray[Any] | Sequence[Number]
LARGEST = 2**62


@dataclass(frozen=True)
class Durations:
    """Ticks of each row and of each transfer; a tick is `tick` units of cost, None: floats."""

    rows: Ticks
    lags: Ticks
    tick: Fraction | None


def durations(t: Timeline, cost: Costs, transfer: Number, made: Rows, used: Rows) -> Durations:
    """The costs of the rows, and of the transfers (made, used) between ranks.

    `transfer` is what a transfer takes where `cost` is not a `Cost`, which says it itself.
    """
    row_at: Any
    lag_at: Any = (0,)
    if isinstance(cost, Cost):
        rows, lags = _of(t, cost), _lags(t, cost)
        row_at = (t.kind, *_index(rows.shape[1:], t.stage, t.slice))
        lag_at = _index(lags.shape, t.stage[made], t.stage[used], t.slice[made])
    elif isinstance(cost, Mapping):
        rows, lags = _array([cost.get(kind, 0) for kind in Kind]), _array([transfer])
        row_at = (t.kind,)
    else:
        rows, lags, row_at = _array(cost), _array([transfer]), slice(None)
        if len(rows) != len(t):
            raise ValueError(f"{len(rows)} costs for {len(t)} operations")
    both = np.concatenate([rows.ravel(), lags.ravel()])
    both, tick = exact_ticks(both, len(t) + len(made))
    rows, lags = both[: rows.size].reshape(rows.shape), both[rows.size :].reshape(lags.shape)
    found = np.zeros(len(made), dtype=both.dtype)
    found[:] = lags[lag_at]
    found[t.rank[made] == t.rank[used]] = 0
    return Durations(rows[row_at], found, tick)


def weights(given: Sequence[Number], count: int, what: str) -> NDArray[Any]:
    """Relative weights with a mean of one, exact where they are given exactly."""
    if len(given) != count:
        raise ValueError(f"{len(given)} weights of {what}, and there are {count}")
    total = sum(number(x) for x in given)
    return np.array([number(x) * count / total for x in given], dtype=object)


_ONE = np.array([Fraction(1)], dtype=object)


def _of(t: Timeline, cost: Cost) -> NDArray[Any]:
    """[kind, stage, slice] in units of cost; stage and slice of size one where all are alike."""
    again = cost.f if cost.recompute is None else cost.recompute
    sliced = {
        Kind.F: cost.f, Kind.I: cost.i, Kind.W: cost.w, Kind.RECOMPUTE: again,
        Kind.B: number(cost.i) + number(cost.w), Kind.EVICT: cost.evict, Kind.LOAD: cost.load,
        Kind.OFFLOAD: cost.offload, Kind.RELOAD: cost.reload,
    }  # fmt: skip
    whole = {
        Kind.UNSHARD: cost.unshard, Kind.RESHARD: cost.reshard, Kind.REDUCE: cost.reduce,
        Kind.STEP: cost.step,
    }  # fmt: skip
    stage = _ONE if cost.shares is None else weights(cost.shares, t.stages, "stages")
    stage = stage * Fraction(t.ranks, max(1, t.stages))
    part = _ONE if cost.slices is None else weights(cost.slices, t.slices, "slices")
    part = part / max(1, t.slices)
    table = _column(sliced) * stage[:, None] * part + _column(whole) * stage[:, None]
    table[Kind.BARRIER] = number(cost.barrier)
    return np.asarray(table)


def _column(costs: Mapping[Kind, Number]) -> NDArray[Any]:
    numbers = [number(costs.get(kind, 0)) for kind in Kind]
    return np.array(numbers, dtype=object)[:, None, None]


def _lags(t: Timeline, cost: Cost) -> NDArray[Any]:
    """[from stage, to stage, slice], of size one where all are alike."""
    part = weights(cost.slices, t.slices, "slices") if cost.slices is not None else _ONE
    table = np.full((1, 1, 1), number(cost.comm), dtype=object)
    if cost.between is not None:
        table = np.full((t.stages, t.stages, 1), number(cost.comm), dtype=object)
        for (source, target), value in cost.between.items():
            table[source, target] = table[target, source] = number(value)
    return table * (part / max(1, t.slices))


def _index(shape: tuple[int, ...], *columns: Any) -> tuple[Any, ...]:
    """Columns as an index, where a dim of size one has one place for all."""
    return tuple(c if size > 1 else 0 for size, c in zip(shape, columns))


def number(value: Number) -> Number:
    """A number that keeps its exactness: Python's own, and whole ones as fractions."""
    if isinstance(value, np.generic):
        value = value.item()
    return Fraction(value) if isinstance(value, int) else value


def _array(values: Any) -> NDArray[Any]:
    found = np.asarray(values)
    if found.dtype == np.float64:
        return found
    return np.array([number(x) for x in values], dtype=object)


def exact_ticks(table: NDArray[Any], count: int) -> tuple[Ticks, Fraction | None]:
    """A table as floats, or as whole numbers of ticks and what a tick is; `count` are added up."""
    if table.dtype != object or any(isinstance(x, float) for x in table.ravel()):
        return table.astype(np.float64), None
    scale = math.lcm(*{x.denominator for x in table.ravel()})
    whole = np.array([int(x * scale) for x in table.ravel()], dtype=object).reshape(table.shape)
    largest = max((abs(x) for x in whole.ravel()), default=0)
    return whole.astype(np.int64 if largest * (count + 1) < LARGEST else object), Fraction(1, scale)
