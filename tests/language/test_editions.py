"""Editions: newer ones are refused, older ones rewritten, with an edition that is made up."""

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
    """A third edition, in which a verb has its third name."""
    first = EditionChange(
        "`remat` is `checkpoint`", lambda text: text.replace(" remat(", " checkpoint(")
    )
    idle = EditionChange("`cast` is `dtype`", lambda text: text.replace(" cast(", " dtype("))
    then = EditionChange(
        "`checkpoint` is `recompute`", lambda t: t.replace("checkpoint(", "recompute(")
    )
    monkeypatch.setattr(grammar, "EDITION", 3)
    monkeypatch.setattr(grammar, "CHANGES", {1: [first, idle], 2: [then]})


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.usefixtures("third")
def test_an_older_edition_is_rewritten(tmp_path: Path) -> None:
    """Step by step, in order, comments and layout left alone; what changed is told; once."""
    path = tmp_path / "x.sched"
    path.write_text(OLD)
    refused = run("check", path)
    assert refused.exit_code == 2 and f"schedlang fmt --upgrade {path}" in refused.stderr
    assert run("fmt", path).exit_code == 2 and path.read_text() == OLD
    tried = run("fmt", "--upgrade", "--check", path)
    assert tried.exit_code == 1 and path.read_text() == OLD
    done = run("fmt", "--upgrade", path, "--json")
    said = ["`remat` is `checkpoint`", "`checkpoint` is `recompute`"]
    assert json.loads(done.stdout)["upgraded"] == {str(path): said}
    assert path.read_text() == NEW
    assert parse(Source("x.sched", NEW)).header.version == "3"
    assert run("fmt", "--upgrade", path).stdout == ""


@pytest.mark.parametrize(
    "text", ["schedule 2 for Net\n", f"schedule {'9' * 17}\n", "schedule 10\n"]
)
def test_a_newer_edition_is_refused(text: str) -> None:
    """Whatever it says: it is not rewritten, and needs a newer schedlang."""
    assert upgrade_source(Source("x.sched", text)).source.text == text
    with pytest.raises(Refusal, match="S006.*edition") as caught:
        parse(Source("x.sched", text))
    assert "install a newer schedlang" in caught.value.render()


def test_there_was_no_edition_before_the_first() -> None:
    """Nothing is newer than zero but the first."""
    with pytest.raises(Refusal, match="edition 0 of the language does not exist") as caught:
        parse(Source("x.sched", "schedule 0\n"))
    assert "`schedule 1`" in caught.value.render()


@pytest.mark.parametrize(
    "text", ["", "schedule\n", "layers.* checkpoint()\n", "\x00", "schedule 1"]
)
def test_texts_of_no_other_edition_stay(text: str) -> None:
    """What is of this edition, or names none, is left to the parser."""
    assert upgrade_source(Source("x.sched", text)).source.text == text
