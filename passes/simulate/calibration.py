"""A machine fitted to measured rates, and its text as a TOML file, for `schedlang calibrate`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np

from schedlang.passes.simulate.machine import RING_COSTS, Cluster

if TYPE_CHECKING:
    from schedlang.runtime.device_rates import Rate

LARGEST_COPIES = 4  # the largest sizes of copies count: smaller ones stay in a cache
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}  # bytes


@dataclass(frozen=True)
class FittedMachine:
    """A machine, and for each field how it was found: number of samples, and their mean error."""

    cluster: Cluster
    remarks: Mapping[str, str]


def fit_line(samples: Iterable[tuple[float, float, float]]) -> tuple[float, float, float]:
    """Fit seconds = steps * a + work / b; return a, b and the mean relative error.

    Each of `samples` is (steps, work, seconds).  Least squares of relative errors, with a and 1/b
    not below 0.  Where seconds do not depend on work, b is the highest rate of the samples.  Raises
    ValueError without samples.
    """
    table = np.array(list(samples), dtype=np.float64)
    if not len(table):
        raise ValueError("nothing was measured")
    if len(table) == 1:
        table = np.array([[0.0, *table[0, 1:]]])  # all of it is work
    parts, seconds = table[:, :2], table[:, 2:]
    best = (np.inf, np.zeros(2))
    for columns in ([0, 1], [0], [1]):
        scaled = parts[:, columns] / seconds
        solution = np.zeros(2)
        solution[columns] = np.linalg.lstsq(scaled, np.ones(len(table)), rcond=None)[0]
        error = float(np.abs(parts @ solution / seconds[:, 0] - 1).mean())
        if (solution >= 0).all() and error < best[0]:
            best = (error, solution)
    error, (start, per_unit) = best
    best_rate = float((parts[:, 1] / seconds[:, 0]).max())  # used where the fit gives work no time
    return float(start), float(1 / per_unit) if per_unit > 0 else best_rate, error


def fit_machine(
    base: Cluster, rates: Sequence[Rate], sent: Sequence[Rate], dtype: str, ranks: int
) -> FittedMachine:
    """Replace the figures of `base` by measured ones, for work in `dtype`.

    FLOPs are counted as 16-bit ones, those in 32 bits twice; so is the speed.
    """
    start = next(item.seconds for item in rates if item.what == "start")
    copies = [(1.0, item.bytes, item.seconds) for item in rates if item.what == "copy"][
        -LARGEST_COPIES:
    ]
    _, stream, error = fit_line(copies)
    remarks = {"start": "1 size", "stream": _said(copies, error)}
    fields: dict[str, float] = {"start": start, "stream": stream, "streaming": 1.0}
    products = {
        name: [(1.0, r.flops, r.seconds) for r in rates if (r.what, r.dtype) == ("product", name)]
        for name in DTYPE_BYTES
    }
    peaks = {name: fit_line(samples)[1] for name, samples in products.items() if samples}
    ramp, rate, error = fit_line(products[dtype])
    remarks |= dict.fromkeys(("speed", "ramp"), _said(products[dtype], error))
    width_ratio = DTYPE_BYTES[dtype] / 2
    fields |= {"speed": rate * width_ratio, "product": 1.0, "ramp": max(0.0, ramp - start)}
    attention = [item for item in rates if (item.what, item.dtype) == ("attention", dtype)]
    if attention:
        reached = max(item.flops / item.seconds for item in attention)
        fields["attention"] = min(1.0, reached / rate)
        remarks["attention"] = f"{len(attention)} sizes, the best"
    fitted = replace(base, peaks=tuple(sorted(peaks.items())), **fields)  # type: ignore[arg-type]
    if not sent:
        return FittedMachine(fitted, remarks)
    shared = [(*RING_COSTS[item.what](ranks), item.bytes, item.seconds) for item in sent]
    hop, link, error = fit_line(
        (steps, share * size, seconds) for steps, share, size, seconds in shared
    )
    remarks |= {"hop": (remark := _said(shared, error)), "link": remark}
    remarks |= dict.fromkeys(("network", "far"), "not measured: as within the node")
    link_fields = {
        "link": link,
        "network": link,
        "hop": hop,
        "far": hop,
        "linked": 1.0,
        "routed": 1.0,
    }
    link_fields |= {"node": ranks}
    return FittedMachine(replace(fitted, library="", **link_fields), remarks)  # type: ignore[arg-type]


def _said(samples: Sequence[object], off: float) -> str:
    return f"{len(samples)} sizes, {off:.0%} off in the mean"


def machine_toml(fitted: FittedMachine) -> str:
    """Format the machine as a table of a TOML file, without fields that have their defaults."""
    cluster, defaults = fitted.cluster, {field.name: field.default for field in fields(Cluster)}
    rows = [f"[{cluster.name}]"]
    for name, default in list(defaults.items())[1:]:
        value = getattr(cluster, name)
        if value == default:
            continue
        remark = f"  # {fitted.remarks[name]}" if name in fitted.remarks else ""
        rows.append(f"{name} = {_value(value)}{remark}")
    return "\n".join(rows) + "\n"


def _value(value: object) -> str:
    if isinstance(value, tuple):
        return "{ " + ", ".join(f"{name} = {_value(item)}" for name, item in value) + " }"
    if isinstance(value, str):
        return f'"{value}"'
    return f"{value:.4g}" if isinstance(value, float) else str(value)
