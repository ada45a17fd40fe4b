"""Language editions: newer ones are refused, older ones upgraded; with invented editions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from schedlang.cli import app
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import Source
from schedlang.language import grammar
from schedlang.language.grammar import EditionChange, upgrade_source
from schedlang.language.syntax import parse

OLD = "# remat is a name here\n\nschedule 1 for Net\n\nlayers.*  remat()  # all of them\n"
NEW = "# remat is a name here\n\nschedule 3 for Net\n\nlayers.*  recompute()  # all of them\n"


@pytest.fixture
def third(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add a third edition in which a verb is renamed a second time."""
    first = EditionChange(
        "`remat` is `checkpoint`", lambda text: text.replace(" remat(", " checkpoint(")
    )
    unused = EditionChange("`cast` is `dtype`", lambda text: text.replace(" cast(", " dtype("))
    second = EditionChange(
        "`checkpoint` is `recompute`", lambda t: t.replace("checkpoint(", "recompute(")
    )
    monkeypatch.setattr(grammar, "EDITION", 3)
    monkeypatch.setattr(grammar, "CHANGES", {1: [first, unused], 2: [second]})


def run_cli(*args: object) -> Result:
    """Run a command of schedlang."""
    return CliRunner().invoke(app, [str(arg) for arg in args])


@pytest.mark.usefixtures("third")
def test_an_older_edition_is_rewritten(tmp_path: Path) -> None:
    """`fmt --upgrade` applies all changes in order, reports them, and keeps comments and layout."""
    path = tmp_path / "x.sched"
    path.write_text(OLD)
    refused = run_cli("check", path)
    assert refused.exit_code == 2 and f"schedlang fmt --upgrade {path}" in refused.stderr
    assert run_cli("fmt", path).exit_code == 2 and path.read_text() == OLD
    checked = run_cli("fmt", "--upgrade", "--check", path)
    assert checked.exit_code == 1 and path.read_text() == OLD
    upgraded = run_cli("fmt", "--upgrade", path, "--json")
    changes = ["`remat` is `checkpoint`", "`checkpoint` is `recompute`"]
    assert json.loads(upgraded.stdout)["upgraded"] == {str(path): changes}
    assert path.read_text() == NEW
    assert parse(Source("x.sched", NEW)).header.version == "3"
    assert run_cli("fmt", "--upgrade", path).stdout == ""


@pytest.mark.parametrize(
    "text", ["schedule 2 for Net\n", f"schedule {'9' * 17}\n", "schedule 10\n"]
)
def test_a_newer_edition_is_refused(text: str) -> None:
    """A newer edition is never rewritten; the message says to install a newer schedlang."""
    assert upgrade_source(Source("x.sched", text)).source.text == text
    with pytest.raises(Refusal, match="S006.*edition") as caught:
        parse(Source("x.sched", text))
    assert "install a newer schedlang" in caught.value.render()


def test_there_was_no_edition_before_the_first() -> None:
    """Edition 0 is refused; the message names edition 1."""
    with pytest.raises(Refusal, match="edition 0 of the language does not exist") as caught:
        parse(Source("x.sched", "schedule 0\n"))
    assert "`schedule 1`" in caught.value.render()


@pytest.mark.parametrize(
    "text", ["", "schedule\n", "layers.* checkpoint()\n", "\x00", "schedule 1"]
)
def test_texts_of_no_other_edition_stay(text: str) -> None:
    """A text of this edition, or of none, is returned unchanged for the parser."""
    assert upgrade_source(Source("x.sched", text)).source.text == text
