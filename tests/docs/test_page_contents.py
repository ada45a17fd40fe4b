"""Documentation pages: commands, schedules, snippets, counts and links agree with the program."""

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
from tests.doc_snippets import PAGES, ROOT

README, CONTRIBUTING = PAGES[:2]
ENVIRON = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def fenced_blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.S | re.M)
    return [text for name, text in fences if name == language]


@functools.cache
def command_group() -> Any:
    """The command line as a click group."""
    return typer.main.get_command(app)


def command_lines(page: Path) -> Iterator[str]:
    """Yield the command lines in a page's blocks; `&&` separates commands."""
    for block in [*fenced_blocks(page, ""), *fenced_blocks(page, "console")]:
        for line in block.split("\n"):
            for part in line.removeprefix("$ ").split(" && "):
                if re.match(r"(schedlang|torchrun|pip|pytest) ", part) or part == "pytest":
                    yield part


def inline_commands(page: Path) -> set[str]:
    """The schedlang commands that a page's text has in backquotes."""
    return set(re.findall(r"`((?:torchrun [^`]*-m )?schedlang [^`]*)`", page.read_text()))


def command_args(command: str) -> list[str]:
    """The arguments after `schedlang`, also under torchrun."""
    parts = shlex.split(command)
    return parts[parts.index("schedlang") + 1 :]


def run_python(*args: object, cwd: Path = ROOT, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments."""
    return forks.run(*args, cwd=cwd, env={**ENVIRON, **environ})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page: Path) -> None:
    """Each command line parses: its command, its options and its files exist."""
    for command in [*command_lines(page), *inline_commands(page)]:
        if "schedlang" not in command.split():
            continue
        verb, *args = command_args(command)
        assert verb in command_group().commands, command
        if len(args) or command in command_lines(page):
            command_group().commands[verb].make_context(verb, list(args))
        for arg in args:
            if arg.endswith((".sched", ".py")) and "/" in arg and "path/to" not in arg:
                assert (ROOT / arg).is_file(), command


def test_the_two_commands() -> None:
    """CI runs the README's commands, and the other pages give the same."""
    commands = list(command_lines(README))
    ci = (ROOT / ".ci" / "run").read_text()
    install, second = "pip install -e '.[hf]'", "pip install -e '.[dev]'"
    assert commands[:2] == [install, "schedlang verify examples/gpt2/3d.sched"]
    assert commands[2:4] == [second, "pytest"]
    assert all(f'"{command}' in ci for command in commands[:4])
    assert list(command_lines(CONTRIBUTING))[:2] == [second, "pytest"]


def test_the_schedule_of_the_readme() -> None:
    """The README's schedules equal the files of the examples."""
    files = ("llama", "gpt2")
    expected = [(ROOT / "examples" / name / "3d.sched").read_text() for name in files]
    assert fenced_blocks(README, "sched") == expected


def test_counts_of_the_readme() -> None:
    """The README's counts of models and combinations are those of their pages."""
    cells = json.loads((ROOT / "docs" / "models.json").read_text())
    statuses = Counter(cell["status"] for cell in cells if cell["mesh"] == "3d")
    del statuses["left out"]
    text, all_ = README.read_text(), statuses.total()
    assert not statuses["failed"]
    assert (
        f"{statuses['verified']} of {all_} families verified, {statuses['refused']} refused" in text
    )
    listed = re.search(r"none wrong: (.*), \.\.\. \|", text)
    assert listed
    verified_kinds = [
        cell["kind"] for cell in cells if (cell["mesh"], cell["status"]) == ("3d", "verified")
    ]
    verified_names = {re.sub(r"[-_.]| .*", "", kind) for kind in verified_kinds}
    for name in listed[1].split(", "):
        assert re.sub(r"[-_ .]", "", name.lower()) in verified_names, name
    support = (ROOT / "docs" / "support.md").read_text()
    counts = re.search(r"(\d+) combinations, .*: (\d+) verified, (\d+) refused, 0 failed", support)
    assert counts
    total, verified, refused = counts.groups()
    assert f"{verified} of {total} combinations of rows verified, {refused} refused" in text


def test_python_of_the_readme(tmp_path: Path) -> None:
    """The first snippet verifies; the second trains on two ranks and writes a checkpoint."""
    pytest.importorskip("transformers")
    first, second = fenced_blocks(README, "python")
    result = run_python("-c", first)
    assert result.returncode == 0 and "PASS" in result.stdout, result.stdout + result.stderr
    (tmp_path / "train.py").write_text(second)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    assert "torchrun --nproc-per-node 2 train.py" in list(command_lines(README))
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    # a file for each rank: on one pipe their lines could be mixed
    result = run_python(
        *launch, "--redirects", 3, "--log-dir", tmp_path / "logs", "train.py", cwd=tmp_path
    )
    assert result.returncode == 0, result.stdout + result.stderr
    outputs = [path.read_text() for path in (tmp_path / "logs").rglob("stdout.log")]
    assert len(outputs) == 2 and all(re.search(r"^2 ", text, re.M) for text in outputs)
    assert any((tmp_path / "checkpoint").iterdir())


def test_verbs_and_primitives_of_the_readme() -> None:
    """The README's tables name every command and primitive, and no other."""
    from schedlang.ir.primitive import load_all, registry

    load_all()
    tables = README.read_text().split("## Verbs")[1].split("## What is not")[0]
    rows = re.findall(r"^\| (`[^|]*) \|", tables, re.M)
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert listed == set(command_group().commands) | set(registry())


def test_the_picture_is_drawn_by_the_program(tmp_path: Path) -> None:
    """The README's picture equals the output of `plan --svg`."""
    pytest.importorskip("transformers")
    drawn = tmp_path / "plan.svg"
    result = CliRunner().invoke(
        app, ["plan", str(ROOT / "examples/gpt2/3d.sched"), "--svg", str(drawn)]
    )
    assert result.exit_code == 0, result.output
    assert "not estimated" not in result.output
    equal = drawn.read_text() == (ROOT / "docs" / "gpt2_3d.svg").read_text()
    assert equal, "`schedlang plan examples/gpt2/3d.sched --svg docs/gpt2_3d.svg` draws it again"
    assert "](docs/gpt2_3d.svg)" in README.read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Files that a page links to or names exist."""
    text = page.read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (page.parent / target).exists(), target
    folders = r"`((?:schedlang|primitives|passes|examples|tests|docs|\.ci)/[\w./]*)`"
    for target in re.findall(folders, text):
        assert (ROOT / target).exists(), target


@pytest.mark.deep
def test_a_primitive_in_one_file(tmp_path: Path) -> None:
    """The primitive of CONTRIBUTING.md works when put into primitives/: explain, check, verify."""
    for folder in ("schedlang", "primitives", "passes"):
        shutil.copytree(
            ROOT / folder,
            tmp_path / folder,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    (source,), (schedule,) = (
        fenced_blocks(CONTRIBUTING, "python"),
        fenced_blocks(CONTRIBUTING, "sched"),
    )
    (tmp_path / "primitives" / "chunk.py").write_text(source)
    (tmp_path / "chunk.sched").write_text(schedule)
    shutil.copy(ROOT / "examples" / "custom" / "model.py", tmp_path)

    def call(*args: str) -> subprocess.CompletedProcess[str]:
        """In a new interpreter: what was forked would have the primitives of this folder."""
        environ = {**ENVIRON, "PYTHONPATH": str(tmp_path)}
        return forks.run_interpreter("-m", "schedlang", *args, cwd=tmp_path, env=environ)

    assert call("explain", "chunk").stdout.startswith("chunk(parts=int)")
    assert call("check", "chunk.sched").returncode == 0
    (tmp_path / "one.sched").write_text(schedule.replace("chunk(2)", "chunk(1)"))
    refused = call("plan", "one.sched")
    assert refused.returncode == 2 and "use 2 or more" in refused.stderr
    proven = call("verify", "chunk.sched")
    assert proven.returncode == 0 and "PASS" in proven.stdout, proven.stdout + proven.stderr
    broken = source.replace("x.chunk(self.parts)]", "x.chunk(self.parts)][::-1]")
    assert broken != source
    (tmp_path / "primitives" / "chunk.py").write_text(broken)
    failed = call("verify", "chunk.sched")
    assert failed.returncode == 1
    assert re.search(r"to blame +chunk\.sched:6: .*chunk\(parts=2\)", failed.stdout), failed.stdout


@pytest.mark.parametrize(
    "file", sorted((ROOT / "examples").glob("*/*.sched")), ids=lambda p: f"{p.parent.name}/{p.name}"
)
def test_examples_are_good_examples(file: Path) -> None:
    """No shipped schedule gets a warning."""
    checked = CliRunner().invoke(app, ["check", str(file)])
    assert checked.exit_code == 0 and not checked.stderr, checked.stderr
