"""Tests of report: its verdict, its JSON and its table."""

import json
import math
import subprocess
import sys

from schedlang.report import Gap, Report, Row

GOOD = Row("SGD", "gradients", "w", 1e-15, 1e-9, True, 0)
EXACT = Row("SGD", "trainable set", "3 = 3", 0.0, 0.0, True)
BAD = Row("SGD", "gradients", "b", math.nan, 1e-9, False, 0, "not finite")


def test_the_verdict() -> None:
    """Equal is 0, different 1; what was not fully compared never passes."""
    assert (Report((GOOD, EXACT)).ok, Report((GOOD, EXACT)).exit_code) == (True, 0)
    assert (Report((GOOD, BAD)).ok, Report((GOOD, BAD)).exit_code) == (False, 1)
    for partial in (Report(()), Report((GOOD,), unchecked=("a kernel",))):
        assert (partial.ok, partial.exit_code) == (False, 3)
    assert Report((BAD,), unchecked=("a kernel",)).exit_code == 1


def test_worst_and_first() -> None:
    """The worst of equal rows is the nearest to its gate; a failing row comes before all."""
    near = Row("SGD", "parameters", "w", 1e-10, 1e-9, True)
    assert Report((GOOD, near, EXACT)).worst == near
    assert Report((GOOD, near, BAD)).worst == Report((GOOD, near, BAD)).first == BAD
    assert Report(()).worst is None


def test_json_is_json() -> None:
    """Numbers that JSON lacks become words; everything else is there."""
    report = Report((GOOD, BAD), facts=(("mesh", "tp=2"),), gaps=(Gap("a", "b"),))
    found = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert found["rows"][1]["error"] == "nan" and found["worst"]["name"] == "b"
    assert found["facts"] == {"mesh": "tp=2"} and found["gaps"] == [
        {"condition": "a", "hides": "b"}
    ]
    assert not found["ok"] and found["exit_code"] == 1


def test_the_table_says_it_all() -> None:
    """Kinds with counts and verdicts, the first difference, blame, command and gaps are printed."""
    report = Report(
        (GOOD, BAD, EXACT),
        title="gpt2/tp.sched",
        gaps=(Gap("no padding", "mask bugs"),),
        unchecked=("kernel rmsnorm was not run",),
        command="schedlang verify x --seed 3",
    ).blame("line 4: shard", diagnosis="tp = 2 times")
    text = str(report)
    for words in (
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
        assert words in text
    assert "PASS" in str(Report((GOOD, EXACT)))


def test_no_torch_is_needed() -> None:
    """A report can be read and printed where torch is not imported."""
    code = "import sys, schedlang.report as r; str(r.Report(())); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
