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
    parts, took = table[:, :2], table[:, 2:]
    best = (np.inf, np.zeros(2))
    for chosen in ([0, 1], [0], [1]):
        scaled = parts[:, chosen] / took
        found = np.zeros(2)
        found[chosen] = np.linalg.lstsq(scaled, np.ones(len(table)), rcond=None)[0]
        off = float(np.abs(parts @ found / took[:, 0] - 1).mean())
        if (found >= 0).all() and off < best[0]:
            best = (off, found)
    off, (start, per) = best
    reached = float((parts[:, 1] / took[:, 0]).max())  # used where the fit gives work no time
    return float(start), float(1 / per) if per > 0 else reached, off


def fit_machine(
    base: Cluster, rates: Sequence[Rate], sent: Sequence[Rate], dtype: str, ranks: int
) -> FittedMachine:
    """Replace the figures of `base` by measured ones, for work in `dtype`.

    FLOPs are counted as 16-bit ones, those in 32 bits twice; so is the speed.
    """
    start = next(one.seconds for one in rates if one.what == "start")
    copies = [(1.0, one.bytes, one.seconds) for one in rates if one.what == "copy"][
        -LARGEST_COPIES:
    ]
    _, stream, off = fit_line(copies)
    how = {"start": "1 size", "stream": _said(copies, off)}
    found: dict[str, float] = {"start": start, "stream": stream, "streaming": 1.0}
    products = {
        name: [(1.0, r.flops, r.seconds) for r in rates if (r.what, r.dtype) == ("product", name)]
        for name in DTYPE_BYTES
    }
    peaks = {name: fit_line(some)[1] for name, some in products.items() if some}
    ramp, rate, off = fit_line(products[dtype])
    how |= dict.fromkeys(("speed", "ramp"), _said(products[dtype], off))
    wide = DTYPE_BYTES[dtype] / 2
    found |= {"speed": rate * wide, "product": 1.0, "ramp": max(0.0, ramp - start)}
    attended = [one for one in rates if (one.what, one.dtype) == ("attention", dtype)]
    if attended:
        reached = max(one.flops / one.seconds for one in attended)
        found["attention"] = min(1.0, reached / rate)
        how["attention"] = f"{len(attended)} sizes, the best"
    made = replace(base, peaks=tuple(sorted(peaks.items())), **found)  # type: ignore[arg-type]
    if not sent:
        return FittedMachine(made, how)
    shared = [(*RING_COSTS[one.what](ranks), one.bytes, one.seconds) for one in sent]
    hop, link, off = fit_line((steps, share * size, took) for steps, share, size, took in shared)
    how |= {"hop": (said := _said(shared, off)), "link": said}
    how |= dict.fromkeys(("network", "far"), "not measured: as within the node")
    over = {"link": link, "network": link, "hop": hop, "far": hop, "linked": 1.0, "routed": 1.0}
    over |= {"node": ranks}
    return FittedMachine(replace(made, library="", **over), how)  # type: ignore[arg-type]


def _said(samples: Sequence[object], off: float) -> str:
    return f"{len(samples)} sizes, {off:.0%} off in the mean"


def machine_toml(found: FittedMachine) -> str:
    """Format the machine as a table of a TOML file, without fields that have their defaults."""
    one, plain = found.cluster, {field.name: field.default for field in fields(Cluster)}
    rows = [f"[{one.name}]"]
    for name, default in list(plain.items())[1:]:
        value = getattr(one, name)
        if value == default:
            continue
        said = f"  # {found.remarks[name]}" if name in found.remarks else ""
        rows.append(f"{name} = {_value(value)}{said}")
    return "\n".join(rows) + "\n"


def _value(value: object) -> str:
    if isinstance(value, tuple):
        return "{ " + ", ".join(f"{name} = {_value(each)}" for name, each in value) + " }"
    if isinstance(value, str):
        return f'"{value}"'
    return f"{value:.4g}" if isinstance(value, float) else str(value)
