"""The book is played: what its pages show is what the program does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.book import PAGES, ROOT, Player, Snippet, printed, snippets

PLAYED = ("console", "python", "sched")
# all commands of these are ordinary, but those that are marked deep
WHOLE = ("tutorial.md",)
FOUND = [snippet for page in PAGES for snippet in snippets(page)]


def bare(text: str) -> str:
    """A schedule without comments and empty lines."""
    lines = (re.sub(r"\s*#.*", "", line) for line in text.splitlines())
    return "\n".join(line for line in lines if line)


def shipped(snippet: Snippet) -> bool:
    """Whether a schedule is the file of an example, but for comments: tests prove all of these."""
    files = (ROOT / "examples").glob("*/*.sched")
    return any(bare(path.read_text()) == bare(snippet.text) for path in files)


def used(snippet: Snippet) -> bool:
    """Whether a file that a page introduces is named by a command, or by code, on the page."""
    return snippet.name is not None and any(
        snippet.name in other.text
        for other in snippets(snippet.page)
        if other.language in PLAYED and other != snippet and not other.elsewhere
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_snippet_is_executed_or_says_why_not(page: Path) -> None:
    """Each fence is played, run by a test that is there, or has a reason above it."""
    for snippet in snippets(page):
        if (where := snippet.mark("run by")) is not None:
            file, _, name = where.partition("::")
            assert f"def {name}(" in (ROOT / file).read_text(), (str(snippet), where)
        elif (reason := snippet.mark("not played")) is not None:
            assert len(reason.split()) > 1, (str(snippet), "give a reason")
        elif snippet.language == "sched":
            proven = snippet.asked or shipped(snippet) or used(snippet)
            assert proven, f"{snippet}: say by which `verify` it is proven, in a comment above it"
        else:
            assert snippet.language in ("console", "python") or used(snippet), (
                f"{snippet}: make it `console` or `python`, or say above it why it is not played"
            )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_takes_a_moment(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedules are accepted and in canonical form; quick commands and code do what is said."""
    monkeypatch.chdir(tmp_path)
    Player(tmp_path, slow=page.name in WHOLE, deep=False).play(page)


@pytest.mark.deep
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_whole_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command, every program and every proof, in their order."""
    monkeypatch.chdir(tmp_path)
    Player(tmp_path, slow=True, deep=True).play(page)


def test_a_wrong_page_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another output, another exit code, another printed number, a loose schedule: each fails."""
    monkeypatch.chdir(tmp_path)
    good = 'schedule 1\n\nstep "a" {\n  h.*  checkpoint()\n  verify(train)\n}\n'
    pages = {
        "fine": f"It is kept as `a.sched`:\n\n```sched\n{good}```\n\n"
        "```console\n$ schedlang check a.sched\na.sched: holds\n```\n\n"
        "```python\nprint(1 + 1)  # 2\n```\n",
        "output": "```console\n$ schedlang check a.sched\na.sched: fails\n```\n",
        "exit": "```console\n$ schedlang check a.sched\nerror[S100]...\n```\n",
        "number": "```python\nprint(1 + 1)  # 3\n```\n",
        "loose": f"```sched\n{good.replace('h.*  ', 'h.* ')}```\n",
    }
    for name, text in pages.items():
        page = tmp_path / f"{name}.md"
        page.write_text(text)
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        (tmp_path / name / "a.sched").write_text(good)
        player = Player(tmp_path / name, slow=False, deep=False)
        if name == "fine":
            assert player.play(page) == 2
        else:
            with pytest.raises(AssertionError):
                player.play(page)


def test_dots_stand_for_anything() -> None:
    """One line or several; all else is compared to the letter."""
    assert printed("a ... c\n...\nz", "a b c\n1\n2\nz\n")
    assert not printed("a ... c", "a b d") and not printed("a", "a\nb")


def test_what_is_only_shown() -> None:
    """The languages of what is not played are those of outputs, drawings and other programs."""
    shown = {s.language for s in FOUND if s.mark("not played") is not None}
    assert shown <= {"", "text", "toml", "yaml", "lua", "sched", "python", "console"}
    assert all(re.search(r"[a-z]", s.mark("not played") or "x") for s in FOUND)
