"""The layout model against published runs: python -m tests.benchmarks.published

--calibrate A.json fits the constants of layouts.py, --evaluate B.json judges them.
Rows are those of Hagemann et al. 2023 (LLaMA on A100), one layout each. Their table does not say
how often a campaign's pipeline is flushed in a step, or whether times include a gradient reduction;
both are fitted too, if the runs give enough evidence.
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
from tests.benchmarks.cost_weights import Timed, fit_weights, neg_log_prob
from tests.benchmarks.layouts import (
    TIME,
    Layout,
    fitted_fill,
    fitted_time,
    peak_bytes,
    predict_time,
    time_terms,
)
from tests.planner.decoders import Decoder

Row = dict[str, Any]
A100 = CLUSTERS["a100"]
TOKENS = 2048 * 2048  # of a step: 2,048 sequences of 2,048 or 512 of 8,192
SHAPES = {
    "llama-13B": Decoder(40, 5120, 40, 13824, 128000, 2048, gated=True),
    "llama-30B": Decoder(60, 6656, 52, 17920, 128000, 2048, gated=True),
    "llama-65B": Decoder(80, 8192, 64, 22016, 128000, 2048, gated=True),
}
FLUSHES = (1, 2, 4, 8, 16)  # pipeline flushes in a step that are tried
RESERVE = 0.01  # share of the memory that the chosen layout leaves, by the fitted law of memory
EVIDENCE = 6.0  # necessary gain in log likelihood to accept a habit
NEEDED = ("model", "seq", "gpus", "mb", "tp", "pp", "act_ckpt", "kernel", "step_s", "status")


class BadRows(Exception):
    """The rows cannot be used; says why in one line."""


def layout_of(row: Row) -> Layout:
    """Return the layout of a row."""
    name = str(row["kernel"])
    kernel = "flash2" if name.startswith("flash_attention2") else name
    kernel = "flash1" if kernel.startswith("flash_attention") else kernel
    if str(row["model"]) not in SHAPES or kernel not in ("torch", "fused", "flash1", "flash2"):
        raise BadRows(f"unknown model or kernel: {row['model']}, {name}")
    sizes = [row[key] for key in ("seq", "gpus", "mb", "tp", "pp")]
    if not all(_is_number(size) and size > 0 and size == int(size) for size in sizes):
        raise BadRows(f"seq, gpus, mb, tp and pp must be whole and above 0, not {sizes}")
    length, ranks, micro, tp, pp = map(int, sizes)
    result = Layout(
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
    if result.dp < 1 or result.count < 1:
        raise BadRows(f"tp * pp * mb is too large for {ranks} ranks: {sizes}")
    return result


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file that ran or ran out of memory."""
    try:
        rows = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadRows(f"cannot read {path.name}: {str(error).splitlines()[0]}") from error
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise BadRows(f"{path.name} must be a list of rows, with at least one")
    for row in rows:
        if missing := [key for key in NEEDED if key not in row]:
            raise BadRows(f"{path.name}: a row has no {', '.join(missing)}")
        step_time = row["step_s"]
        if step_time is not None and not (_is_number(step_time) and step_time > 0):
            raise BadRows(f"{path.name}: step_s must be a number above 0, not {step_time!r}")
    rows = [row for row in rows if row["step_s"] is not None or "OOM" in str(row["status"])]
    for row in rows:
        layout_of(row)
    if not any(row["step_s"] for row in rows):
        raise BadRows(f"{path.name}: no row was measured")
    return rows


def kendall_tau(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Return Kendall's rank correlation over all pairs; None for fewer than two values."""
    if len(xs) < 2:
        return None
    left_index, right_index = np.triu_indices(len(xs), 1)
    left_values, right_values = np.array(xs), np.array(ys)
    signs = np.sign(left_values[left_index] - left_values[right_index]) * np.sign(
        right_values[left_index] - right_values[right_index]
    )
    return float(signs.mean())


Habits = dict[str, dict[str, Any]]  # campaign -> common fields of its layouts


def campaign(row: Row) -> str:
    """Return the campaign of a run: model, ranks, sequence length and attention kernel."""
    return f"{row['model']} {row['gpus']} {row['seq']} {layout_of(row).kernel}"


def layouts_of(rows: Sequence[Row], habits: Mapping[str, dict[str, Any]]) -> list[Layout]:
    """Return the layouts of rows, with the habits of their campaigns."""
    return [replace(layout_of(row), **habits.get(campaign(row), {})) for row in rows]


def fit_habits(rows: Sequence[Row]) -> Habits:
    """Return the habits of campaigns for which measured runs give enough evidence."""
    step_times, run_layouts = [row["step_s"] for row in rows], layouts_of(rows, {})
    names = [campaign(row) for row in rows]

    def ways(name: str) -> Iterator[tuple[dict[str, Any], list[Timed]]]:
        """Yield each possible habit of a campaign, with the runs by cause under it."""
        for habit in (
            {"flushes": n, "reduced": reduced} for n in FLUSHES for reduced in (True, False)
        ):
            pairs = zip(names, run_layouts, runs, strict=True)
            yield (
                habit,
                [
                    (time_terms(replace(run_layout, **habit), A100), as_was[1])
                    if run_name == name
                    else as_was
                    for run_name, run_layout, as_was in pairs
                ],
            )

    def loss(runs: Sequence[Timed]) -> float:
        return neg_log_prob(runs, fit_weights(runs, TIME), TIME)

    habits: Habits = {}
    runs: list[Timed] = [
        (time_terms(run_layout, A100), k)
        for run_layout, k in zip(run_layouts, step_times, strict=True)
    ]
    best_loss = loss(runs)
    for name in sorted({name for name, row in zip(names, rows, strict=True) if row["pp"] > 1}):
        tried = [(loss(as_if), k, habit, as_if) for k, (habit, as_if) in enumerate(ways(name))]
        tried_loss, _, best, as_if = min(tried)
        if tried_loss < best_loss - EVIDENCE:
            habits, runs, best_loss = habits | {name: best}, as_if, tried_loss
    return habits


def calibrate(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Fit the constants of time and of memory, and the habits of campaigns."""
    measured_rows = [row for row in rows if row["step_s"]]
    habits = fit_habits(measured_rows)
    return {
        "time": fitted_time(
            layouts_of(measured_rows, habits), [row["step_s"] for row in measured_rows], A100
        ),
        "memory": fitted_fill(layouts_of(rows, {}), [bool(r["step_s"]) for r in rows], A100),
        "habits": habits,
    }


def evaluate(rows: Sequence[Row], constants: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Compare predictions with measured rows."""
    groups: dict[str, list[tuple[float | None, float, float]]] = defaultdict(list)
    for row, run_layout in zip(rows, layouts_of(rows, constants["habits"]), strict=True):
        predicted = predict_time(run_layout, A100, constants["time"])
        needed = peak_bytes(run_layout, A100, constants["memory"]) / A100.memory
        groups[f"{row['model']} {row['gpus']} {row['seq']}"].append(
            (row["step_s"], predicted, needed)
        )
    all_items = [item for items in groups.values() for item in items]
    pairs = [(step_time, predicted) for step_time, predicted, _ in all_items if step_time]
    errors = [abs(predicted / step_time - 1) for step_time, predicted in pairs]
    fit_correct = [(step_time is not None) == (needed <= 1) for step_time, _, needed in all_items]
    judged = {name: _evaluate_group(items) for name, items in groups.items()}
    lost = [group["regret"] for group in judged.values()]
    return {
        "rows": len(rows),
        "measured": len(pairs),
        "mape": float(np.mean(errors)),
        "p90": float(np.quantile(errors, 0.9)),
        "tau_over_all": kendall_tau([pair[0] for pair in pairs], [pair[1] for pair in pairs]),
        "regret": None if None in lost else max(lost),  # of all groups the worst
        "fits_right": float(np.mean(fit_correct)),
        "groups": judged,
    }


def _evaluate_group(items: Sequence[tuple[float | None, float, float]]) -> dict[str, Any]:
    """Evaluate a group; the chosen layout is the quickest that fits with RESERVE to spare."""
    measured_pairs = [(step_time, predicted) for step_time, predicted, _ in items if step_time]
    fit = [item for item in items if item[2] <= 1 - RESERVE]
    chosen_time = min(fit, key=lambda item: item[1])[0] if fit else None
    best = min((step_time for step_time, _ in measured_pairs), default=None)
    return {
        "rows": len(items),
        "tau": kendall_tau(
            [pair[0] for pair in measured_pairs], [pair[1] for pair in measured_pairs]
        ),
        "regret": chosen_time / best - 1 if chosen_time and best else None,
        "chosen_does_not_fit": bool(fit) and chosen_time is None,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Fit, evaluate and print; return 2 if the rows are wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calibrate", type=Path, required=True)
    parser.add_argument("--evaluate", type=Path, required=True)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    try:
        calibration, evaluated_rows = read_rows(arguments.calibrate), read_rows(arguments.evaluate)
        known_kernels = {layout_of(row).kernel for row in calibration if row["step_s"]}
        if unknown := {layout_of(row).kernel for row in evaluated_rows} - known_kernels:
            raise BadRows(f"{arguments.calibrate.name} has no run of {', '.join(sorted(unknown))}")
        constants = calibrate(calibration)
        results = evaluate(evaluated_rows, constants) | {"constants": constants}
    except BadRows as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps(results, indent=1))
        return 0
    for name in ("rows", "measured", "mape", "p90", "tau_over_all", "regret", "fits_right"):
        print(f"{name:14} {results[name]}")
    for name, group in results["groups"].items():
        print(name, " ".join(f"{key}={value}" for key, value in group.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
