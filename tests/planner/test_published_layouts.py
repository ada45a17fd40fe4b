"""Cost model of published layouts: its terms, its fit, and its benchmark."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest

from schedlang.passes.simulate.machine import CLUSTERS
from tests.benchmarks.layouts import (
    MEMORY,
    TIME,
    Layout,
    cuts_of,
    fitted_fill,
    fitted_time,
    peak_bytes,
    predict_time,
    time_terms,
)
from tests.benchmarks.published import (
    Row,
    calibrate,
    evaluate,
    fit_habits,
    kendall_tau,
    layouts_of,
    main,
    read_rows,
)
from tests.planner.decoders import Decoder

A100 = CLUSTERS["a100"]
SHAPE = Decoder(32, 4096, 32, 11008, 32000, 2048, gated=True)
ONE = Layout(SHAPE, 512, 32, 1, 2, 4, "flash2")
ROWS = next(
    (
        at
        for above in Path(__file__).parents
        if (at := above / "shared" / "data" / "layouts_dev.json").is_file()
    ),
    None,
)


def all_layouts() -> list[Layout]:
    """Return layouts of all kernels, sizes and options."""
    return [
        Layout(SHAPE, 512, 32, micro, tp, pp, kernel, recomputed, norm)
        for micro, tp, pp, kernel, recomputed, norm in product(
            (1, 2),
            (1, 2, 4),
            (1, 2, 4),
            ("torch", "fused", "flash1", "flash2"),
            *[(False, True)] * 2,
        )
    ]


# -- terms -----------------------------------------------------------------------------------------


def test_products_take_what_the_largest_reach() -> None:
    """On one rank without recomputation: 6 FLOPs per weight and token, at the reached rate."""
    layout = Layout(SHAPE, 8, 1, 1, 1, 1, "flash2")
    weights = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 32000 * 4096
    reached = A100.speed * A100.product
    product_time = time_terms(layout, A100)["product"]
    assert product_time == pytest.approx(6 * weights * 8 * 2048 / reached, rel=0.01)  # and ramps


def test_one_rank_sends_nothing() -> None:
    """On one rank there is no network term."""
    terms = time_terms(Layout(SHAPE, 8, 1, 1, 1, 1, "torch"), A100)
    axes = ("tp", "pp", "dp")
    assert not any(terms.get(name, 0) for axis in axes for name in (axis, f"{axis} start"))
    assert terms["attention torch"] > 0


@pytest.mark.parametrize(
    ("slower", "quicker"),
    [
        (replace(ONE, recompute=True), ONE),
        (replace(ONE, kernel="torch"), ONE),
        (ONE, replace(ONE, fused_norm=True)),
        (ONE, replace(ONE, sequence_parallel=True)),
        (replace(ONE, tp=8), replace(ONE, tp=1, ranks=4)),
        (replace(ONE, rows=1024), ONE),
        (replace(ONE, flushes=2), ONE),
        (ONE, replace(ONE, reduced=False)),
    ],
)
def test_what_is_slower(slower: Layout, quicker: Layout) -> None:
    """More operations, passes or messages take longer."""
    slow, quick = ((predict_time(layout, A100, TIME), layout.ranks) for layout in (slower, quicker))
    assert slow[0] * slow[1] > quick[0] * quick[1]


def test_more_stages_wait_longer() -> None:
    """With the same microbatches and rows of a rank, a longer pipeline waits longer."""
    times = [
        time_terms(replace(ONE, pp=pp, ranks=8 * pp), A100)["other"] * pp for pp in (1, 2, 4, 8)
    ]
    assert times == sorted(times)
    assert times[0] < times[-1]


@pytest.mark.parametrize("pp", range(1, 17))
def test_slowest_stage_is_the_least_of_all_divisions(pp: int) -> None:
    """Layers are cut as evenly as possible, except at the last stage."""
    shape = replace(SHAPE, layers=30)
    head = shape.vocab * shape.width / (4 * shape.width**2 + 3 * shape.width * shape.inner)
    tried = [
        max(-(-(30 - last) // (pp - 1)) if pp > 1 else 0, last + head)
        for last in range(31)
        if pp > 1 or last == 30
    ]
    first_cut, *middle = cuts_of(shape, pp)
    layers = [first_cut - 1, *middle]
    layers[-1] -= 1
    assert sum(layers) == 30
    assert max(*layers[:-1], layers[-1] + head, 0) == pytest.approx(min(tried))


def test_memory_falls_with_recomputation_and_slicing() -> None:
    """Memory falls with recomputation, tensor parallelism and more ranks."""
    base_bytes = peak_bytes(ONE, A100, MEMORY)
    for less in ({"recompute": True}, {"tp": 4}, {"ranks": 64, "rows": 1024}):
        assert peak_bytes(replace(ONE, **less), A100, MEMORY) < base_bytes
    assert peak_bytes(replace(ONE, micro=2), A100, MEMORY) > base_bytes


# -- fit -------------------------------------------------------------------------------------------


def test_fit_tells_times_again() -> None:
    """Times from other constants are predicted after a fit, also for unfitted layouts."""
    layouts = all_layouts()
    names = sorted({name for layout in layouts for name in time_terms(layout, A100)} | TIME.keys())
    truth = {name: TIME.get(name, 1) * (0.6 + 0.1 * (k % 12)) for k, name in enumerate(names)}
    times = [predict_time(layout, A100, truth) for layout in layouts]
    half = np.random.default_rng(0).permutation(len(layouts))[::2]
    weights = fitted_time([layouts[k] for k in half], [times[k] for k in half], A100)
    errors = [
        abs(predict_time(layout, A100, weights) / k - 1)
        for layout, k in zip(layouts, times, strict=True)
    ]
    assert max(errors) < 0.03
    assert weights["product"] == pytest.approx(truth["product"], rel=0.1)


def test_runs_far_off_move_little() -> None:
    """Outliers in one of ten runs hardly change the predictions of the others."""
    layouts = all_layouts()
    times = [predict_time(layout, A100, TIME) for layout in layouts]
    with_outliers = [seconds * (2 if index % 10 == 0 else 1) for index, seconds in enumerate(times)]
    weights = fitted_time(layouts, with_outliers, A100)
    errors = [
        abs(predict_time(layout, A100, weights) / seconds - 1)
        for layout, seconds in zip(layouts, times, strict=True)
    ]
    assert np.median(errors) < 0.05


def test_what_no_run_tells_stays() -> None:
    """One run on one rank gives no weight of the network."""
    layout = Layout(SHAPE, 8, 1, 1, 1, 1, "flash2")
    weights = fitted_time([layout], [2 * predict_time(layout, A100, TIME)], A100)
    assert "pp" not in weights
    assert weights["product"] > TIME["product"]


def test_memory_is_fitted_to_what_ran() -> None:
    """A fit to runs that fitted or not predicts which runs fit."""
    layouts = [replace(layout, shape=replace(SHAPE, layers=60)) for layout in all_layouts()]
    truth = {name: 2 * value for name, value in MEMORY.items()}
    fits = [peak_bytes(layout, A100, truth) <= A100.memory for layout in layouts]
    assert 0 < sum(fits) < len(fits)
    weights = fitted_fill(layouts, fits, A100)
    predicted = [peak_bytes(layout, A100, weights) <= A100.memory for layout in layouts]
    assert (
        np.mean([layout == expected for layout, expected in zip(predicted, fits, strict=True)])
        > 0.95
    )


def test_rank_correlation_as_counted() -> None:
    """Kendall's tau equals a count over all pairs."""
    draw = np.random.default_rng(0)
    xs, ys = draw.integers(0, 6, 20), draw.integers(0, 6, 20)
    counted = [
        int(np.sign(xs[i] - xs[j]) * np.sign(ys[i] - ys[j])) for i, j in combinations(range(20), 2)
    ]
    assert kendall_tau(list(xs), list(ys)) == pytest.approx(sum(counted) / len(counted))
    assert kendall_tau([1.0], [1.0]) is None


# -- benchmark -------------------------------------------------------------------------------------

GOOD: Row = {
    "model": "llama-13B",
    "seq": 2048,
    "gpus": 64,
    "mb": 1,
    "tp": 2,
    "pp": 2,
    "act_ckpt": "disabled",
    "kernel": "torch",
    "step_s": 50.0,
    "status": "ok",
}


def bad_file_text(**given: object) -> str:
    """Return the JSON of one valid row with changed values."""
    return json.dumps([GOOD | given])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "cannot read"),
        ("{", "cannot read"),
        ("{}", "must be a list"),
        ("[]", "must be a list"),
        ("[1]", "must be a list"),
        (json.dumps([{"model": "llama-13B"}]), "a row has no seq"),
        (bad_file_text(step_s=-1), "step_s"),
        (bad_file_text(step_s=0), "step_s"),
        (bad_file_text(step_s="50"), "step_s"),
        (bad_file_text(step_s=float("nan")), "step_s"),
        (bad_file_text(tp=0), "above 0"),
        (bad_file_text(mb=-1), "above 0"),
        (bad_file_text(pp=1.5), "above 0"),
        (bad_file_text(tp=True), "above 0"),
        (bad_file_text(tp=64, pp=2), "too large"),
        (bad_file_text(kernel="other"), "unknown model or kernel"),
        (bad_file_text(model=[]), "unknown model or kernel"),
        (bad_file_text(step_s=None, status="OOM Error"), "no row was measured"),
    ],
)
def test_bad_rows_end_in_one_line(
    text: str | None, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bad rows end with exit code 2 and one line, in either file."""
    good_file, bad_file = tmp_path / "good.json", tmp_path / "other.json"
    good_file.write_text(bad_file_text())
    if text is not None:
        bad_file.write_text(text)
    for calibration, evaluation in ((good_file, bad_file), (bad_file, good_file)):
        assert main(["--calibrate", str(calibration), "--evaluate", str(evaluation)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert told in captured.err
        assert captured.err.count("\n") == 1


def test_kernel_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A kernel without any fitted run is refused."""
    calibration, evaluation = tmp_path / "one.json", tmp_path / "two.json"
    calibration.write_text(bad_file_text())
    evaluation.write_text(bad_file_text(kernel="fused"))
    assert main(["--calibrate", str(calibration), "--evaluate", str(evaluation)]) == 2
    assert capsys.readouterr().err == "one.json has no run of fused\n"


@pytest.mark.parametrize(
    "rows", [[GOOD], [GOOD, GOOD | {"mb": 8, "step_s": None, "status": "OOM Error"}]]
)
def test_group_of_one(rows: list[Row], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A single run has no rank correlation, and is chosen."""
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    assert main(["--calibrate", str(path), "--evaluate", str(path), "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert results["tau_over_all"] is None
    assert results["groups"]["llama-13B 64 2048"]["regret"] == 0
    assert main(["--calibrate", str(path), "--evaluate", str(path)]) == 0
    assert "mape" in capsys.readouterr().out


@pytest.mark.skipif(ROWS is None, reason="published runs are not here")
@pytest.mark.parametrize(
    ("held", "mape", "least", "right"),
    [
        (lambda row: row["model"] == "llama-13B" and row["seq"] == 8192, 0.03, 0.93, 0.95),
        (lambda row: row["model"] == "llama-30B" and row["seq"] == 8192, 0.02, 0.95, 0.99),
        (lambda row: row["gpus"] == 64, 0.07, 0.7, 0.95),
        (lambda row: row["gpus"] == 256, 0.06, 0.75, 0.98),
    ],
    ids=["13B, 8192", "30B, 8192", "13B, 2048", "30B, 2048"],
)
def test_groups_left_out(
    held: Callable[[Row], bool], mape: float, least: float, right: float
) -> None:
    """Fitted to three groups, the fourth is predicted within bounds, and the chosen layout fits."""
    assert ROWS is not None
    rows = read_rows(ROWS)
    results = evaluate(
        [row for row in rows if held(row)], calibrate([row for row in rows if not held(row)])
    )
    assert results["mape"] <= mape
    assert results["tau_over_all"] >= least
    assert results["fits_right"] >= right
    assert not any(group["chosen_does_not_fit"] for group in results["groups"].values())


@pytest.mark.skipif(ROWS is None, reason="published runs are not here")
@pytest.mark.parametrize("seed", range(2))
def test_half_tells_the_other(seed: int) -> None:
    """Fitted to a random half of the runs, the other half is predicted within bounds."""
    assert ROWS is not None
    rows = read_rows(ROWS)
    order = np.random.default_rng(seed).permutation(len(rows))
    calibration, evaluated_rows = ([rows[k] for k in part] for part in np.array_split(order, 2))
    results = evaluate(evaluated_rows, calibrate(calibration))
    assert results["mape"] <= 0.03
    assert results["tau_over_all"] >= 0.92
    assert results["fits_right"] >= 0.95
    assert not any(group["chosen_does_not_fit"] for group in results["groups"].values())


def campaign_rows() -> list[Row]:
    """Return the rows of one campaign, without times."""
    sizes = product((1, 2), (1, 2, 4), (1, 2, 4), ("disabled", "every_layer"))
    return [
        GOOD | {"mb": mb, "tp": tp, "pp": pp, "act_ckpt": checkpointing}
        for mb, tp, pp, checkpointing in sizes
    ]


@pytest.mark.parametrize(
    "habit", [{"flushes": 8, "reduced": False}, {"flushes": 4, "reduced": True}]
)
def test_habits_are_told_by_runs(habit: dict[str, object]) -> None:
    """The fit finds which of two campaigns flushes its pipeline more often."""
    rows = [
        row | {"kernel": kernel}
        for kernel in ("torch", "flash_attention2")
        for row in campaign_rows()
    ]
    name = "llama-13B 64 2048 flash2"
    truth = {**TIME, "dp": 8.0}  # so that a sum over replicas is seen
    run_layouts = layouts_of(rows, {name: habit})
    rows = [
        row | {"step_s": predict_time(layout, A100, truth)}
        for row, layout in zip(rows, run_layouts, strict=True)
    ]
    assert fit_habits(rows) == {name: habit}


def test_usual_runs_have_no_habits() -> None:
    """With one flush a step and 2 % noise, no habit is reported."""
    draw = np.random.default_rng(0)
    rows = campaign_rows()
    rows = [
        row | {"step_s": predict_time(layout, A100, TIME) * float(np.exp(0.02 * draw.normal()))}
        for row, layout in zip(rows, layouts_of(rows, {}), strict=True)
    ]
    assert fit_habits(rows) == {}
