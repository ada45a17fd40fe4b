"""What docs/judge.md shows of failures and of the fixture, and the verb with its options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from schedlang.cli import app
from tests.book import PAGES, execute, snippets

PAGE = next(page for page in PAGES if page.name == "judge.md")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of the page, in the current folder."""
    for snippet in snippets(PAGE):
        if snippet.name:
            (tmp_path / snippet.name).write_text(snippet.text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_the_page_tells_the_kind(folder: Path) -> None:
    """The wrong program of the page ends in the lines that stand below it."""
    done = CliRunner().invoke(app, ["verify", "original.py", "--against", "twice.py"])
    assert done.exit_code == 1, done.output
    shown = next(s.text for s in snippets(PAGE) if "first difference" in s.text)
    assert shown in done.stdout, done.stdout


def test_the_document_and_the_picture(folder: Path) -> None:
    """`--json` has rows and the kind of mistake, `--html` writes a page."""
    words = ["verify", "original.py", "--against", "twice.py", "--json", "--html", "report.html"]
    told = json.loads(CliRunner().invoke(app, words).stdout)
    assert told["ok"] is False and told["exit_code"] == 1
    assert told["localised"][0][0] == "gradients" and "twice.py" in told["command"]
    assert "1/ranks" in (folder / "report.html").read_text()


def test_the_fixture_of_the_page(folder: Path) -> None:
    """A right program passes, a wrong one fails with the report."""
    text = next(s.text for s in snippets(PAGE) if "def test_my_trainer" in s.text)
    wrong = text.replace("program.py", "twice.py").replace("my_trainer", "wrong")
    (folder / "test_it.py").write_text(text + "\n\n" + wrong)
    code, told = execute(["pytest", "-q", "test_it.py"], folder)
    assert code == 1 and "1 failed, 1 passed" in told, told
    assert "the program differs from its model" in told and "1/ranks = 1/2 times" in told


def test_the_verb_in_a_low_dtype(folder: Path) -> None:
    """The right program of the page passes in bfloat16, that which averages twice fails."""
    for name, code in (("program.py", 0), ("twice.py", 1)):
        words = ["verify", "original.py", "--against", name, "--dtype", "bfloat16"]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == code and "dtype bfloat16" in done.stdout, done.output


def test_a_file_is_asked_for() -> None:
    """Without a schedule and without a program there is nothing to verify."""
    done = CliRunner().invoke(app, ["verify"])
    assert done.exit_code == 2 and "--against program.py" in done.stderr
