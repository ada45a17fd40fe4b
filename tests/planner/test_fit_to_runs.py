"""Fitting a machine to measured runs: true constants are recovered, untold ones are reported."""

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
FITTED = ("product", "linked", "routed", "overlap")
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


def random_runs(seed: int, noise: float) -> tuple[Cluster, list[MeasuredRun], list[Chain]]:
    """Return a random machine, and half of the runs on it with their chains."""
    draw = np.random.default_rng(seed)
    values: dict[str, Any] = {
        name: float(draw.uniform(0.3, 0.9)) for name in (*FITTED, "streaming")
    }
    truth = replace(A100, **values, start=float(draw.uniform(2e-6, 2e-5)))
    sampled = [SETTINGS[k] for k in draw.permutation(len(SETTINGS))[: len(SETTINGS) // 2]]
    noise_factors = np.exp(noise * draw.normal(size=len(sampled)))
    times = [price(MODEL(setting.placement), setting, truth).seconds for setting in sampled]
    runs = [
        MeasuredRun(setting, t * o, k)
        for k, (setting, t, o) in enumerate(zip(sampled, times, noise_factors), 1)
    ]
    return truth, runs, [MODEL(setting.placement) for setting in sampled]


@pytest.mark.parametrize(("seed", "noise"), [(0, 0.0), (1, 0.0), (2, 0.02), (3, 0.02)])
def test_the_machine_that_made_runs_is_found(seed: int, noise: float) -> None:
    """Each constant is within its stated error; settings that were not run are predicted too."""
    truth, runs, chains = random_runs(seed, noise)
    fit = fitted_to_runs(runs, chains, A100)
    assert fit.error(fit.predicted) < 0.006 + noise
    assert fit.error(fit.predicted) <= fit.error(fit.left_out) < 0.01 + 1.5 * noise
    for name in FITTED:
        assert name not in fit.unfitted
        log_error = abs(np.log(effective_rate(fit.cluster, name) / effective_rate(truth, name)))
        assert log_error < 3 * np.log1p(
            float(fit.remarks[name].split()[-1].rstrip("%")) / 100 + 0.01
        )
    for setting in SETTINGS:
        chain = MODEL(setting.placement)
        predicted = price(chain, setting, fit.cluster).seconds
        assert predicted == pytest.approx(
            price(chain, setting, truth).seconds, rel=0.01 + 2 * noise
        )


def effective_rate(cluster: Cluster, name: str) -> float:
    """Return a constant as an effective rate, independent of the data sheet's figure."""
    rates = {"product": cluster.speed, "linked": cluster.link, "routed": cluster.network}
    return float(getattr(cluster, name) * rates.get(name, 1.0))


def test_what_no_run_tells_is_said() -> None:
    """Runs on one rank do not fit network constants: those stay unchanged, and that is reported."""
    _, runs, _ = random_runs(0, 0.0)
    one_rank_runs = [
        replace(run, setting=Setting(Placement(rows))) for rows, run in enumerate(runs[:4], 1)
    ]
    chains = [MODEL(run.setting.placement) for run in one_rank_runs]
    runs = [
        replace(run, seconds=2 * price(chain, run.setting, A100).seconds)
        for run, chain in zip(one_rank_runs, chains, strict=True)
    ]
    fit = fitted_to_runs(runs, chains, A100)
    assert {"linked", "routed", "overlap"} <= set(fit.unfitted)
    assert fit.cluster.linked == A100.linked
    assert "not told" in fit.remarks["linked"]
    assert fit.error(fit.predicted) < 0.01


def weighted_sums(matrix: Array, logs: Array) -> Array:
    """Return each run as the weighted sum of its parts."""
    totals: Array = matrix @ np.exp(logs)
    return totals


def test_a_run_left_out_is_told_as_by_a_fit_without_it() -> None:
    """The linearised leave-one-out errors match actual fits without each run."""
    draw = np.random.default_rng(0)
    parts = draw.uniform(0.1, 1, (12, 3))
    times = (parts * [0.5, 1.5, 1.0]).sum(1) * np.exp(0.03 * draw.normal(size=12))
    matrix, start = parts / times[:, None], np.zeros(3)
    full_fit = fit_constants(partial(weighted_sums, matrix), start)
    for k in range(12):
        other_rows = np.delete(matrix, k, 0)
        fit_without = fit_constants(partial(weighted_sums, other_rows), start)
        log_error = float(np.log(matrix[k] @ np.exp(fit_without.logs)))
        assert full_fit.left_out_log_errors[k] == pytest.approx(log_error, abs=0.006)
    assert abs(full_fit.left_out_log_errors).mean() > 1.1 * abs(full_fit.log_errors).mean()


# -- the table -------------------------------------------------------------------------------------


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write rows as CSV, and return the path."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [",".join(str(row.get(name, "")) for name in names) for row in rows]
    path.write_text("\n".join([",".join(names), *lines]) + "\n")
    return path


def test_both_forms_of_a_table_say_the_same(tmp_path: Path) -> None:
    """CSV and JSON give the same runs; missing settings are 1; rows without a time are dropped."""
    rows: list[dict[str, Any]] = [
        {"tp": 2, "sequence": True, "micro": 4, "step_s": 1.5},
        {"pp": 2, "order": "GPipe", "micro": 4, "again": "all", "step_s": 2, "axes": "pp dp cp tp"},
        {"pp": 2, "micro": 4, "again": "1 0", "cuts": "10 8", "step_s": 3},
        {"tp": 4, "step_s": ""},
        {"dp": 2, "zero": 3, "rows": 2, "offload": "both", "slices": 2, "step_s": 4},
    ]
    (tmp_path / "runs.json").write_text(json.dumps(rows))
    runs = read_runs(write_csv(tmp_path / "runs.csv", rows))
    assert runs == read_runs(tmp_path / "runs.json")
    assert [run.row for run in runs] == [1, 2, 3, 5]
    assert runs[0].setting == Setting(Placement(1, 2, True), micro=4, zero=0)
    assert runs[1].setting.again == (ALL_UNITS, ALL_UNITS) and runs[1].setting.axes[0] == "pp"
    assert (runs[2].setting.cuts, runs[2].setting.again) == ((10, 8), (1, 0))
    placed = Placement(2, offload="both", slices=2)
    assert runs[3].setting == Setting(placed, 2, zero=3)


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
    """S938 names the row and the reason."""
    path = write_csv(tmp_path / "runs.csv", [GOOD, GOOD, GOOD | bad])
    with pytest.raises(Refusal) as refused:
        chains_of(path, read_runs(path), MODEL, A100)
    (diagnostic,) = refused.value.diagnostics
    assert diagnostic.code == "S938" and said in " ".join(diagnostic.notes)


def test_an_axis_over_which_nothing_is_split(tmp_path: Path) -> None:
    """An axis over which the model is not split is refused."""
    path = write_csv(tmp_path / "runs.csv", [GOOD, GOOD, GOOD | {"tp": 7}])
    with pytest.raises(Refusal) as refused:
        chains_of(path, read_runs(path), lambda at: MODEL(Placement()), A100)
    assert (
        "row 3: nothing of this model is split over `tp` = 7" in refused.value.diagnostics[0].notes
    )


@pytest.mark.parametrize("text", ["{", "[1]", '{"step_s": 1}', "", "[]"])
def test_what_is_no_table(text: str, tmp_path: Path) -> None:
    """Broken files and missing files are refused with S938."""
    path = tmp_path / "runs.json"
    path.write_text(text)
    for missing_or_bad in (path, tmp_path / "other.csv"):
        with pytest.raises(Refusal) as refused:
            read_runs(missing_or_bad)
        assert refused.value.diagnostics[0].code == "S938"


def test_the_verb_writes_what_on_reads(tmp_path: Path) -> None:
    """`calibrate --runs` writes a machine file, and reports fit quality and unfitted constants."""
    model = Path(__file__).parents[2] / "examples" / "custom" / "model.py"
    rows: list[dict[str, Any]] = [{"micro": m, "step_s": m * 1e-3} for m in (1, 2, 4)]
    path, out_file = write_csv(tmp_path / "runs.csv", rows), tmp_path / "mine.toml"
    arguments = ["calibrate", str(model), "--runs", str(path), "--on", "a100"]
    result = CliRunner().invoke(app, [*arguments, "-o", str(out_file)])
    assert result.exit_code == 0, result.output
    assert "3 runs" in result.stdout and "not told by them" in result.stdout
    assert list(read_machines(out_file)) == ["a100_fitted"]


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
    """Missing options are refused before anything is read."""
    result = CliRunner().invoke(app, ["calibrate", *words])
    assert result.exit_code == 2 and said in result.output
