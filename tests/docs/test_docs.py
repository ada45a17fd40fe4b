"""What the pages say: commands, schedules, snippets and links are those of the program."""

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from schedlang.cli import app
from tests import forks
from tests.book import PAGES, ROOT

README, CONTRIBUTING = PAGES[:2]
ENVIRON = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.S | re.M)
    return [text for name, text in fences if name == language]


@functools.cache
def group() -> Any:
    """The command line, as its library has it."""
    return typer.main.get_command(app)


def typed(page: Path) -> Iterator[str]:
    """The command lines of a page's blocks, a compound line taken apart."""
    for block in [*blocks(page, ""), *blocks(page, "console")]:
        for line in block.split("\n"):
            for part in line.removeprefix("$ ").split(" && "):
                if re.match(r"(schedlang|torchrun|pip|pytest) ", part) or part == "pytest":
                    yield part


def inline(page: Path) -> set[str]:
    """What a page's sentences and tables name between backquotes as our command."""
    return set(re.findall(r"`((?:torchrun [^`]*-m )?schedlang [^`]*)`", page.read_text()))


def arguments(command: str) -> list[str]:
    """The words after `schedlang`, also where torchrun starts it."""
    words = shlex.split(command)
    return words[words.index("schedlang") + 1 :]


def run(*words: object, cwd: Path = ROOT, **environ: str) -> subprocess.CompletedProcess[str]:
    return forks.run(*words, cwd=cwd, env={**ENVIRON, **environ})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page: Path) -> None:
    """Each command line parses: its verb, its options and its files are there."""
    for command in [*typed(page), *inline(page)]:
        if "schedlang" not in command.split():
            continue
        verb, *words = arguments(command)
        assert verb in group().commands, command
        if len(words) or command in typed(page):
            group().commands[verb].make_context(verb, list(words))
        for word in words:
            if word.endswith((".sched", ".py")) and "/" in word and "path/to" not in word:
                assert (ROOT / word).is_file(), command


def test_the_two_commands() -> None:
    """CI types what the README says, and the other pages say the same."""
    said = list(typed(README))
    ci = (ROOT / ".ci" / "run").read_text()
    first, second = "pip install -e '.[hf]'", "pip install -e '.[dev]'"
    assert said[:2] == [first, "schedlang verify examples/gpt2/3d.sched"]
    assert said[2:4] == [second, "pytest"]
    assert all(f'"{command}' in ci for command in said[:4])
    assert list(typed(CONTRIBUTING))[:2] == [second, "pytest"]


def test_the_schedule_of_the_readme() -> None:
    """They are the examples' files, to the letter."""
    files = ("llama", "gpt2")
    told = [(ROOT / "examples" / name / "3d.sched").read_text() for name in files]
    assert blocks(README, "sched") == told


def test_counts_of_the_readme() -> None:
    """Models and combinations are counted as their pages have them."""
    cells = json.loads((ROOT / "docs" / "models.json").read_text())
    ended = Counter(one["status"] for one in cells if one["mesh"] == "3d")
    del ended["left out"]
    text, all_ = README.read_text(), ended.total()
    assert not ended["failed"]
    assert f"{ended['verified']} of {all_} families verified, {ended['refused']} refused" in text
    named = re.search(r"none wrong: (.*), \.\.\. \|", text)
    assert named
    proven = [one["kind"] for one in cells if (one["mesh"], one["status"]) == ("3d", "verified")]
    known = {re.sub(r"[-_.]| .*", "", kind) for kind in proven}
    for name in named[1].split(", "):
        assert re.sub(r"[-_ .]", "", name.lower()) in known, name
    support = (ROOT / "docs" / "support.md").read_text()
    told = re.search(r"(\d+) combinations, .*: (\d+) verified, (\d+) refused, 0 failed", support)
    assert told
    of, verified, refused = told.groups()
    assert f"{verified} of {of} combinations of rows verified, {refused} refused" in text


def test_python_of_the_readme(tmp_path: Path) -> None:
    """The first snippet verifies; the second trains on two ranks and writes a checkpoint."""
    pytest.importorskip("transformers")
    first, second = blocks(README, "python")
    done = run("-c", first)
    assert done.returncode == 0 and "PASS" in done.stdout, done.stdout + done.stderr
    (tmp_path / "train.py").write_text(second)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    assert "torchrun --nproc-per-node 2 train.py" in list(typed(README))
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    # a file for each rank: on one pipe their lines may run into each other
    done = run(*launch, "--redirects", 3, "--log-dir", tmp_path / "logs", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [path.read_text() for path in (tmp_path / "logs").rglob("stdout.log")]
    assert len(said) == 2 and all(re.search(r"^2 ", text, re.M) for text in said)
    assert any((tmp_path / "checkpoint").iterdir())


def test_verbs_and_primitives_of_the_readme() -> None:
    """The tables of the README name every verb and every primitive that exists, and no other."""
    from schedlang.ir.primitive import load_all, registry

    load_all()
    told = README.read_text().split("## Verbs")[1].split("## What is not")[0]
    rows = re.findall(r"^\| (`[^|]*) \|", told, re.M)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == set(group().commands) | set(registry())


def test_the_picture_is_drawn_by_the_program(tmp_path: Path) -> None:
    """The README's picture is what `plan --svg` draws today."""
    pytest.importorskip("transformers")
    made = tmp_path / "plan.svg"
    result = CliRunner().invoke(
        app, ["plan", str(ROOT / "examples/gpt2/3d.sched"), "--svg", str(made)]
    )
    assert result.exit_code == 0, result.output
    assert "not estimated" not in result.output
    same = made.read_text() == (ROOT / "docs" / "gpt2_3d.svg").read_text()
    assert same, "`schedlang plan examples/gpt2/3d.sched --svg docs/gpt2_3d.svg` draws it again"
    assert "](docs/gpt2_3d.svg)" in README.read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Files that a page links to or names with their folder are there."""
    text = page.read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (page.parent / target).exists(), target
    folders = r"`((?:schedlang|primitives|passes|examples|tests|docs|\.ci)/[\w./]*)`"
    for target in re.findall(folders, text):
        assert (ROOT / target).exists(), target


@pytest.mark.deep
def test_a_primitive_in_one_file(tmp_path: Path) -> None:
    """The file of CONTRIBUTING.md, put into primitives/, is explained, checked and proven."""
    for folder in ("schedlang", "primitives", "passes"):
        shutil.copytree(
            ROOT / folder,
            tmp_path / folder,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    (source,), (schedule,) = blocks(CONTRIBUTING, "python"), blocks(CONTRIBUTING, "sched")
    (tmp_path / "primitives" / "chunk.py").write_text(source)
    (tmp_path / "chunk.sched").write_text(schedule)
    shutil.copy(ROOT / "examples" / "custom" / "model.py", tmp_path)

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        """In a new interpreter: what was forked would have the primitives of this folder."""
        environ = {**ENVIRON, "PYTHONPATH": str(tmp_path)}
        return forks.anew("-m", "schedlang", *words, cwd=tmp_path, env=environ)

    assert call("explain", "chunk").stdout.startswith("chunk(parts=int)")
    assert call("check", "chunk.sched").returncode == 0
    (tmp_path / "one.sched").write_text(schedule.replace("chunk(2)", "chunk(1)"))
    refused = call("plan", "one.sched")
    assert refused.returncode == 2 and "use 2 or more" in refused.stderr
    proven = call("verify", "chunk.sched")
    assert proven.returncode == 0 and "PASS" in proven.stdout, proven.stdout + proven.stderr
    wrong = source.replace("x.chunk(self.parts)]", "x.chunk(self.parts)][::-1]")
    assert wrong != source
    (tmp_path / "primitives" / "chunk.py").write_text(wrong)
    failed = call("verify", "chunk.sched")
    assert failed.returncode == 1
    assert re.search(r"to blame +chunk\.sched:6: .*chunk\(parts=2\)", failed.stdout), failed.stdout


@pytest.mark.parametrize(
    "file", sorted((ROOT / "examples").glob("*/*.sched")), ids=lambda p: f"{p.parent.name}/{p.name}"
)
def test_examples_are_good_examples(file: Path) -> None:
    """No schedule that ships is warned about."""
    checked = CliRunner().invoke(app, ["check", str(file)])
    assert checked.exit_code == 0 and not checked.stderr, checked.stderr
