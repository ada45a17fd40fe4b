"""The GitHub action, `ci` and pre-commit: annotations, summary, steps, hooks, exit codes."""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from schedlang.cli import app
from schedlang.diagnostics.annotate import Note, annotation, summarize, table
from schedlang.ir.mesh import Mesh
from schedlang.report import Report, Row
from schedlang.verbs import examine
from schedlang.verbs.examine import Outcome, ProofTerms
from tests.tools.test_pytest_plugin import DEADLY, GOOD, LIBRARY, SOUND, write_files

ROOT = Path(__file__).parents[2]
ACTION, HOOKS = ROOT / "action.yml", ROOT / ".pre-commit-hooks.yaml"


def run_cli(*args: object) -> Result:
    """Run a command of schedlang."""
    return CliRunner().invoke(app, [str(arg) for arg in args])


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove GitHub's environment variables, unless a test sets them."""
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE"):
        monkeypatch.delenv(name, raising=False)


# ---- annotations and the summary ----------------------------------------------------------------


def parse_command(line: str) -> tuple[str, dict[str, str], str]:
    """Parse a workflow command as the runner does: command, properties, message."""
    assert "\n" not in line and "\r" not in line
    match = re.fullmatch(r"::(\w+) (.*?)::(.*)", line)
    assert match is not None, line
    pairs = dict(pair.split("=", 1) for pair in match[2].split(","))

    def plain(text: str, signs: dict[str, str]) -> str:
        for code, sign in signs.items():
            text = text.replace(code, sign)
        return text

    data = {"%0D": "\r", "%0A": "\n"}
    properties = {**data, "%3A": ":", "%2C": ","}
    percent = {"%25": "%"}
    decoded = {key: plain(value, {**properties, **percent}) for key, value in pairs.items()}
    return match[1], decoded, plain(match[3], {**data, **percent})


escaped_text = st.text(st.sampled_from("%0A:,\n\r=;DB2a é"), max_size=12)


@given(escaped_text.filter(bool), escaped_text, st.integers(1, 999))
def test_an_annotation_arrives_as_it_was_said(title: str, text: str, line: int) -> None:
    """The runner parses any title and text back unchanged, as one command."""
    result = parse_command(annotation(Note("a,b/x:1.sched", line, title, text), {}))
    assert result == ("error", {"file": "a,b/x:1.sched", "line": str(line), "title": title}, text)


def test_files_are_named_as_the_repository_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path is relative to the workspace, in whichever subfolder the step runs."""
    (tmp_path / "repo" / "sub").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "repo" / "sub")
    environ = {"GITHUB_WORKSPACE": str(tmp_path / "repo")}
    for name in ("x.sched", str(tmp_path / "repo" / "sub" / "x.sched")):
        assert (
            parse_command(annotation(Note(name, 1, "t", ""), environ))[1]["file"] == "sub/x.sched"
        )
    outside = str(tmp_path / "y.sched")
    assert parse_command(annotation(Note(outside, 1, "t", ""), environ))[1]["file"] == outside


def test_a_table_keeps_its_cells(tmp_path: Path) -> None:
    """Bars and newlines in a cell are escaped; a summary is appended to."""
    text = table(("a", "b"), [("x|y", "1\n2"), ("\\|", "")])
    assert text.split("\n")[2:4] == [r"| x\|y | 1<br>2 |", r"| \\\| |  |"]
    path = tmp_path / "summary.md"
    assert not summarize(text, {})
    assert summarize("one\n", {"GITHUB_STEP_SUMMARY": str(path)})
    assert summarize("two\n", {"GITHUB_STEP_SUMMARY": str(path)})
    assert path.read_text() == "one\ntwo\n"


# ---- the verb -----------------------------------------------------------------------------------


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """Results of `verify` by file name, without running it; `static` always holds."""
    outcomes: dict[str, dict[str, Any]] = {}

    def verify(file: Path, wish: Any, ranks: Any) -> Outcome:
        return Outcome(file, "verify", **outcomes.get(file.stem, {}))

    monkeypatch.setattr(examine, "verify", verify)
    monkeypatch.setattr(examine, "static", lambda file, wish: Outcome(file, "static"))
    return outcomes


@pytest.mark.parametrize(
    ("codes", "whole"),
    [((), 0), ((3,), 3), ((2, 3), 2), ((3, 2, 1), 1), (("skipped",), 3), ((1, "skipped"), 1)],
)
def test_the_exit_code_of_many(
    tmp_path: Path, answers: dict[str, Any], codes: tuple[Any, ...], whole: int
) -> None:
    """Of several files: 1 (fails) goes before 2 (refused), and 2 before 3 (not checked)."""
    write_files(tmp_path, good=GOOD, library=LIBRARY, **{f"x{i}": GOOD for i in range(len(codes))})
    for i, code in enumerate(codes):
        answers[f"x{i}"] = {"skipped": "too large"} if code == "skipped" else {"code": code}
    result = run_cli("ci", tmp_path, "--json")
    assert result.exit_code == whole
    value = json.loads(result.stdout)
    assert value["exit"] == whole
    questions = [(Path(outcome["file"]).stem, outcome["question"]) for outcome in value["outcomes"]]
    expected = [("good", question) for question in ("check", "static", "verify")]
    assert questions[:4] == [*expected, ("library", "check")]
    assert len(questions) == 4 + 3 * len(codes)


def test_ci_tells_github(
    tmp_path: Path, answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Annotations are on the row to blame and the table in the summary, only in a workflow."""
    write_files(tmp_path, good=GOOD, bad=GOOD)
    answers["bad"] = {"code": 1, "text": "different\nhere", "line": 6}
    monkeypatch.chdir(tmp_path)
    assert "::error" not in run_cli("ci", "good.sched", "bad.sched").stdout
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    result = run_cli("ci", "good.sched", "bad.sched")
    (line,) = [line for line in result.stdout.split("\n") if line.startswith("::")]
    assert parse_command(line) == (
        "error",
        {"file": "bad.sched", "line": "6", "title": "schedlang equivalence"},
        "different\nhere",
    )
    summary = (tmp_path / "summary.md").read_text()
    assert "| `bad.sched` | verify | ❌ fails |" in summary and summary.count("\n| `") == 6


def test_ci_meets_refusals_that_are_meant(tmp_path: Path) -> None:
    """An expected refusal holds with its code; another code, or none, does not."""
    pytest.importorskip("torch")
    write_files(tmp_path, odd=GOOD.replace("tp=2", "tp=3"), good=GOOD, model=SOUND)
    odd = tmp_path / "odd.sched"
    assert run_cli("ci", odd).exit_code == 2
    assert run_cli("ci", odd, "--refused", f"{odd}:S402").exit_code == 0
    assert run_cli("ci", odd, "--refused", f"{odd}:S403").exit_code == 2
    assert run_cli("ci", odd, "--refused", f"{tmp_path / 'none.sched'}:S402").exit_code == 2
    assert run_cli("ci", odd, "--static").exit_code == 2
    assert run_cli("ci", odd, "--static", "--refused", f"{odd}:S402").exit_code == 0
    result = run_cli("ci", odd, "--refused", f"{odd}:S402", "--svg", tmp_path / "svg")
    assert result.exit_code == 0 and not (tmp_path / "svg").exists()


def test_meant_to_be_refused_and_is_not() -> None:
    """A schedule that should be refused and is not fails, whatever it computes."""
    meant = examine._check_refusal(Outcome(Path("x"), "verify"), "S402")
    assert meant.code == 1 and "it is not" in meant.text
    assert examine._check_refusal(Outcome(Path("x"), "verify", code=3), "S402").code == 3


def test_ci_finds_schedules(tmp_path: Path, answers: dict[str, Any]) -> None:
    """Folders are searched, hidden folders are not; finding no schedule is refused."""
    write_files(tmp_path / "a" / "b", deep=GOOD)
    write_files(tmp_path / "a" / ".venv", other=GOOD)
    record = json.loads(run_cli("ci", tmp_path / "a", "--json").stdout)
    assert {outcome["file"] for outcome in record["outcomes"]} == {str(tmp_path / "a/b/deep.sched")}
    assert run_cli("ci", tmp_path / "a" / ".venv" / "..", "--static").exit_code == 0
    (tmp_path / "empty").mkdir()
    no_files = run_cli("ci", tmp_path / "empty")
    assert no_files.exit_code == 2 and "S000" in no_files.stderr


def test_ci_compares_locks_and_draws(tmp_path: Path, answers: dict[str, Any]) -> None:
    """A lock is compared if it exists and required with `--locked`; pictures are named by path."""
    write_files(tmp_path, good=GOOD, model=SOUND)
    file = tmp_path / "good.sched"
    assert run_cli("ci", file, "--locked").exit_code == 2
    assert run_cli("plan", file, "--lock").exit_code == 0
    result = run_cli("ci", file, "--locked", "--svg", tmp_path / "svg", "--json")
    assert result.exit_code == 0, result.output
    questions = [outcome["question"] for outcome in json.loads(result.stdout)["outcomes"]]
    assert questions == ["check", "lock", "static", "verify"]
    (picture,) = (tmp_path / "svg").iterdir()
    assert picture.name.endswith("good.sched.svg") and picture.read_text().startswith("<svg")
    write_files(tmp_path, model=SOUND.replace("(6, 8)", "(6, 4)").replace("(8, 6)", "(4, 6)"))
    changed = run_cli("ci", file)
    assert changed.exit_code == 1 and "~ parameters  up.weight" in changed.stdout


def test_a_large_mesh_is_left_out_or_reduced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mesh with too many ranks is skipped, or reduced if `shrink` is set, and this is
    reported."""
    write_files(tmp_path, good=GOOD)
    shrink_options: list[Any] = []

    def posed(file: Path, schedule: Any, inputs: Any, **options: Any) -> Any:
        shrink_options.append(options.get("shrink"))
        mesh = Mesh((("tp", 2 if shrink_options[-1] else 16),))
        case = SimpleNamespace(plan=SimpleNamespace(mesh=mesh))
        small = (
            SimpleNamespace(description="width 64 -> 8", gaps=()) if shrink_options[-1] else None
        )
        return SimpleNamespace(case=case, small=small, command="")

    def prove(case: Any, **options: Any) -> Report:
        assert case.plan.mesh.world == 2
        return Report((Row("", "loss", "loss", 0.0, 1e-9, ok=True),))

    monkeypatch.setattr("schedlang.verbs.inputs.make_proof_case", posed)
    monkeypatch.setattr("schedlang.passes.prove.prove", prove)
    ranks: Any = SimpleNamespace(model_file=lambda named, beside: None, pool=lambda: None)
    skipped = examine.verify(tmp_path / "good.sched", ProofTerms(), ranks)
    assert skipped.skipped and shrink_options == [None] and skipped.to_json()["exit"] == 3
    reduced = examine.verify(tmp_path / "good.sched", ProofTerms(shrink=True), ranks)
    assert (reduced.code, reduced.skipped, shrink_options) == (0, "", [None, None, True])
    assert ("reduced", "width 64 -> 8") in reduced.facts and "width 64 -> 8" in reduced.text


# ---- exit codes of the verbs --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "model", "code"),
    [
        ("fmt --check good.sched", SOUND, 0),
        ("fmt --check loose.sched", SOUND, 1),
        ("fmt torn.sched", SOUND, 2),
        ("check good.sched library.sched", SOUND, 0),
        ("check torn.sched", SOUND, 2),
        ("check none.sched", SOUND, 2),
        ("tree good.sched", SOUND, 0),
        ("tree good.sched --model none.py", SOUND, 2),
        ("plan good.sched", SOUND, 0),
        ("plan odd.sched", SOUND, 2),
        ("plan good.sched --locked", SOUND, 2),
        ("plan good.sched --svg none/x.svg", SOUND, 2),
        ("plan good.sched", "raise OSError('no')", 2),
        ("diff good.sched good.sched", SOUND, 0),
        ("diff good.sched odd.sched", SOUND, 2),
        ("verify odd.sched", SOUND, 2),
        ("verify good.sched --mesh tp=64", SOUND, 2),
        ("verify good.sched --dtype int8", SOUND, 2),
        ("verify good.sched", DEADLY, 3),
        ("run odd.sched", SOUND, 2),
        ("ci good.sched --static", SOUND, 0),
        ("ci torn.sched", SOUND, 2),
        ("simulate", SOUND, 0),
        ("simulate --order none", SOUND, 2),
        ("explain S402", SOUND, 0),
        ("explain S999", SOUND, 2),
        ("none", SOUND, 2),
        ("verify", SOUND, 2),
    ],
)
def test_exit_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, model: str, code: int
) -> None:
    """Every command exits with 0 holds, 1 fails, 2 refused, 3 could not be checked."""
    write_files(
        tmp_path,
        good=GOOD,
        library=LIBRARY,
        odd=GOOD.replace("tp=2", "tp=3"),
        torn="schedule 1\nstep {\n",
        loose=GOOD.replace("mesh(tp", "mesh( tp"),
        model=model,
    )
    monkeypatch.chdir(tmp_path)
    result = run_cli(*words.split())
    assert result.exit_code == code, result.output


# ---- the action ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def action() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    content: dict[str, Any] = yaml.safe_load(ACTION.read_text())
    return content


def test_the_action_has_the_form_of_one(action: dict[str, Any]) -> None:
    """action.yml has the keys of a composite action; each step runs something, in bash."""
    assert set(action) <= {"name", "author", "description", "inputs", "outputs", "runs", "branding"}
    assert isinstance(action["name"], str) and isinstance(action["description"], str)
    assert len(action["description"]) < 125  # more the marketplace does not take
    for name, value in action["inputs"].items():
        assert re.fullmatch(r"[a-z_][a-z0-9_-]*", name)
        assert set(value) <= {"description", "required", "default"} and value["description"]
        assert isinstance(value["default"], str)
    assert set(action["runs"]) == {"using", "steps"} and action["runs"]["using"] == "composite"
    for step in action["runs"]["steps"]:
        assert ("run" in step) != ("uses" in step)
        allowed = {"run": {"shell", "env", "run", "working-directory"}, "uses": {"uses", "with"}}
        kind = "run" if "run" in step else "uses"
        assert set(step) <= allowed[kind] | {"name", "if", "id"}
        assert kind == "uses" or step["shell"] == "bash"
        assert kind == "run" or re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"])


def test_inputs_reach_the_steps_and_no_script(action: dict[str, Any]) -> None:
    """Every input is used and exists; none is pasted into the text of a script."""
    text = ACTION.read_text()
    assert set(re.findall(r"inputs\.([\w-]+)", text)) == set(action["inputs"])
    for step in action["runs"]["steps"]:
        assert "${{" not in step.get("run", "")
        used = set(re.findall(r"\$\{?([A-Z][A-Z_]+)", step.get("run", "")))
        provided = set(step.get("env", ())) | {"GITHUB_ACTION_PATH", "RUNNER_TEMP"}
        assert used <= provided


def write_program(folder: Path, name: str, text: str) -> None:
    """Write an executable script for the path of a step."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
    (folder / name).chmod((folder / name).stat().st_mode | stat.S_IXUSR)


def run_step(action: dict[str, Any], name: str, folder: Path, **inputs: str) -> Any:
    """Run the step whose script contains a word, as the runner does, with these inputs."""
    (matching,) = [s for s in action["runs"]["steps"] if name in s.get("run", "")]
    values = {key: declared["default"] for key, declared in action["inputs"].items()} | inputs
    env = {
        key: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda m: values[m[1]], text)
        for key, text in matching["env"].items()
    }
    environ = {
        **os.environ,
        **env,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "GITHUB_ACTION_PATH": str(ROOT),
        "RUNNER_TEMP": str(folder / "temp"),
        "GITHUB_ACTIONS": "true",
        "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
        "GITHUB_WORKSPACE": str(folder),
        "PYTHONPATH": str(ROOT),
    }
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", matching["run"]]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)


def test_the_action_installs_itself(action: dict[str, Any], tmp_path: Path) -> None:
    """pip installs this revision with the examples' requirements, or the given ones."""
    write_program(tmp_path / "bin", "python", 'printf "%s\\n" "$@"')
    result = run_step(action, "pip install", tmp_path)
    assert result.stdout.split("\n")[:-1] == ["-m", "pip", "install", f"{ROOT}[hf]"], result.stderr
    result = run_step(action, "pip install", tmp_path, install="schedlang==9 timm")
    assert result.stdout.split()[2:] == ["install", "schedlang==9", "timm"]
    assert "if" in next(s for s in action["runs"]["steps"] if "pip" in s.get("run", ""))


@pytest.mark.deep
def test_the_action_checks_and_verifies(action: dict[str, Any], tmp_path: Path) -> None:
    """The step expands globs, verifies, draws, annotates, and exits with the code of `ci`."""
    shim = f'exec {shlex.quote(sys.executable)} -m schedlang "$@"'
    write_program(tmp_path / "bin", "schedlang", shim)
    write_files(tmp_path / "a b" / "c", good=GOOD, odd=GOOD.replace("tp=2", "tp=3"))
    write_files(tmp_path / "models", model=SOUND)
    result = run_step(
        action,
        "schedlang ci",
        tmp_path,
        files="**/*.sched",
        model="models/model.py",
        args="--static --locked --json",
    )
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("::error file=a b/c/") == 3
    questions = [
        (outcome["file"], outcome["question"]) for outcome in json.loads(result.stdout)["outcomes"]
    ]
    assert questions[:2] == [("a b/c/good.sched", "check"), ("a b/c/good.sched", "lock")]
    result = run_step(
        action, "schedlang ci", tmp_path, files="**/good.sched", model="models/model.py"
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "a b/c/good.sched: verify holds" in result.stdout
    assert [p.name for p in (tmp_path / "temp" / "schedlang-plans").iterdir()] == [
        "a b.c.good.sched.svg"
    ]
    assert "| `a b/c/good.sched` | verify | holds |" in (tmp_path / "summary.md").read_text()


# ---- pre-commit ---------------------------------------------------------------------------------


def test_the_hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each hook runs a schedlang command on file names, and exits as pre-commit expects."""
    yaml = pytest.importorskip("yaml")
    hooks = {hook["id"]: hook for hook in yaml.safe_load(HOOKS.read_text())}
    assert set(hooks) == {"schedlang-fmt", "schedlang-check"}
    monkeypatch.chdir(tmp_path)
    loose = GOOD.replace("mesh(tp", "mesh( tp")
    for hook in hooks.values():
        assert {"name", "entry", "language", "files"} <= set(hook)
        assert re.search(hook["files"], "a/x.sched") and not re.search(hook["files"], "x.sched.py")
        assert not re.search(hook["files"], "x.sched.lock")
        command, *args = shlex.split(hook["entry"])
        assert command == "schedlang"
        write_files(tmp_path, x=loose, y=GOOD)
        assert run_cli(*args, "x.sched", "y.sched").exit_code == 0
        # pre-commit fails a hook that changed a file
        assert ((tmp_path / "x.sched").read_text() != loose) == (hook["id"] == "schedlang-fmt")
        write_files(tmp_path, x="schedule 1\nstep {\n")
        assert run_cli(*args, "x.sched", "y.sched").exit_code == 2


def test_the_page_names_what_there_is() -> None:
    """Inputs and hooks on docs/ci.md are those of the files."""
    yaml = pytest.importorskip("yaml")
    page = (ROOT / "docs" / "ci.md").read_text()
    texts = re.findall(r"^```yaml\n(.*?)^```$", page, re.M | re.S)
    flow, config = (yaml.safe_load(text) for text in texts)
    arguments = flow["jobs"]["schedules"]["steps"][-1]["with"]
    inputs = yaml.safe_load(ACTION.read_text())["inputs"]
    assert set(arguments) <= set(inputs)
    hook_ids = [hook["id"] for hook in yaml.safe_load(HOOKS.read_text())]
    assert [hook["id"] for hook in config["repos"][0]["hooks"]] == hook_ids
    assert f"schedlang ci {arguments['files']} {arguments['args']}\n" in page
