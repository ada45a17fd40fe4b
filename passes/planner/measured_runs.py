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
    found = [one for at, row in enumerate(rows, 1) if (one := _run(path, at, row)) is not None]
    if len(found) < MIN_RUNS:
        count = f"{len(found)} run{'s' * (len(found) != 1)} with `{SECONDS_COLUMN}`"
        raise _wrong(path, f"{count}: at least {MIN_RUNS} are needed")
    return found


def _run(path: Path, at: int, row: Mapping[Any, Any]) -> MeasuredRun | None:
    """Parse a row; None where it has no time."""
    for name in row:
        if name not in COLUMNS:
            helps, facts = (
                suggest_name(str(name), COLUMNS, "columns are"),
                facts_of_unknown(str(name), COLUMNS),
            )
            raise _wrong(path, f"row {at}: there is no column `{name}`", helps, facts)
    given = {
        name: _value(path, at, name, value) for name, value in row.items() if _has_value(value)
    }
    took = given.pop(SECONDS_COLUMN, None)
    if took is None:
        return None
    again = given.pop("again", "none")
    placed = {name: given.pop(name) for name in PLACEMENT_COLUMNS if name in given}
    setting = Setting(Placement(**placed), **{"zero": 0, **given})
    stages = setting.pp * setting.chunks
    if isinstance(again, str):
        again = (ALL_UNITS,) * stages if again == "all" else ()
    return MeasuredRun(replace(setting, again=again), took, at)


PLACEMENT_COLUMNS = ("rows", "tp", "sequence", "cp", "ep", "offload", "slices")
ALL_UNITS = 2**31  # recomputed units: more than any stage has, so all of them


def _has_value(value: object) -> bool:
    return value is not None and str(value).strip() != ""


def _value(path: Path, at: int, name: str, value: object) -> Any:
    """Parse a field to the value of a setting."""
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value).strip()
    needs, read = _reading(name)
    try:
        return read(text)
    except ValueError:
        raise _wrong(path, f"row {at}: `{name}` is {text[:40]!r}", f"{name} {needs}") from None


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
        known = CHOICES[name]
        return f"is one of {', '.join(known)}", lambda text: known[known.index(text)]
    if name == "again":
        return "is none, all, or units of each stage: `2 2 1 0`", _again
    if name == "cuts":
        units = "are units of each stage: `7 8 8 7`"
        return units, lambda text: tuple(int(_positive(int(one))) for one in text.split())
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


def _wrong(path: Path, why: str, help_: str = "", facts: Facts = ()) -> Refusal:
    title = f"no machine can be fitted to `{path}`"
    return Refusal.of("S938", title, notes=(why,), helps=(help_,) if help_ else (), facts=facts)


# -- the machine -----------------------------------------------------------------------------------


def chains_of(
    path: Path,
    runs: Sequence[MeasuredRun],
    profiles: Profiles,
    base: Cluster,
    recipe: Recipe = DEFAULT_RECIPE,
) -> list[Chain]:
    """Profile each run; raises Refusal S938 for a setting that the model cannot have."""
    found = []
    for one in runs:
        chain, stages = profiles(one.setting.placement), one.setting.pp * one.setting.chunks
        if isinstance(chain, Refusal):
            first = chain.diagnostics[0]
            why = f"row {one.row}: {first.code}: {first.title}"
            raise _wrong(path, why, "; ".join(first.helps))
        try:
            if one.setting.dp % one.setting.placement.ep:
                raise ValueError("`ep` does not divide `dp`")
            for axis in ("tp", "cp", "ep"):
                size = getattr(one.setting.placement, axis)
                if size > 1 and axis not in _sending(chain):
                    raise ValueError(f"nothing of this model is split over `{axis}` = {size}")
            if one.setting.again and len(one.setting.again) != stages:
                raise ValueError(f"`again` is to be {stages} numbers")
            price(chain, one.setting, base, recipe)
        except OrderError as error:
            raise _wrong(path, f"row {one.row}: {error.reason}", error.legal) from None
        except ValueError as error:
            raise _wrong(path, f"row {one.row}: {error}") from None
        found.append(chain)
    return found


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

    def error(self, told: Sequence[float]) -> float:
        """Mean relative error of predicted seconds."""
        took = [one.seconds for one in self.runs]
        return float(np.mean([abs(a / b - 1) for a, b in zip(told, took, strict=True)]))


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
    took = np.array([one.seconds for one in runs])

    def fit(names: Sequence[str]) -> Fit:
        def model(logs: Array) -> Array:
            machine = _with_constants(base, names, logs)
            pairs = zip(chains, runs, strict=True)
            told = [price(chain, one.setting, machine, recipe).seconds for chain, one in pairs]
            shares: Array = np.array(told) / took
            return shares

        return fit_constants(model, np.log([getattr(base, name) for name in names]))

    names = [name for name in CONSTANTS if 0 < getattr(base, name) < math.inf]
    found = fit(names)
    wide = dict(
        zip(names, np.expm1(found.deviations).tolist(), strict=True)
    )  # with all constants free
    while len(names) > 1 and found.deviations.max() > IDENTIFIED:
        names.pop(int(found.deviations.argmax()))
        found = fit(names)
    kept = tuple(name for name in CONSTANTS if name not in names)
    how = dict.fromkeys(kept, "not told by the runs: as it was")
    how |= {name: f"fitted to {len(runs)} runs, within {wide[name]:.0%}" for name in names}
    made = _with_legal_shares(
        _with_constants(replace(base, name=f"{base.name}_fitted"), names, found.logs)
    )
    told = [(np.exp(off) * took).tolist() for off in (found.log_errors, found.left_out_log_errors)]
    return FittedRuns(made, how, kept, runs, *told)


def _with_constants(base: Cluster, names: Sequence[str], logs: Array) -> Cluster:
    values = dict(zip(names, np.exp(logs).tolist(), strict=True))
    if "overlap" in values:
        values["overlap"] = min(1.0, values["overlap"])
    made: Cluster = replace(base, **values)
    return made


def _with_legal_shares(one: Cluster) -> Cluster:
    """Raise the data sheet's figure where a share would be above 1."""
    for rate in dict.fromkeys(SHARES.values()):
        shares = {name: getattr(one, name) for name, of in SHARES.items() if of == rate}
        most = max(1.0, *shares.values())
        changed = {name: share / most for name, share in shares.items()}
        one = replace(one, **{rate: getattr(one, rate) * most}, **changed)
    return one
