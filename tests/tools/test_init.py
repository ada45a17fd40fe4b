"""The command `init`: writes a schedule for a model file to standard output."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner, Result

from schedlang.cli import app

ROOT = Path(__file__).parents[2]
CUSTOM = ROOT / "examples" / "custom" / "model.py"


def run_init(*args: object) -> Result:
    return CliRunner().invoke(app, ["init", *map(str, args)])


def test_writes_a_schedule(tmp_path: Path) -> None:
    """The written schedule is formatted, and `plan` accepts it."""
    result = run_init(CUSTOM, "--mesh", "dp=2,pp=2,tp=2")
    assert result.exit_code == 0 and "written in" in result.stderr
    file = tmp_path / "my.sched"
    to_file = run_init(CUSTOM, "--mesh", "dp=2,pp=2,tp=2", "-o", file)
    assert to_file.exit_code == 0 and not to_file.stdout and f"wrote {file}" in to_file.stderr
    assert file.read_text() == result.stdout
    assert CliRunner().invoke(app, ["fmt", "--check", str(file)]).exit_code == 0
    planned = CliRunner().invoke(app, ["plan", str(file), "--model", str(CUSTOM)])
    assert planned.exit_code == 0, planned.output


def test_a_folder_is_its_model_file() -> None:
    """A folder means its `model.py`, a dotted name its module; `--json` prints JSON."""
    folder = json.loads(run_init(CUSTOM.parent, "--mesh", "dp=2", "--json").stdout)
    module = json.loads(run_init("examples.custom.model", "--mesh", "dp=2", "--json").stdout)
    assert folder == module
    assert folder["schedule"].startswith("schedule 1 for ") and folder["mesh"] == {"dp": 2}


def test_sequences_are_split_where_the_model_allows_it() -> None:
    """`cp` is written for Llama and refused for T5, as `verify` would refuse it."""
    refused = run_init(ROOT / "examples" / "t5" / "model.py", "--mesh", "cp=2")
    assert refused.exit_code == 2 and "S212" in refused.stderr, refused.output
    assert "cannot be split by tokens" in refused.stderr
    split = run_init(ROOT / "examples" / "llama" / "model.py", "--mesh", "cp=2")
    assert split.exit_code == 0 and "context_parallel(ring, over=cp)" in split.stdout


def test_wrong_input() -> None:
    """An unknown axis, a wrong mesh and a missing file are refused with the legal form."""
    for args, expected in (
        ((CUSTOM, "--mesh", "x=2"), "S211"),
        ((CUSTOM, "--mesh", "tp"), "S109"),
        ((CUSTOM,), "--mesh dp=2,tp=2"),
        (("nowhere.py", "--mesh", "tp=2"), "S904"),
        ((CUSTOM, "--mesh", "tp=2", "-o", "nowhere/my.sched"), "there is no folder `nowhere`"),
        ((CUSTOM, "--mesh", "tp=2", "-o", CUSTOM), "would replace"),
    ):
        result = run_init(*args)
        assert result.exit_code == 2 and expected in result.stderr, result.output
