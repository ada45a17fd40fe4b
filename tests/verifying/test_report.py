"""The report of a proof: verdict, JSON, and its table on terminals of any width."""

import json
import math
import subprocess
import sys

import pytest

from schedlang.report import Gap, Report, Row, report_lines

GOOD = Row("SGD", "gradients", "w", 1e-15, 1e-9, True, 0)
EXACT = Row("SGD", "trainable set", "3 = 3", 0.0, 0.0, True)
BAD = Row("SGD", "gradients", "b", math.nan, 1e-9, False, 0, "not finite")


def test_the_verdict() -> None:
    """Exit code 0: equal; 1: different; 3: not fully checked, which never passes."""
    assert (Report((GOOD, EXACT)).ok, Report((GOOD, EXACT)).exit_code) == (True, 0)
    assert (Report((GOOD, BAD)).ok, Report((GOOD, BAD)).exit_code) == (False, 1)
    for partial in (Report(()), Report((GOOD,), unchecked=("a kernel",))):
        assert (partial.ok, partial.exit_code) == (False, 3)
    assert Report((BAD,), unchecked=("a kernel",)).exit_code == 1


def test_worst_and_first() -> None:
    """`worst` is the row nearest to its tolerance, or a failing one; `first` the first failure."""
    near_row = Row("SGD", "parameters", "w", 1e-10, 1e-9, True)
    assert Report((GOOD, near_row, EXACT)).worst == near_row
    assert Report((GOOD, near_row, BAD)).worst == Report((GOOD, near_row, BAD)).first == BAD
    assert Report(()).worst is None


def test_json_is_json() -> None:
    """The report can be written as JSON; NaN becomes a string."""
    report = Report((GOOD, BAD), facts=(("mesh", "tp=2"),), gaps=(Gap("a", "b"),))
    document = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert document["rows"][1]["error"] == "nan" and document["worst"]["name"] == "b"
    assert document["facts"] == {"mesh": "tp=2"} and document["gaps"] == [
        {"condition": "a", "hides": "b"}
    ]
    assert not document["ok"] and document["exit_code"] == 1


def test_the_table_says_it_all() -> None:
    """The table shows kinds, counts, verdicts, first difference, blame, command and gaps."""
    report = Report(
        (GOOD, BAD, EXACT),
        title="gpt2/tp.sched",
        gaps=(Gap("no padding", "mask bugs"),),
        unchecked=("kernel rmsnorm was not run",),
        command="schedlang verify x --seed 3",
    ).blame("line 4: shard", diagnosis="tp = 2 times")
    text = str(report)
    for expected_text in (
        "gpt2/tp.sched",
        "1 / 2",
        "DIFFERENT",
        "3 = 3",
        "exact",
        "gradients: b (SGD, step 0)",
        "not finite",
        "tp = 2 times",
        "line 4: shard",
        "schedlang verify x --seed 3",
        "no padding",
        "not checked: kernel rmsnorm",
        "FAIL",
    ):
        assert expected_text in text
    assert "PASS" in str(Report((GOOD, EXACT)))


def test_no_torch_is_needed() -> None:
    """A report can be read and printed where torch is not imported."""
    code = "import sys, schedlang.report as r; str(r.Report(())); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- Terminals of any width: no name is cut, one line lists what was not exercised.


NAMES = ("transformer.h.0.attn.c_attn.weight", "transformer.h.11.mlp.c_proj.bias")
KINDS = ("outputs", "gradients", "optimizer exp_avg_sq")
ROWS = tuple(Row("SGD", k, name, 1e-15, 1e-9, True, 0) for k in KINDS for name in NAMES)
GAPS = tuple(
    Gap(said, f"mistakes of kind {place}")
    for place, said in enumerate(("no float inputs", "no dropout", "one length only", "no padding"))
)
FACTS = (("mesh", "dp=2, tp=2 (4 ranks)"), ("fused", "a sentence of its own, " * 6))


def make_report(**options: object) -> Report:
    return Report(ROWS, "x.sched", FACTS, gaps=GAPS, seconds=3.0, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_it_fits(width: int) -> None:
    """No line is wider than the terminal, and no name is broken."""
    lines = [text for _, text in report_lines(make_report(), width)]
    assert max(map(len, lines)) <= width
    printed_words = {printed for line in lines for printed in line.split()}
    assert NAMES[0] in printed_words
    # a wide one has each comparison on one line, a narrow one the name below
    assert sum("2 / 2" in line and NAMES[0] in line for line in lines) == (3 if width > 90 else 0)


def test_pass_stands_alone() -> None:
    """A pass shows the verdict and one line of gaps; details only with `verbose`."""
    lines = [text for _, text in report_lines(make_report(), 80)]
    assert lines[-2] == " PASS in 3.0 s · equal up to floating-point rounding"
    assert lines[-1] == " not exercised: no float inputs, no dropout and 2 more (--verbose)"
    assert not any("could hide" in line for line in lines)
    verbose_lines = [text for _, text in report_lines(make_report(), 80, verbose=True)]
    assert [
        line for line in verbose_lines if "could hide mistakes of kind" in line
    ] == verbose_lines[-4:]
    assert "(report.gaps)" in str(make_report())


def test_what_was_not_checked_is_always_said() -> None:
    """Unchecked parts are always listed: they decide the verdict."""
    report = make_report(unchecked=("a kernel that nobody ran",))
    text = str(report)
    assert " not checked: a kernel that nobody ran" in text
    assert "NOT FULLY CHECKED in 3.0 s · compared up to" in text


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("exact", "equal bit by bit"),
        ("algebraic", "equal up to floating-point rounding"),
        ("relaxed (dtype, routing)", "under the same relaxed rules (dtype, routing)"),
    ],
)
def test_equal_in_words(kind: str, said: str) -> None:
    """The verdict describes the equivalence in plain words."""
    text = str(make_report(equivalence=kind))
    assert said in text and "class" not in text and "algebraic" not in text


def test_a_difference_is_never_called_equal() -> None:
    """A failure is never called equal; `repr` names the first difference in one line."""
    failed_row = Row("SGD", "gradients", "w", 0.5, 1e-9, False, 0)
    report = Report((*ROWS, failed_row), "x.sched", gaps=GAPS)
    verdict = next(line for line in str(report).splitlines() if "FAIL" in line)
    assert "equal" not in verdict
    assert "FAIL" in repr(report) and "gradients: w (SGD, step 0)" in repr(report)
    assert "\n" not in repr(report) and len(repr(report)) < 200
