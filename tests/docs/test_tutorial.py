"""docs/tutorial.md is played from its first to its last command."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from schedlang.cli import app
from tests.transcripts import play, printed

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
REFUSED = "wrong.sched"


def test_it_is_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command ends as it should, and prints what the page says."""
    monkeypatch.chdir(tmp_path)
    seen = 0
    for one in play(PAGE, tmp_path):
        done = CliRunner().invoke(app, list(one.words[1:]))
        assert done.exit_code == (2 if REFUSED in one.words else 0), done.output
        assert printed(one.expected, done.stdout or done.stderr), (one, done.output)
        seen += 1
    assert seen == 7


@pytest.mark.deep
def test_its_program_trains(tmp_path: Path) -> None:
    """The program runs under torchrun and leaves a checkpoint."""
    for _ in play(PAGE, tmp_path):
        pass
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "train.py")
    subprocess.run([sys.executable, *launch], cwd=tmp_path, check=True, timeout=300)
    assert any((tmp_path / "checkpoint").iterdir())
