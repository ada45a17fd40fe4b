"""Snippets on documentation pages are executed, and their output is compared."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.doc_snippets import PAGES, ROOT, Player, Snippet, output_matches, snippets

RUN_LANGUAGES = ("console", "python", "sched")
# pages whose commands all run in ordinary tests, except those that are marked deep
RUN_FULLY = ("tutorial.md",)
SNIPPETS = [snippet for page in PAGES for snippet in snippets(page)]


def without_comments(text: str) -> str:
    """A schedule without comments and empty lines."""
    lines = (re.sub(r"\s*#.*", "", line) for line in text.splitlines())
    return "\n".join(line for line in lines if line)


def is_example(snippet: Snippet) -> bool:
    """Whether a schedule is, except for comments, an example's file, which other tests prove."""
    files = (ROOT / "examples").glob("*/*.sched")
    return any(
        without_comments(path.read_text()) == without_comments(snippet.text) for path in files
    )


def is_used(snippet: Snippet) -> bool:
    """Whether a file that a page introduces is used by a command or code on the page."""
    return snippet.name is not None and any(
        snippet.name in snippet_below.text
        for snippet_below in snippets(snippet.page)
        if snippet_below.language in RUN_LANGUAGES
        and snippet_below != snippet
        and not snippet_below.elsewhere
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_snippet_is_executed_or_says_why_not(page: Path) -> None:
    """Each code block is executed, run by a named test, or has a reason not to be."""
    for snippet in snippets(page):
        if (test_id := snippet.mark("run by")) is not None:
            file, _, name = test_id.partition("::")
            assert f"def {name}(" in (ROOT / file).read_text(), (str(snippet), test_id)
        elif (reason := snippet.mark("not played")) is not None:
            assert len(reason.split()) > 1, (str(snippet), "give a reason")
        elif snippet.language == "sched":
            proven = snippet.asked or is_example(snippet) or is_used(snippet)
            assert proven, f"{snippet}: say by which `verify` it is proven, in a comment above it"
        else:
            assert snippet.language in ("console", "python") or is_used(snippet), (
                f"{snippet}: make it `console` or `python`, or say above it why it is not played"
            )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_takes_a_moment(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedules are legal and formatted; quick commands and code give the printed output."""
    monkeypatch.chdir(tmp_path)
    Player(tmp_path, slow=page.name in RUN_FULLY, deep=False).play(page)


@pytest.mark.deep
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_whole_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All commands, programs and proofs of a page run, in order."""
    monkeypatch.chdir(tmp_path)
    Player(tmp_path, slow=True, deep=True).play(page)


def test_a_wrong_page_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong output, exit code or number, and an unformatted schedule, each fail."""
    monkeypatch.chdir(tmp_path)
    schedule = 'schedule 1\n\nstep "a" {\n  h.*  checkpoint()\n  verify(train)\n}\n'
    pages = {
        "fine": f"It is kept as `a.sched`:\n\n```sched\n{schedule}```\n\n"
        "```console\n$ schedlang check a.sched\na.sched: holds\n```\n\n"
        "```python\nprint(1 + 1)  # 2\n```\n",
        "output": "```console\n$ schedlang check a.sched\na.sched: fails\n```\n",
        "exit": "```console\n$ schedlang check a.sched\nerror[S100]...\n```\n",
        "number": "```python\nprint(1 + 1)  # 3\n```\n",
        "loose": f"```sched\n{schedule.replace('h.*  ', 'h.* ')}```\n",
    }
    for name, text in pages.items():
        page = tmp_path / f"{name}.md"
        page.write_text(text)
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        (tmp_path / name / "a.sched").write_text(schedule)
        player = Player(tmp_path / name, slow=False, deep=False)
        if name == "fine":
            assert player.play(page) == 2
        else:
            with pytest.raises(AssertionError):
                player.play(page)


def test_dots_stand_for_anything() -> None:
    """`...` matches anything in a line or several lines; other text must be equal."""
    assert output_matches("a ... c\n...\nz", "a b c\n1\n2\nz\n")
    assert not output_matches("a ... c", "a b d") and not output_matches("a", "a\nb")


def test_what_is_only_shown() -> None:
    """Only output, drawings and other programs' files are not executed."""
    languages = {s.language for s in SNIPPETS if s.mark("not played") is not None}
    assert languages <= {"", "text", "toml", "yaml", "lua", "sched", "python", "console"}
    assert all(re.search(r"[a-z]", s.mark("not played") or "x") for s in SNIPPETS)
