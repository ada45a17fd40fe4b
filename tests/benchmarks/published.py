"""The layout model against published runs: python -m tests.benchmarks.published

--calibrate A.json fits the constants of layouts.py, --evaluate B.json judges them.
Rows are those of Hagemann et al. 2023 (LLaMA on A100), one layout each. How a campaign of runs made
a step is no column of theirs: how often its pipeline runs empty, and whether the time holds a sum
over replicas, is fitted too, where the runs tell it beyond doubt.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from schedlang.passes.simulate.machine import CLUSTERS
from tests.benchmarks.layouts import (
    TIME,
    Layout,
    bytes_of,
    fitted_time,
    memory_of_runs,
    seconds_of,
    time_terms,
)
from tests.benchmarks.weights import Timed, chance, fitted, unlikelihood
from tests.planner.decoders import Decoder

Row = dict[str, Any]
A100 = CLUSTERS["a100"]
TOKENS = 2048 * 2048  # of a step: 2,048 sequences of 2,048 or 512 of 8,192
SHAPES = {
    "llama-13B": Decoder(40, 5120, 40, 13824, 128000, 2048, gated=True),
    "llama-30B": Decoder(60, 6656, 52, 17920, 128000, 2048, gated=True),
    "llama-65B": Decoder(80, 8192, 64, 22016, 128000, 2048, gated=True),
}
FLUSHES = (1, 2, 4, 8, 16)  # of a pipeline in a step, that are tried
EVIDENCE = 6.0  # by how much the logarithm of the likelihood has to rise before one is believed
NEEDED = ("model", "seq", "gpus", "mb", "tp", "pp", "act_ckpt", "kernel", "step_s", "status")


class Wrong(Exception):
    """The rows cannot be used; says why in one line."""


def layout(row: Row) -> Layout:
    """The layout of a row."""
    name = str(row["kernel"])
    kernel = "flash2" if name.startswith("flash_attention2") else name
    kernel = "flash1" if kernel.startswith("flash_attention") else kernel
    if str(row["model"]) not in SHAPES or kernel not in ("torch", "fused", "flash1", "flash2"):
        raise Wrong(f"unknown model or kernel: {row['model']}, {name}")
    sizes = [row[key] for key in ("seq", "gpus", "mb", "tp", "pp")]
    if not all(_number(size) and size > 0 and size == int(size) for size in sizes):
        raise Wrong(f"seq, gpus, mb, tp and pp must be whole and above 0, not {sizes}")
    length, ranks, micro, tp, pp = map(int, sizes)
    one = Layout(
        replace(SHAPES[str(row["model"])], length=length),
        TOKENS // length,
        ranks,
        micro,
        tp,
        pp,
        kernel,
        row["act_ckpt"] not in ("disabled", None, False),
        "RMS" in name,
        row.get("seq_par") in (True, "True", "true", 1),
    )
    if one.dp < 1 or one.count < 1:
        raise Wrong(f"tp * pp * mb is too large for {ranks} ranks: {sizes}")
    return one


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def read(path: Path) -> list[Row]:
    """The rows of a file that ran or ran out of memory."""
    try:
        rows = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise Wrong(f"cannot read {path.name}: {str(error).splitlines()[0]}") from error
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise Wrong(f"{path.name} must be a list of rows, with at least one")
    for row in rows:
        if missing := [key for key in NEEDED if key not in row]:
            raise Wrong(f"{path.name}: a row has no {', '.join(missing)}")
        took = row["step_s"]
        if took is not None and not (_number(took) and took > 0):
            raise Wrong(f"{path.name}: step_s must be a number above 0, not {took!r}")
    rows = [row for row in rows if row["step_s"] is not None or "OOM" in str(row["status"])]
    for row in rows:
        layout(row)
    if not any(row["step_s"] for row in rows):
        raise Wrong(f"{path.name}: no row was measured")
    return rows


def tau(one: Sequence[float], two: Sequence[float]) -> float | None:
    """Kendall's rank correlation over all pairs; None of fewer than two."""
    if len(one) < 2:
        return None
    left, right = np.triu_indices(len(one), 1)
    first, second = np.array(one), np.array(two)
    signs = np.sign(first[left] - first[right]) * np.sign(second[left] - second[right])
    return float(signs.mean())


Habits = dict[str, dict[str, Any]]  # campaign -> what its runs have in common, as fields of Layout


def campaign(row: Row) -> str:
    """Runs that were made together: of one model on so many ranks, with one kind of attention."""
    return f"{row['model']} {row['gpus']} {row['seq']} {layout(row).kernel}"


def layouts(rows: Sequence[Row], habits: Mapping[str, dict[str, Any]]) -> list[Layout]:
    """The layouts of rows, as their campaigns ran them."""
    return [replace(layout(row), **habits.get(campaign(row), {})) for row in rows]


def habits_of(rows: Sequence[Row]) -> Habits:
    """Find what measured runs tell beyond doubt of how their campaigns made a step."""
    took, ran = [row["step_s"] for row in rows], layouts(rows, {})
    names = [campaign(row) for row in rows]

    def ways(name: str) -> Iterator[tuple[dict[str, Any], list[Timed]]]:
        """What a campaign may have done, and the runs by cause as if it had."""
        for way in (
            {"flushes": n, "reduced": reduced} for n in FLUSHES for reduced in (True, False)
        ):
            pairs = zip(names, ran, runs, strict=True)
            yield (
                way,
                [
                    (time_terms(replace(one, **way), A100), as_was[1]) if of == name else as_was
                    for of, one, as_was in pairs
                ],
            )

    def loss(runs: Sequence[Timed]) -> float:
        return unlikelihood(runs, fitted(runs, TIME), TIME)

    found: Habits = {}
    runs: list[Timed] = [(time_terms(one, A100), at) for one, at in zip(ran, took, strict=True)]
    least = loss(runs)
    for name in sorted({name for name, row in zip(names, rows, strict=True) if row["pp"] > 1}):
        tried = [(loss(as_if), at, way, as_if) for at, (way, as_if) in enumerate(ways(name))]
        unlike, _, best, as_if = min(tried)
        if unlike < least - EVIDENCE:
            found, runs, least = found | {name: best}, as_if, unlike
    return found


def calibrated(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Fit the constants of time and of memory, and the habits of campaigns."""
    ran = [row for row in rows if row["step_s"]]
    habits = habits_of(ran)
    return {
        "time": fitted_time(layouts(ran, habits), [row["step_s"] for row in ran], A100),
        "memory": memory_of_runs(layouts(rows, {}), [bool(r["step_s"]) for r in rows], A100),
        "habits": habits,
    }


def evaluated(rows: Sequence[Row], constants: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Compare predictions with rows."""
    groups: dict[str, list[tuple[float | None, float, float]]] = defaultdict(list)
    for row, one in zip(rows, layouts(rows, constants["habits"]), strict=True):
        told = seconds_of(one, A100, constants["time"])
        needed = bytes_of(one, A100, constants["memory"]) / A100.memory
        groups[f"{row['model']} {row['gpus']} {row['seq']}"].append((row["step_s"], told, needed))
    every = [item for items in groups.values() for item in items]
    pairs = [(took, told) for took, told, _ in every if took]
    errors = [abs(told / took - 1) for took, told in pairs]
    right = [(took is not None) == (needed <= 1) for took, _, needed in every]
    judged = {name: _group(items) for name, items in groups.items()}
    lost = [group["regret"] for group in judged.values()]
    return {
        "rows": len(rows),
        "measured": len(pairs),
        "mape": float(np.mean(errors)),
        "p90": float(np.quantile(errors, 0.9)),
        "tau_over_all": tau([pair[0] for pair in pairs], [pair[1] for pair in pairs]),
        "regret": None if None in lost else max(lost),  # of all groups the worst
        "fits_right": float(np.mean(right)),
        "groups": judged,
    }


def _group(items: Sequence[tuple[float | None, float, float]]) -> dict[str, Any]:
    """Compare a group; of what is more likely to fit than not the least time over chance is chosen.

    That is the time expected until one is made, where a try that does not fit costs one as well.
    """
    ran = [(took, told) for took, told, _ in items if took]
    fit = [item for item in items if item[2] <= 1]
    chosen = min(fit, key=lambda item: item[1] / chance(item[2]))[0] if fit else None
    best = min((took for took, _ in ran), default=None)
    return {
        "rows": len(items),
        "tau": tau([pair[0] for pair in ran], [pair[1] for pair in ran]),
        "regret": chosen / best - 1 if chosen and best else None,
        "chosen_does_not_fit": bool(fit) and chosen is None,
    }


def main(words: Sequence[str] | None = None) -> int:
    """Fit, evaluate and print; 2 where the rows are wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calibrate", type=Path, required=True)
    parser.add_argument("--evaluate", type=Path, required=True)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(words)
    try:
        known, asked = read(given.calibrate), read(given.evaluate)
        ran = {layout(row).kernel for row in known if row["step_s"]}
        if unknown := {layout(row).kernel for row in asked} - ran:
            raise Wrong(f"{given.calibrate.name} has no run of {', '.join(sorted(unknown))}")
        constants = calibrated(known)
        found = evaluated(asked, constants) | {"constants": constants}
    except Wrong as error:
        print(error, file=sys.stderr)
        return 2
    if given.json:
        print(json.dumps(found, indent=1))
        return 0
    for name in ("rows", "measured", "mape", "p90", "tau_over_all", "regret", "fits_right"):
        print(f"{name:14} {found[name]}")
    for name, group in found["groups"].items():
        print(name, " ".join(f"{key}={value}" for key, value in group.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
