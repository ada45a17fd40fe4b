"""The cost of layouts: its terms, its fit, and its benchmark against published runs."""

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
    bytes_of,
    cuts_of,
    fitted_time,
    memory_of_runs,
    seconds_of,
    time_terms,
)
from tests.benchmarks.published import (
    Row,
    calibrated,
    evaluated,
    habits_of,
    layouts,
    main,
    read,
    tau,
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


def drawn() -> list[Layout]:
    """Layouts of all kernels, with one of each sort of rank."""
    return [
        Layout(SHAPE, 512, 32, micro, tp, pp, kernel, again, norm)
        for micro, tp, pp, kernel, again, norm in product(
            (1, 2),
            (1, 2, 4),
            (1, 2, 4),
            ("torch", "fused", "flash1", "flash2"),
            *[(False, True)] * 2,
        )
    ]


# -- terms -----------------------------------------------------------------------------------------


def test_products_take_what_the_largest_reach() -> None:
    """One rank, no recomputation: 6 operations for each weight and token, at what is reached."""
    one = Layout(SHAPE, 8, 1, 1, 1, 1, "flash2")
    weights = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 32000 * 4096
    reached = A100.speed * A100.product
    took = time_terms(one, A100)["product"]
    assert took == pytest.approx(6 * weights * 8 * 2048 / reached, rel=0.01)  # and ramps


def test_one_rank_sends_nothing() -> None:
    """No term of a network where there is none."""
    found = time_terms(Layout(SHAPE, 8, 1, 1, 1, 1, "torch"), A100)
    axes = ("tp", "pp", "dp")
    assert not any(found.get(name, 0) for axis in axes for name in (axis, f"{axis} start"))
    assert found["attention torch"] > 0


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
    """More operations, more passes, more to send."""
    one, two = ((seconds_of(at, A100, TIME), at.ranks) for at in (slower, quicker))
    assert one[0] * one[1] > two[0] * two[1]


def test_more_stages_wait_longer() -> None:
    """The same microbatches and rows of a rank: a longer pipeline is filled for longer."""
    took = [
        time_terms(replace(ONE, pp=pp, ranks=8 * pp), A100)["other"] * pp for pp in (1, 2, 4, 8)
    ]
    assert took == sorted(took)
    assert took[0] < took[-1]


@pytest.mark.parametrize("pp", range(1, 17))
def test_slowest_stage_is_the_least_of_all_divisions(pp: int) -> None:
    """Whole layers, all stages but the last alike as far as they can be."""
    shape = replace(SHAPE, layers=30)
    head = shape.words * shape.width / (4 * shape.width**2 + 3 * shape.width * shape.inner)
    tried = [
        max(-(-(30 - last) // (pp - 1)) if pp > 1 else 0, last + head)
        for last in range(31)
        if pp > 1 or last == 30
    ]
    first, *middle = cuts_of(shape, pp)
    layers = [first - 1, *middle]
    layers[-1] -= 1
    assert sum(layers) == 30
    assert max(*layers[:-1], layers[-1] + head, 0) == pytest.approx(min(tried))


def test_memory_falls_with_recomputation_and_slicing() -> None:
    """Kept activations, then weights and optimizer state."""
    now = bytes_of(ONE, A100, MEMORY)
    for less in ({"recompute": True}, {"tp": 4}, {"ranks": 64, "rows": 1024}):
        assert bytes_of(replace(ONE, **less), A100, MEMORY) < now
    assert bytes_of(replace(ONE, micro=2), A100, MEMORY) > now


# -- fit -------------------------------------------------------------------------------------------


def test_fit_tells_times_again() -> None:
    """Times made by other constants are told again, of layouts that were not fitted too."""
    layouts = drawn()
    names = sorted({name for one in layouts for name in time_terms(one, A100)} | TIME.keys())
    truth = {name: TIME.get(name, 1) * (0.6 + 0.1 * (at % 12)) for at, name in enumerate(names)}
    took = [seconds_of(one, A100, truth) for one in layouts]
    half = np.random.default_rng(0).permutation(len(layouts))[::2]
    found = fitted_time([layouts[at] for at in half], [took[at] for at in half], A100)
    off = [
        abs(seconds_of(one, A100, found) / at - 1) for one, at in zip(layouts, took, strict=True)
    ]
    assert max(off) < 0.03
    assert found["product"] == pytest.approx(truth["product"], rel=0.1)


def test_runs_far_off_move_little() -> None:
    """One run in ten that took twice as long leaves the others told."""
    layouts = drawn()
    took = [seconds_of(one, A100, TIME) for one in layouts]
    odd = [at * (2 if index % 10 == 0 else 1) for index, at in enumerate(took)]
    found = fitted_time(layouts, odd, A100)
    off = [
        abs(seconds_of(one, A100, found) / at - 1) for one, at in zip(layouts, took, strict=True)
    ]
    assert np.median(off) < 0.05


def test_what_no_run_tells_stays() -> None:
    """Of one run on one rank nothing is learnt about a network."""
    one = Layout(SHAPE, 8, 1, 1, 1, 1, "flash2")
    found = fitted_time([one], [2 * seconds_of(one, A100, TIME)], A100)
    assert "pp" not in found
    assert found["product"] > TIME["product"]


def test_memory_is_fitted_to_what_ran() -> None:
    """Constants that split by twice as much: what fits is told again."""
    layouts = [replace(one, shape=replace(SHAPE, layers=60)) for one in drawn()]
    truth = {name: 2 * value for name, value in MEMORY.items()}
    ran = [bytes_of(one, A100, truth) <= A100.memory for one in layouts]
    assert 0 < sum(ran) < len(ran)
    found = memory_of_runs(layouts, ran, A100)
    told = [bytes_of(one, A100, found) <= A100.memory for one in layouts]
    assert np.mean([one == two for one, two in zip(told, ran, strict=True)]) > 0.95


def test_rank_correlation_as_counted() -> None:
    """Pairs in the same order less pairs in the other, over all."""
    draw = np.random.default_rng(0)
    one, two = draw.integers(0, 6, 20), draw.integers(0, 6, 20)
    counted = [
        int(np.sign(one[i] - one[j]) * np.sign(two[i] - two[j]))
        for i, j in combinations(range(20), 2)
    ]
    assert tau(list(one), list(two)) == pytest.approx(sum(counted) / len(counted))
    assert tau([1.0], [1.0]) is None


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


def bad(**given: object) -> str:
    """A file of one good row with values changed."""
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
        (bad(step_s=-1), "step_s"),
        (bad(step_s=0), "step_s"),
        (bad(step_s="50"), "step_s"),
        (bad(step_s=float("nan")), "step_s"),
        (bad(tp=0), "above 0"),
        (bad(mb=-1), "above 0"),
        (bad(pp=1.5), "above 0"),
        (bad(tp=True), "above 0"),
        (bad(tp=64, pp=2), "too large"),
        (bad(kernel="other"), "unknown model or kernel"),
        (bad(model=[]), "unknown model or kernel"),
        (bad(step_s=None, status="OOM Error"), "no row was measured"),
    ],
)
def test_bad_rows_end_in_one_line(
    text: str | None, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 2, one line, no traceback; the same where they are to be told."""
    good, other = tmp_path / "good.json", tmp_path / "other.json"
    good.write_text(bad())
    if text is not None:
        other.write_text(text)
    for one, two in ((good, other), (other, good)):
        assert main(["--calibrate", str(one), "--evaluate", str(two)]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert told in said.err
        assert said.err.count("\n") == 1


def test_kernel_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A kernel of which no run was fitted is not guessed."""
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    one.write_text(bad())
    two.write_text(bad(kernel="fused"))
    assert main(["--calibrate", str(one), "--evaluate", str(two)]) == 2
    assert capsys.readouterr().err == "one.json has no run of fused\n"


@pytest.mark.parametrize(
    "rows", [[GOOD], [GOOD, GOOD | {"mb": 8, "step_s": None, "status": "OOM Error"}]]
)
def test_group_of_one(rows: list[Row], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One run alone has no order, and is chosen."""
    at = tmp_path / "rows.json"
    at.write_text(json.dumps(rows))
    assert main(["--calibrate", str(at), "--evaluate", str(at), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tau_over_all"] is None
    assert found["groups"]["llama-13B 64 2048"]["regret"] == 0
    assert main(["--calibrate", str(at), "--evaluate", str(at)]) == 0
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
    """Fitted to three groups, the fourth is told within bounds, and what is chosen fits."""
    assert ROWS is not None
    rows = read(ROWS)
    found = evaluated(
        [row for row in rows if held(row)], calibrated([row for row in rows if not held(row)])
    )
    assert found["mape"] <= mape
    assert found["tau_over_all"] >= least
    assert found["fits_right"] >= right
    assert not any(group["chosen_does_not_fit"] for group in found["groups"].values())


@pytest.mark.skipif(ROWS is None, reason="published runs are not here")
@pytest.mark.parametrize("seed", range(2))
def test_half_tells_the_other(seed: int) -> None:
    """Fitted to a half of all runs, drawn at random, the other half is told within bounds."""
    assert ROWS is not None
    rows = read(ROWS)
    order = np.random.default_rng(seed).permutation(len(rows))
    known, asked = ([rows[at] for at in part] for part in np.array_split(order, 2))
    found = evaluated(asked, calibrated(known))
    assert found["mape"] <= 0.03
    assert found["tau_over_all"] >= 0.92
    assert found["fits_right"] >= 0.95
    assert not any(group["chosen_does_not_fit"] for group in found["groups"].values())


def campaign_rows() -> list[Row]:
    """Rows of one campaign, without times."""
    sizes = product((1, 2), (1, 2, 4), (1, 2, 4), ("disabled", "every_layer"))
    return [GOOD | {"mb": mb, "tp": tp, "pp": pp, "act_ckpt": again} for mb, tp, pp, again in sizes]


@pytest.mark.parametrize(
    "habit", [{"flushes": 8, "reduced": False}, {"flushes": 4, "reduced": True}]
)
def test_habits_are_told_by_runs(habit: dict[str, object]) -> None:
    """Of two campaigns one empties its pipeline more often, with sums or without: found."""
    rows = [
        row | {"kernel": kernel}
        for kernel in ("torch", "flash_attention2")
        for row in campaign_rows()
    ]
    name = "llama-13B 64 2048 flash2"
    truth = {**TIME, "dp": 8.0}  # so that a sum over replicas is seen
    ran = layouts(rows, {name: habit})
    rows = [
        row | {"step_s": seconds_of(one, A100, truth)} for row, one in zip(rows, ran, strict=True)
    ]
    assert habits_of(rows) == {name: habit}


def test_usual_runs_have_no_habits() -> None:
    """A pipeline that runs empty once a step, and two in a hundred of noise: nothing is found."""
    draw = np.random.default_rng(0)
    rows = campaign_rows()
    rows = [
        row | {"step_s": seconds_of(one, A100, TIME) * float(np.exp(0.02 * draw.normal()))}
        for row, one in zip(rows, layouts(rows, {}), strict=True)
    ]
    assert habits_of(rows) == {}
