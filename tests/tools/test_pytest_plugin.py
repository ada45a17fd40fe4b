"""The pytest plugin: which schedules are collected, their outcomes, and reports."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from schedlang.report import Report, Row
from tests import forks

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[2]
PLUGIN = ("-p", "schedlang.pytest_plugin", "-p", "no:cacheprovider")

MODEL = """
import os
import torch
from torch import nn
import torch.distributed as dist

def ranks():
    return dist.is_initialized() and dist.get_backend() == "gloo"  # real ones, not played

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x, y):
        h = torch.relu(self.up(x))
        FAULT
        return ((self.down(h) - y) ** 2).mean()

def model():
    return Net()

def batch(seed):
    g = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(4, 6, generator=g), "y": torch.randn(4, 6, generator=g)}
"""
GOOD = """\
schedule 1 for Net

mesh(tp=2)

step "halves" {
  up    shard(col, over=tp)
  down  shard(row, over=tp)
  verify(forward, backward)
}
"""
LIBRARY = "schedule 1\n\ndef pair(over: axis) {\n  up  shard(col, over=over)\n}\n"
WRONG = MODEL.replace("FAULT", "h = h * (1 + 1e-3 * (h.shape[-1] < 8 and ranks()))")
DEADLY = MODEL.replace("FAULT", "os._exit(7) if ranks() else None")
SOUND = MODEL.replace("FAULT", "pass")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Hide this job's GitHub variables and installed plugins from runs inside a test.

    What they import stays imported: torch cannot be imported twice, and two copies of a class are
    not the same class.
    """
    monkeypatch.setattr("_pytest.pytester.SysModulesSnapshot.restore", lambda self: None)
    if "pytester" in request.fixturenames:
        # its own rootdir, whatever is above the temporary folder
        request.getfixturevalue("pytester").makeini("[pytest]\n")
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def item_names(result: pytest.RunResult) -> list[str]:
    """The items that a collection lists."""
    return [line for line in result.outlines if "::" in line]


def write_files(folder: Path, **files: str) -> None:
    """Write schedules by name, and `model` as model.py."""
    folder.mkdir(exist_ok=True, parents=True)
    for name, text in files.items():
        (folder / ("model.py" if name == "model" else f"{name}.sched")).write_text(text)


# ---- what is collected --------------------------------------------------------------------------


def test_schedules_are_collected_when_asked_for(pytester: pytest.Pytester) -> None:
    """`--schedlang` collects folders, a file name collects itself; a library has only `check`."""
    write_files(pytester.path / "a", good=GOOD, library=LIBRARY, model=SOUND)
    assert not item_names(pytester.runpytest(*PLUGIN, "--collect-only", "-q"))
    collected = item_names(pytester.runpytest(*PLUGIN, "--collect-only", "-q", "a/good.sched"))
    expected = [f"a/good.sched::{question}" for question in ("check", "static", "verify")]
    assert collected == expected
    collected = item_names(pytester.runpytest(*PLUGIN, "--collect-only", "-q", "--schedlang"))
    assert collected == [*expected, "a/library.sched::check"]


def test_the_static_level_has_no_item_that_could_pass_unrun(pytester: pytest.Pytester) -> None:
    """The static level does not collect `verify`; unknown levels are refused."""
    write_files(pytester.path, good=GOOD, model=SOUND)
    static = ("--schedlang-level", "static", "good.sched")
    assert item_names(pytester.runpytest(*PLUGIN, "--collect-only", "-q", *static)) == [
        "good.sched::check",
        "good.sched::static",
    ]
    assert pytester.runpytest(*PLUGIN, "--schedlang-level", "fwd").ret == 4


def test_a_refused_schedule_fails_on_its_line(pytester: pytest.Pytester) -> None:
    """A mistake fails `check` with file, line and diagnostic."""
    write_files(pytester.path, bad=GOOD.replace("shard(row", "shard(rows"), model=SOUND)
    write_files(pytester.path, torn=GOOD.replace("halves", 'halves" "'))
    result = pytester.runpytest(*PLUGIN, "--schedlang", "-k", "check")
    result.assert_outcomes(failed=2, deselected=2)
    result.stdout.fnmatch_lines(["bad.sched:7: check refused", "error[[]S303[]]: *"])
    result.stdout.fnmatch_lines(["torn.sched:5: check refused"])


def test_locks_are_items(pytester: pytest.Pytester) -> None:
    """An existing lock is compared; `--schedlang-locked` requires one."""
    from schedlang.verbs.inputs import account_costs, plan_schedule
    from schedlang.verbs.lockfile import lock_path, write_lock

    write_files(pytester.path, good=GOOD, library=LIBRARY, model=SOUND)
    static = ("--schedlang", "--schedlang-level", "static")
    missing = pytester.runpytest(*PLUGIN, *static, "--schedlang-locked", "-v")
    missing.assert_outcomes(passed=3, failed=1)
    missing.stdout.fnmatch_lines(
        ["*good.sched::lock FAILED*", "*`schedlang plan good.sched --lock`"]
    )
    planned = plan_schedule(pytester.path / "good.sched", None, None, None)
    write_lock(planned, account_costs(planned), None, None)
    pytester.runpytest(*PLUGIN, *static).assert_outcomes(passed=4)
    path = lock_path(pytester.path / "good.sched")
    write_files(
        pytester.path, model=SOUND.replace("(6, 8)", "(6, 10)").replace("(8, 6)", "(10, 6)")
    )
    changed = pytester.runpytest(*PLUGIN, *static)
    changed.assert_outcomes(passed=3, failed=1)
    changed.stdout.fnmatch_lines(
        ["*~ parameters  up.weight  float32[[]8, 6[]] -> float32[[]10, 6[]]"]
    )
    path.write_text("")
    torn = pytester.runpytest(*PLUGIN, *static)
    torn.assert_outcomes(passed=3, failed=1)
    torn.stdout.fnmatch_lines(["good.sched:1: lock refused"])


@pytest.mark.parametrize("line", ["good.sched", "good.sched:", "*"])
def test_what_an_ini_value_says_is_read_or_refused(pytester: pytest.Pytester, line: str) -> None:
    """A wrong line in the ini file ends the run, instead of being ignored."""
    write_files(pytester.path, good=GOOD)
    pytester.makeini(f"[pytest]\nschedlang_refused = {line}\n")
    result = pytester.runpytest(*PLUGIN, "good.sched")
    assert result.ret not in (0, 5)
    result.stdout.fnmatch_lines([f"*schedlang_refused: `{line}` is not FILE: VALUE"])


# ---- how they end -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outcome of a run with schedules that pass, fail, are refused, skipped, or kill a rank."""
    folder = tmp_path_factory.mktemp("ended")
    four_ranks = GOOD.replace("tp=2", "tp=4")  # good on fewer ranks, see below
    write_files(folder / "models", model=SOUND)
    write_files(folder / "sound", good=four_ranks, big=four_ranks, odd=GOOD.replace("tp=2", "tp=3"))
    write_files(folder / "wrong", bad=GOOD, model=WRONG)
    write_files(folder / "deadly", dead=GOOD, model=DEADLY)
    (folder / "pytest.ini").write_text(
        "[pytest]\nschedlang_model_paths = models\n"
        "schedlang_mesh = sound/g*.sched: tp=2\n"
        "schedlang_refused = sound/odd.sched: S402\n"
    )
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "GITHUB_ACTIONS": "true",
        "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
        "GITHUB_WORKSPACE": str(folder.parent),
    }
    options = "--schedlang -vrs --junitxml junit.xml --schedlang-dtype none --schedlang-seed 5"
    args = ["-m", "pytest", *PLUGIN, *options.split(), "--schedlang-world", "3"]
    result = forks.run(*args, cwd=folder, env=environ)
    junit = ElementTree.parse(folder / "junit.xml").getroot()
    cases = {f"{c.get('classname')}::{c.get('name')}": c for c in junit.iter("testcase")}
    return {
        "out": result.stdout,
        "err": result.stderr,
        "ret": result.returncode,
        "cases": cases,
        "summary": (folder / "summary.md").read_text(),
        "folder": folder.name,
    }


def test_each_ends_as_it_should(ended: dict[str, Any]) -> None:
    """Equal passes, different fails, a dead rank is an error, a large mesh is skipped."""
    for line in (
        "sound/good.sched::verify PASSED",
        "sound/odd.sched::verify PASSED",
        "sound/big.sched::verify SKIPPED",
        "wrong/bad.sched::verify FAILED",
        "deadly/dead.sched::verify ERROR",
    ):
        assert re.search(rf"^{re.escape(line)}", ended["out"], re.M), ended["out"] + ended["err"]
    skipped = r"SKIPPED \[1\] sound/big\.sched:5: .*mesh tp=4 has 4 ranks, at most 3 are started"
    assert re.search(skipped, ended["out"]), ended["out"]
    assert ended["ret"] == 1
    assert "1 failed, 12 passed, 1 skipped, 1 error" in ended["out"], ended["out"]


def test_a_failure_names_the_guilty_row(ended: dict[str, Any]) -> None:
    """A failure begins with file:line: as editors expect, followed by the report."""
    section = ended["out"].split("verify of bad.sched")[1]
    assert re.search(r"^wrong/bad\.sched:6: verify fails$", section, re.M), section
    assert "to blame" in section and "schedlang verify wrong/bad.sched --seed 5" in section
    section = ended["out"].split("verify of dead.sched")[1]
    assert re.search(r"^deadly/dead\.sched:1: verify could not be checked$", section, re.M), section
    assert "rank" in section


def test_junit_has_the_figures(ended: dict[str, Any]) -> None:
    """The JUnit test case has a proof's figures as properties."""
    cases = ended["cases"]

    def properties(name: str) -> dict[str, str]:
        return {p.get("name"): p.get("value") for p in cases[name].iter("property")}

    passed = properties("sound.good.sched::verify")
    assert float(passed["max_rel_err"]) < 1e-9 and passed["first_divergence"] == ""
    assert (passed["seed"], passed["equivalence"], passed["mesh"]) == ("5", "algebraic", "tp=2")
    failed = properties("wrong.bad.sched::verify")
    assert float(failed["max_rel_err"]) > 1e-9 and failed["suspect_line"] == "wrong/bad.sched:6"
    assert failed["first_divergence"].startswith("outputs: ")
    assert cases["deadly.dead.sched::verify"].find("error") is not None
    assert cases["wrong.bad.sched::verify"].find("failure") is not None
    assert cases["sound.big.sched::verify"].find("skipped") is not None


def test_github_is_told(ended: dict[str, Any]) -> None:
    """Failures and unchecked schedules are annotated, others not; there is one summary table."""
    notes = re.findall(r"^::error (.*?)::(.*)$", ended["out"], re.M)
    prefix = f"file={ended['folder']}/"
    assert sorted(head for head, _ in notes) == [
        f"{prefix}deadly/dead.sched,line=1,title=schedlang equivalence",
        f"{prefix}wrong/bad.sched,line=6,title=schedlang equivalence",
    ]
    assert all("%0A" in text for _, text in notes)
    rows = ended["summary"].split("\n")
    assert "| `wrong/bad.sched` | verify | ❌ fails |" in ended["summary"]
    assert sum(row.startswith("| `") for row in rows) == 15
    assert "left out" in ended["summary"] and "⚠️ could not be checked" in ended["summary"]


# ---- beside other plugins, and without any schedule ---------------------------------------------

FAKE = """
import os, time
from pathlib import Path
import schedlang.verbs.examine as examine
from schedlang.verbs.examine import Outcome

def verify(file, wish, ranks):
    def say(word):
        with open("said.txt", "a") as out:
            out.write(f"{word} {os.getpid()} {os.environ['PYTEST_XDIST_WORKER']}\\n")
    say("in")
    time.sleep(0.4)
    say("out")
    fails = file.name == "b1.sched"
    return Outcome(file, "verify", code=int(fails), line=3, text="two\\nlines")

examine.verify = verify
examine.static = lambda file, wish: Outcome(file, "static")
"""


def test_workers_take_turns(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under pytest-xdist only one worker at a time runs ranks, and all results are reported."""
    pytest.importorskip("xdist")
    write_files(pytester.path, model=SOUND, **{f"b{i}": GOOD for i in range(6)})
    pytester.makeconftest(FAKE)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(pytester.path / "summary.md"))
    result = pytester.runpytest_subprocess(*PLUGIN, "-p", "xdist", "-n", "2", "--schedlang")
    result.assert_outcomes(passed=17, failed=1)
    result.stdout.fnmatch_lines(["::error file=b1.sched,line=3,title=*::two%0Alines"])
    assert (pytester.path / "summary.md").read_text().count("\n| `b") == 18
    entries = [line.split() for line in (pytester.path / "said.txt").read_text().splitlines()]
    assert [event for event, *_ in entries] == ["in", "out"] * 6
    assert all(a[1:] == b[1:] for a, b in zip(entries[::2], entries[1::2]))
    assert len({worker for *_, worker in entries}) == 2


def test_a_run_without_schedules_pays_nothing(tmp_path: Path) -> None:
    """In other runs the plugin imports only itself."""
    (tmp_path / "test_other.py").write_text(
        "import sys\n\n\ndef test_nothing():\n"
        "    mine = {n for n in sys.modules if n.startswith('schedlang')}\n"
        "    assert mine == {'schedlang', 'schedlang.pytest_plugin'}, mine\n"
        "    assert not {'torch', 'lark', 'rich', 'typer'} & set(sys.modules)\n"
    )
    (tmp_path / "x.sched").write_text("no schedule")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", *PLUGIN, "-q"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0 and "1 passed" in result.stdout, result.stdout


def test_the_entry_point_is_declared() -> None:
    """The package declares the plugin's pytest entry point."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (name,) = project["entry-points"]["pytest11"].values()
    assert hasattr(importlib.import_module(name), "pytest_collect_file")


def test_the_test_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test on docs/ci.md runs as printed, and fails where the proof does."""
    page = (ROOT / "docs" / "ci.md").read_text()
    (text,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    calls: list[Any] = []

    def verify(sch: Any, *, batch: Any, loss: Any) -> Report:
        calls.append((sch.plan().mesh.world, batch(0).keys(), loss))
        return Report((Row("", "loss", "loss", 0.0, 1e-9, ok=len(calls) == 1),))

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("schedlang.equivalence.verify", verify)
    names: dict[str, Any] = {}
    exec(text, names)
    names["test_two_stages"]()
    assert len(calls) == 1 and calls[0][0] == 6
    with pytest.raises(AssertionError, match="differs from its model"):
        names["test_two_stages"]()
