"""docs/judge.md: its failure output, its pytest fixture, and options of `verify --against`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from schedlang.cli import app
from tests.doc_snippets import PAGES, run_command, snippets

PAGE = next(page for page in PAGES if page.name == "judge.md")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the page's files, and make their folder the current one."""
    for snippet in snippets(PAGE):
        if snippet.name:
            (tmp_path / snippet.name).write_text(snippet.text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_the_page_tells_the_kind(folder: Path) -> None:
    """The page's wrong program prints the lines that the page shows."""
    result = CliRunner().invoke(app, ["verify", "original.py", "--against", "twice.py"])
    assert result.exit_code == 1, result.output
    expected = next(s.text for s in snippets(PAGE) if "first difference" in s.text)
    assert expected in result.stdout, result.stdout


def test_the_document_and_the_picture(folder: Path) -> None:
    """`--json` has the kind of mistake, `--html` writes a report."""
    arguments = [
        "verify",
        "original.py",
        "--against",
        "twice.py",
        "--json",
        "--html",
        "report.html",
    ]
    report = json.loads(CliRunner().invoke(app, arguments).stdout)
    assert report["ok"] is False and report["exit_code"] == 1
    assert report["localised"][0][0] == "gradients" and "twice.py" in report["command"]
    assert "1/ranks" in (folder / "report.html").read_text()


def test_the_fixture_of_the_page(folder: Path) -> None:
    """A right program passes, a wrong one fails with the report."""
    text = next(s.text for s in snippets(PAGE) if "def test_my_trainer" in s.text)
    wrong_test = text.replace("program.py", "twice.py").replace("my_trainer", "wrong")
    (folder / "test_it.py").write_text(text + "\n\n" + wrong_test)
    code, printed = run_command(["pytest", "-q", "test_it.py"], folder)
    assert code == 1 and "1 failed, 1 passed" in printed, printed
    assert "the program differs from its model" in printed and "1/ranks = 1/2 times" in printed


def test_the_verb_in_a_low_dtype(folder: Path) -> None:
    """The page's right program passes in bfloat16, the one that averages twice fails."""
    for name, code in (("program.py", 0), ("twice.py", 1)):
        arguments = ["verify", "original.py", "--against", name, "--dtype", "bfloat16"]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == code and "dtype bfloat16" in result.stdout, result.output


def test_a_file_is_asked_for() -> None:
    """Without a schedule or a program `verify` asks for one."""
    result = CliRunner().invoke(app, ["verify"])
    assert result.exit_code == 2 and "--against program.py" in result.stderr
