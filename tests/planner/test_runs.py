"""A machine fitted to runs of a model: what made them is found again, and what they do not tell."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from schedlang.cli import app
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.planner.constants_fit import Array, fit_constants
from schedlang.passes.planner.measured_runs import (
    ALL_UNITS,
    MeasuredRun,
    chains_of,
    fitted_to_runs,
    read_runs,
)
from schedlang.passes.planner.price import price
from schedlang.passes.planner.values import Chain, Placement, Setting
from schedlang.passes.simulate.machine import CLUSTERS, Cluster, read_machines
from tests.planner.decoders import decoder

A100 = CLUSTERS["a100"]
MODEL = decoder(16, 2048, 16, 8192, 32000, 2048)
TOLD = ("product", "linked", "routed", "overlap")
SETTINGS = [
    Setting(
        Placement(rows, tp, tp > 1),
        dp,
        pp,
        32 // dp // rows,
        zero=zero,
        again=again,
        cuts=(18 // pp,) * pp,
    )  # fmt: skip
    for rows, tp, dp, pp, zero in product((1, 2), (1, 4, 8), (1, 8), (1, 2), (0, 3))
    for again in ((), (ALL_UNITS,) * pp)
    if (dp > 1 or not zero) and tp * dp * pp <= 64
]


def drawn(seed: int, noise: float) -> tuple[Cluster, list[MeasuredRun], list[Chain]]:
    """A machine, and half of the runs on it."""
    draw = np.random.default_rng(seed)
    values: dict[str, Any] = {name: float(draw.uniform(0.3, 0.9)) for name in (*TOLD, "streaming")}
    truth = replace(A100, **values, start=float(draw.uniform(2e-6, 2e-5)))
    some = [SETTINGS[at] for at in draw.permutation(len(SETTINGS))[: len(SETTINGS) // 2]]
    off = np.exp(noise * draw.normal(size=len(some)))
    took = [price(MODEL(one.placement), one, truth).seconds for one in some]
    runs = [MeasuredRun(one, t * o, at) for at, (one, t, o) in enumerate(zip(some, took, off), 1)]
    return truth, runs, [MODEL(one.placement) for one in some]


@pytest.mark.parametrize(("seed", "noise"), [(0, 0.0), (1, 0.0), (2, 0.02), (3, 0.02)])
def test_the_machine_that_made_runs_is_found(seed: int, noise: float) -> None:
    """Each constant about as far off as is said; settings that nobody ran are told as well."""
    truth, runs, chains = drawn(seed, noise)
    found = fitted_to_runs(runs, chains, A100)
    assert found.error(found.predicted) < 0.006 + noise
    assert found.error(found.predicted) <= found.error(found.left_out) < 0.01 + 1.5 * noise
    for name in TOLD:
        assert name not in found.unfitted
        off = abs(np.log(reached(found.cluster, name) / reached(truth, name)))
        assert off < 3 * np.log1p(float(found.remarks[name].split()[-1].rstrip("%")) / 100 + 0.01)
    for one in SETTINGS:
        chain = MODEL(one.placement)
        told = price(chain, one, found.cluster).seconds
        assert told == pytest.approx(price(chain, one, truth).seconds, rel=0.01 + 2 * noise)


def reached(one: Cluster, name: str) -> float:
    """What a share comes to, whatever its data sheet says."""
    rates = {"product": one.speed, "linked": one.link, "routed": one.network}
    return float(getattr(one, name) * rates.get(name, 1.0))


def test_what_no_run_tells_is_said() -> None:
    """Of runs on one rank nothing is learnt about messages: the machine has what it had."""
    _, runs, _ = drawn(0, 0.0)
    alone = [replace(one, setting=Setting(Placement(rows))) for rows, one in enumerate(runs[:4], 1)]
    chains = [MODEL(one.setting.placement) for one in alone]
    runs = [
        replace(one, seconds=2 * price(chain, one.setting, A100).seconds)
        for one, chain in zip(alone, chains, strict=True)
    ]
    found = fitted_to_runs(runs, chains, A100)
    assert {"linked", "routed", "overlap"} <= set(found.unfitted)
    assert found.cluster.linked == A100.linked
    assert "not told" in found.remarks["linked"]
    assert found.error(found.predicted) < 0.01


def weighted(matrix: Array, logs: Array) -> Array:
    """Runs as sums of their parts."""
    found: Array = matrix @ np.exp(logs)
    return found


def test_a_run_left_out_is_told_as_by_a_fit_without_it() -> None:
    """The line through the best fit says nearly what each of the fits would."""
    draw = np.random.default_rng(0)
    parts = draw.uniform(0.1, 1, (12, 3))
    took = (parts * [0.5, 1.5, 1.0]).sum(1) * np.exp(0.03 * draw.normal(size=12))
    matrix, start = parts / took[:, None], np.zeros(3)
    whole = fit_constants(partial(weighted, matrix), start)
    for at in range(12):
        rest = np.delete(matrix, at, 0)
        found = fit_constants(partial(weighted, rest), start)
        off = float(np.log(matrix[at] @ np.exp(found.logs)))
        assert whole.left_out_log_errors[at] == pytest.approx(off, abs=0.006)
    assert abs(whole.left_out_log_errors).mean() > 1.1 * abs(whole.log_errors).mean()


# -- the table -------------------------------------------------------------------------------------


def table(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write rows as CSV."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [",".join(str(row.get(name, "")) for name in names) for row in rows]
    path.write_text("\n".join([",".join(names), *lines]) + "\n")
    return path


def test_both_forms_of_a_table_say_the_same(tmp_path: Path) -> None:
    """Words of a search, of the setting what they are not said is 1; rows without a time go."""
    rows: list[dict[str, Any]] = [
        {"tp": 2, "sequence": True, "micro": 4, "step_s": 1.5},
        {"pp": 2, "order": "GPipe", "micro": 4, "again": "all", "step_s": 2, "axes": "pp dp cp tp"},
        {"pp": 2, "micro": 4, "again": "1 0", "cuts": "10 8", "step_s": 3},
        {"tp": 4, "step_s": ""},
        {"dp": 2, "zero": 3, "rows": 2, "offload": "both", "slices": 2, "step_s": 4},
    ]
    (tmp_path / "runs.json").write_text(json.dumps(rows))
    found = read_runs(table(tmp_path / "runs.csv", rows))
    assert found == read_runs(tmp_path / "runs.json")
    assert [one.row for one in found] == [1, 2, 3, 5]
    assert found[0].setting == Setting(Placement(1, 2, True), micro=4, zero=0)
    assert found[1].setting.again == (ALL_UNITS, ALL_UNITS) and found[1].setting.axes[0] == "pp"
    assert (found[2].setting.cuts, found[2].setting.again) == ((10, 8), (1, 0))
    placed = Placement(2, offload="both", slices=2)
    assert found[3].setting == Setting(placed, 2, zero=3)


GOOD = {"micro": 4, "step_s": 1.0}


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"step_s": 0}, "`step_s` is '0'"),
        ({"step_s": "nan"}, "`step_s` is 'nan'"),
        ({"step_s": ""}, "2 runs with `step_s`: at least 3 are needed"),
        ({"tpp": 2}, "there is no column `tpp`"),
        ({"tp": 0}, "`tp` is '0'"),
        ({"tp": 1.5}, "`tp` is '1.5'"),
        ({"zero": 4}, "`zero` is '4'"),
        ({"sequence": "perhaps"}, "`sequence` is 'perhaps'"),
        ({"axes": "tp tp"}, "`axes` is 'tp tp'"),
        ({"offload": "some"}, "`offload` is 'some'"),
        ({"pp": 2, "slices": 2}, "1F1B does not cut sequences"),
        ({"again": "some"}, "`again` is 'some'"),
        ({"pp": 2, "again": "1 1 1"}, "`again` is to be 2 numbers"),
        ({"pp": 2, "cuts": "1 1"}, "the cuts have 2 units, and there are 18"),
        ({"pp": 2, "cuts": "18"}, "1 stages are cut, and there are 2"),
        ({"pp": 32}, "18 units are too few for 32 stages"),
        ({"pp": 2, "order": "OneF"}, "there is no order `OneF`"),
        ({"ep": 2, "dp": 3}, "`ep` does not divide `dp`"),
    ],
)
def test_what_is_no_table_of_this_model(bad: dict[str, Any], said: str, tmp_path: Path) -> None:
    """S938 says which row, and why."""
    path = table(tmp_path / "runs.csv", [GOOD, GOOD, GOOD | bad])
    with pytest.raises(Refusal) as refused:
        chains_of(path, read_runs(path), MODEL, A100)
    (told,) = refused.value.diagnostics
    assert told.code == "S938" and said in " ".join(told.notes)


def test_an_axis_over_which_nothing_is_split(tmp_path: Path) -> None:
    """The model would do the same on each of its ranks."""
    path = table(tmp_path / "runs.csv", [GOOD, GOOD, GOOD | {"tp": 7}])
    with pytest.raises(Refusal) as refused:
        chains_of(path, read_runs(path), lambda at: MODEL(Placement()), A100)
    assert (
        "row 3: nothing of this model is split over `tp` = 7" in refused.value.diagnostics[0].notes
    )


@pytest.mark.parametrize("text", ["{", "[1]", '{"step_s": 1}', "", "[]"])
def test_what_is_no_table(text: str, tmp_path: Path) -> None:
    """Nor is a file that is not there."""
    path = tmp_path / "runs.json"
    path.write_text(text)
    for one in (path, tmp_path / "other.csv"):
        with pytest.raises(Refusal) as refused:
            read_runs(one)
        assert refused.value.diagnostics[0].code == "S938"


def test_the_verb_writes_what_on_reads(tmp_path: Path) -> None:
    """Of a model file; it says how well runs are told, and what they do not tell."""
    model = Path(__file__).parents[2] / "examples" / "custom" / "model.py"
    rows: list[dict[str, Any]] = [{"micro": m, "step_s": m * 1e-3} for m in (1, 2, 4)]
    path, out = table(tmp_path / "runs.csv", rows), tmp_path / "mine.toml"
    words = ["calibrate", str(model), "--runs", str(path), "--on", "a100"]
    ran = CliRunner().invoke(app, [*words, "-o", str(out)])
    assert ran.exit_code == 0, ran.output
    assert "3 runs" in ran.stdout and "not told by them" in ran.stdout
    assert list(read_machines(out)) == ["a100_fitted"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("model.py",), "a model and its runs go together"),
        (("--runs", "runs.csv"), "a model and its runs go together"),
        (("model.py", "--runs", "runs.csv"), "the machine is missing"),
        (("model.py", "--runs", "runs.csv", "--like", "abacus"), "unknown machine `abacus`"),
    ],
)
def test_what_is_missing_is_said(words: tuple[str, ...], said: str) -> None:
    """Before anything is read."""
    ran = CliRunner().invoke(app, ["calibrate", *words])
    assert ran.exit_code == 2 and said in ran.output
