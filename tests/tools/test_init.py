"""The verb init: a model file to a schedule on standard output."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner, Result

from schedlang.cli import app

ROOT = Path(__file__).parents[2]
CUSTOM = ROOT / "examples" / "custom" / "model.py"


def run(*words: object) -> Result:
    return CliRunner().invoke(app, ["init", *map(str, words)])


def test_writes_a_schedule(tmp_path: Path) -> None:
    """Standard output is the schedule, which `fmt --check` leaves and `plan` accepts."""
    done = run(CUSTOM, "--mesh", "dp=2,pp=2,tp=2")
    assert done.exit_code == 0 and "written in" in done.stderr
    file = tmp_path / "my.sched"
    file.write_text(done.stdout)
    assert CliRunner().invoke(app, ["fmt", "--check", str(file)]).exit_code == 0
    planned = CliRunner().invoke(app, ["plan", str(file), "--model", str(CUSTOM)])
    assert planned.exit_code == 0, planned.output


def test_a_folder_is_its_model_file() -> None:
    """A folder stands for the `model.py` in it, a dotted name for a module; `--json` is JSON."""
    folder = json.loads(run(CUSTOM.parent, "--mesh", "dp=2", "--json").stdout)
    module = json.loads(run("examples.custom.model", "--mesh", "dp=2", "--json").stdout)
    assert folder == module
    assert folder["schedule"].startswith("schedule 1 for ") and folder["mesh"] == {"dp": 2}


def test_sequences_are_split_where_the_model_allows_it() -> None:
    """What `verify` would refuse of a model is not written: T5 says why, Llama is split."""
    refused = run(ROOT / "examples" / "t5" / "model.py", "--mesh", "cp=2")
    assert refused.exit_code == 2 and "S212" in refused.stderr, refused.output
    assert "cannot be split by tokens" in refused.stderr
    split = run(ROOT / "examples" / "llama" / "model.py", "--mesh", "cp=2")
    assert split.exit_code == 0 and "context_parallel(ring, over=cp)" in split.stdout


def test_wrong_input() -> None:
    """An unknown axis, a mesh that is none, and a missing file are refused with what is legal."""
    for words, said in (
        ((CUSTOM, "--mesh", "x=2"), "S211"),
        ((CUSTOM, "--mesh", "tp"), "S109"),
        ((CUSTOM,), "--mesh dp=2,tp=2"),
        (("nowhere.py", "--mesh", "tp=2"), "S904"),
    ):
        done = run(*words)
        assert done.exit_code == 2 and said in done.stderr, done.output
