"""Fit of a machine's constants to a table of measured runs, for `schedlang calibrate --runs`.

Reads the table (settings in the words of a search, seconds of a step), and finds the constants
under which the prices of these settings match the measured seconds.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from schedlang.diagnostics.diagnostic import Facts, Refusal, facts_of_unknown, suggest_name
from schedlang.diagnostics.source import read_bytes
from schedlang.ir.limits import CHOICES, COUNTS, NAMES
from schedlang.passes.planner.constants_fit import PRIOR, Array, Fit, fit_constants
from schedlang.passes.planner.price import DEFAULT_RECIPE, price
from schedlang.passes.planner.values import Chain, Placement, Recipe, Setting
from schedlang.passes.simulate.machine import Cluster
from schedlang.pipeline.schedules import OrderError

Profiles = Callable[[Placement], Chain | Refusal]

# -- the table -------------------------------------------------------------------------------------


SECONDS_COLUMN = "step_s"
LIST_COLUMNS = ("cuts", "axes")
COLUMNS = (*NAMES, *LIST_COLUMNS, SECONDS_COLUMN)
MIN_RUNS = 3  # minimal number of runs: with fewer, no run can be left out to test the fit


@dataclass(frozen=True)
class MeasuredRun:
    """A measured run: its setting, seconds of a step, and its row in the table."""

    setting: Setting
    seconds: float
    row: int


def read_runs(path: Path) -> list[MeasuredRun]:
    """Read the runs of a table, in CSV or as a list of objects in JSON.

    A row has `step_s`, and the names of a search that differ from one rank with one microbatch of
    one row; `cuts`, `axes` and `again` may be lists, separated by spaces.  Rows without a time are
    left out.  Raises Refusal S938 for a file, a column or a value that cannot be read.
    """
    try:
        text = read_bytes(path).decode("utf-8-sig")
        table = csv.DictReader(io.StringIO(text, newline=""), skipinitialspace=True)
        rows = json.loads(text) if path.suffix == ".json" else list(table)
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        raise _wrong(path, str(error).splitlines()[0]) from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise _wrong(path, "runs are a list of objects, one each")
    runs = [run for line, row in enumerate(rows, 1) if (run := _run(path, line, row)) is not None]
    if len(runs) < MIN_RUNS:
        count = f"{len(runs)} run{'s' * (len(runs) != 1)} with `{SECONDS_COLUMN}`"
        raise _wrong(path, f"{count}: at least {MIN_RUNS} are needed")
    return runs


def _run(path: Path, line: int, row: Mapping[Any, Any]) -> MeasuredRun | None:
    """Parse a row; None where it has no time."""
    for name in row:
        if name not in COLUMNS:
            helps, facts = (
                suggest_name(str(name), COLUMNS, "columns are"),
                facts_of_unknown(str(name), COLUMNS),
            )
            raise _wrong(path, f"row {line}: there is no column `{name}`", helps, facts)
    values = {
        name: _value(path, line, name, value) for name, value in row.items() if _has_value(value)
    }
    seconds = values.pop(SECONDS_COLUMN, None)
    if seconds is None:
        return None
    again = values.pop("again", "none")
    placed = {name: values.pop(name) for name in PLACEMENT_COLUMNS if name in values}
    setting = Setting(Placement(**placed), **{"zero": 0, **values})
    stages = setting.pp * setting.chunks
    if isinstance(again, str):
        again = (ALL_UNITS,) * stages if again == "all" else ()
    return MeasuredRun(replace(setting, again=again), seconds, line)


PLACEMENT_COLUMNS = ("rows", "tp", "sequence", "cp", "ep", "offload", "slices")
ALL_UNITS = 2**31  # recomputed units: more than any stage has, so all of them


def _has_value(value: object) -> bool:
    return value is not None and str(value).strip() != ""


def _value(path: Path, line: int, name: str, value: object) -> Any:
    """Parse a field to the value of a setting."""
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value).strip()
    rule, read = _reading(name)
    try:
        return read(text)
    except ValueError:
        raise _wrong(path, f"row {line}: `{name}` is {text[:40]!r}", f"{name} {rule}") from None


def _reading(name: str) -> tuple[str, Callable[[str], Any]]:
    """Return a column's form in words, and its parser, which raises ValueError for illegal
    values."""
    if name == SECONDS_COLUMN:
        return "is seconds, above 0", lambda text: _positive(float(text))
    if name == "zero":
        return "is 0, 1, 2 or 3", lambda text: ("0", "1", "2", "3").index(text)
    if name in COUNTS:
        return "is a whole number above 0", lambda text: int(_positive(int(text)))
    if name == "sequence":
        return "is true or false", lambda text: bool(("false", "true").index(text.lower()))
    if name == "offload":
        choices = CHOICES[name]
        return f"is one of {', '.join(choices)}", lambda text: choices[choices.index(text)]
    if name == "again":
        return "is none, all, or units of each stage: `2 2 1 0`", _again
    if name == "cuts":
        units = "are units of each stage: `7 8 8 7`"
        return units, lambda text: tuple(int(_positive(int(part))) for part in text.split())
    if name == "axes":
        return "are dp, pp, cp and tp, the slowest first: `pp dp cp tp`", _axes
    return "is the name of an order", str


def _positive(value: float) -> float:
    if not 0 < value < math.inf:
        raise ValueError
    return value


def _again(text: str) -> str | tuple[int, ...]:
    return text if text in ("none", "all") else tuple(map(int, text.split()))


def _axes(text: str) -> tuple[str, ...]:
    if sorted(text.split()) != ["cp", "dp", "pp", "tp"]:
        raise ValueError
    return tuple(text.split())


def _wrong(path: Path, reason: str, help_: str = "", facts: Facts = ()) -> Refusal:
    text = f"no machine can be fitted to `{path}`"
    return Refusal.of("S938", text, notes=(reason,), helps=(help_,) if help_ else (), facts=facts)


# -- the machine -----------------------------------------------------------------------------------


def chains_of(
    path: Path,
    runs: Sequence[MeasuredRun],
    profiles: Profiles,
    base: Cluster,
    recipe: Recipe = DEFAULT_RECIPE,
) -> list[Chain]:
    """Profile each run; raises Refusal S938 for a setting that the model cannot have."""
    chains = []
    for run in runs:
        chain, stages = profiles(run.setting.placement), run.setting.pp * run.setting.chunks
        if isinstance(chain, Refusal):
            diagnostic = chain.diagnostics[0]
            reason = f"row {run.row}: {diagnostic.code}: {diagnostic.title}"
            raise _wrong(path, reason, "; ".join(diagnostic.helps))
        try:
            if run.setting.dp % run.setting.placement.ep:
                raise ValueError("`ep` does not divide `dp`")
            for axis in ("tp", "cp", "ep"):
                size = getattr(run.setting.placement, axis)
                if size > 1 and axis not in _sending(chain):
                    raise ValueError(f"nothing of this model is split over `{axis}` = {size}")
            if run.setting.again and len(run.setting.again) != stages:
                raise ValueError(f"`again` is to be {stages} numbers")
            price(chain, run.setting, base, recipe)
        except OrderError as error:
            raise _wrong(path, f"row {run.row}: {error.reason}", error.legal) from None
        except ValueError as error:
            raise _wrong(path, f"row {run.row}: {error}") from None
        chains.append(chain)
    return chains


def _sending(chain: Chain) -> set[str]:
    """Return the axes along which units send: units that are split over an axis do."""
    works = [work for run in chain.runs for work in (run.unit.forward, run.unit.backward)]
    return {sent.axis for work in works for sent in work.collectives}


SHARES: Final[Mapping[str, str]] = {  # constants that are shares of a data sheet's figure
    "product": "speed",
    "attention": "speed",
    "streaming": "stream",
    "linked": "link",
    "routed": "network",
}
CONSTANTS = (*SHARES, "overlap", "start", "ramp", "hop", "far")
IDENTIFIED = 0.75 * PRIOR  # a constant is identified if its deviation falls by a quarter


@dataclass(frozen=True)
class FittedRuns:
    """A machine, and how well it predicts the runs that it was fitted to.

    remarks    for each constant: how far off it may be, or why it was not fitted
    unfitted   constants that were not fitted
    predicted  predicted seconds of each run; `left_out` the same with that run left out of the fit
    """

    cluster: Cluster
    remarks: Mapping[str, str]
    unfitted: tuple[str, ...]
    runs: Sequence[MeasuredRun]
    predicted: Sequence[float]
    left_out: Sequence[float]

    def error(self, predicted: Sequence[float]) -> float:
        """Mean relative error of predicted seconds."""
        measured = [run.seconds for run in self.runs]
        return float(np.mean([abs(a / b - 1) for a, b in zip(predicted, measured, strict=True)]))


def fitted_to_runs(
    runs: Sequence[MeasuredRun],
    chains: Sequence[Chain],
    base: Cluster,
    recipe: Recipe = DEFAULT_RECIPE,
) -> FittedRuns:
    """Fit the constants of a machine to runs; constants that the runs do not identify stay as in
    `base`.

    `chains` are the chains of the runs, in order.
    """
    actual = np.array([run.seconds for run in runs])

    def fit(names: Sequence[str]) -> Fit:
        def model(logs: Array) -> Array:
            machine = _with_constants(base, names, logs)
            predicted = [
                price(chain, run.setting, machine, recipe, seconds_only=True).seconds
                for chain, run in zip(chains, runs, strict=True)
            ]
            shares: Array = np.array(predicted) / actual
            return shares

        return fit_constants(model, np.log([getattr(base, name) for name in names]))

    names = [name for name in CONSTANTS if 0 < getattr(base, name) < math.inf]
    best = fit(names)
    spread = dict(
        zip(names, np.expm1(best.deviations).tolist(), strict=True)
    )  # with all constants free
    while len(names) > 1 and best.deviations.max() > IDENTIFIED:
        names.pop(int(best.deviations.argmax()))
        best = fit(names)
    unfitted = tuple(name for name in CONSTANTS if name not in names)
    remarks = dict.fromkeys(unfitted, "not told by the runs: as it was")
    remarks |= {name: f"fitted to {len(runs)} runs, within {spread[name]:.0%}" for name in names}
    cluster = _with_legal_shares(
        _with_constants(replace(base, name=f"{base.name}_fitted"), names, best.logs)
    )
    pair = [(np.exp(off) * actual).tolist() for off in (best.log_errors, best.left_out_log_errors)]
    return FittedRuns(cluster, remarks, unfitted, runs, *pair)


def _with_constants(base: Cluster, names: Sequence[str], logs: Array) -> Cluster:
    values = dict(zip(names, np.exp(logs).tolist(), strict=True))
    if "overlap" in values:
        values["overlap"] = min(1.0, values["overlap"])
    machine: Cluster = replace(base, **values)
    return machine


def _with_legal_shares(machine: Cluster) -> Cluster:
    """Raise the data sheet's figure where a share would be above 1."""
    for rate in dict.fromkeys(SHARES.values()):
        shares = {name: getattr(machine, name) for name, figure in SHARES.items() if figure == rate}
        largest = max(1.0, *shares.values())
        changed = {name: share / largest for name, share in shares.items()}
        machine = replace(machine, **{rate: getattr(machine, rate) * largest}, **changed)
    return machine
