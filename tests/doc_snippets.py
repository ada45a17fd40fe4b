"""Snippets of the documentation: find them on a page, check schedules, run commands and code.

A page is played in one folder, from its first line to its last.  What is done with a fence:

    console   each command after `$ ` is run; what stands below it is what it prints (`...` is
              anything, also several lines); where a line begins with `error[`, exit 1 or 2
    python    executed, one namespace a page; what `print(...)  # this` prints is `this`
    sched     written, checked, in canonical form; and verified, where a comment says by what
    others    are shown, and say in a comment why that is all

A fence that is introduced as a file ("as `name.ext`") is written under this name; of these only
schedules are looked at before somebody uses them.  Comments above a fence, not shown to
readers:

    <!-- verify --model examples/gpt2/model.py -->  `schedlang verify` of this schedule with these
                                                    options; `plan` as well
    <!-- deep -->                                   played with the long tests only
    <!-- ends with: 0 1 -->                         exit codes of its commands
    <!-- run by: tests/test_x.py::test_y -->        executed there
    <!-- not played: reason -->                     only looked at
    <!-- every text run by: ... -->                 on top, of all fences of one language

Sybil (https://sybil.readthedocs.io) makes each example a test of its own, which `-n 2` distributes
to two workers; here the examples of a page depend on one another.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from schedlang.cli import app
from tests import forks

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)
NAMED = re.compile(r"\b[Aa]s\s+`([\w.-]+\.\w+)`[^`]*$")
MARKS = re.compile(r"((?:<!--(?:(?!-->).)*-->\s*)*)$", re.S)
# verbs that take a moment; the others run in the long tests, or on pages that are played in full
QUICK = {"check", "explain", "fmt"}
SLOW = {"--model", "--locked"}  # of `check`


@dataclass(frozen=True)
class Snippet:
    """One fence of a page; `marks` are the comments right above it."""

    page: Path
    line: int
    language: str
    text: str
    name: str | None
    marks: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    def mark(self, key: str) -> str | None:
        """The text after a word in one of the comments, or None."""
        texts = (m.removeprefix(key).lstrip(": ") for m in self.marks if m.split(":")[0] == key)
        return next(texts, None)

    @property
    def elsewhere(self) -> str | None:
        """The reason why it is not played here, or None."""
        return self.mark("not played") or self.mark("run by")

    @property
    def asked(self) -> tuple[str, ...]:
        """The `verify` and `plan` commands that comments ask for."""
        return tuple(m for m in self.marks if m.split()[0] in ("verify", "plan"))

    def commands(self) -> Iterator[tuple[str, str]]:
        """Yield each command line of a transcript with its expected output."""
        for part in re.split(r"^\$ ", self.text, flags=re.M)[1:]:
            command, _, expected = part.partition("\n")
            yield command, expected


def snippets(page: Path) -> Iterator[Snippet]:
    """Yield the fences of a page, in order."""
    text, last = page.read_text(), 0
    general = re.findall(r"^<!-- every (\w+) (.*?) -->$", text, re.M)
    for fence in FENCE.finditer(text):
        preceding, last = text[last : fence.start()], fence.end()
        above = MARKS.search(preceding)
        assert above is not None
        marks = tuple(" ".join(m.split()) for m in re.findall(r"<!--(.*?)-->", above[1], re.S))
        marks += tuple(m for language, m in general if language == fence[1])
        name = NAMED.search(preceding[: above.start()])
        line = text.count("\n", 0, fence.start()) + 1
        yield Snippet(page, line, fence[1], fence[2], name and name[1], marks)


def output_matches(expected: str, output: str) -> bool:
    """Whether an output matches the expected text, in which `...` stands for any text."""
    lines = [line.rstrip() for line in expected.rstrip().split("\n")]
    pattern = "\n".join(re.escape(line).replace(r"\.\.\.", ".*") for line in lines)
    text = "\n".join(line.rstrip() for line in output.strip("\n").split("\n"))
    return re.fullmatch(pattern, text, re.S) is not None


@dataclass
class Player:
    """Plays one page in one folder, the current one; `slow`: also verbs that run ranks."""

    folder: Path
    slow: bool
    deep: bool
    played: int = 0

    def play(self, page: Path) -> int:
        """Play all snippets of a page in order; return how many were executed."""
        shutil.copytree(
            ROOT / "examples",
            self.folder / "examples",
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        names: dict[str, Any] = {"__name__": "page"}
        for snippet in snippets(page):
            if snippet.name:
                (self.folder / snippet.name).write_text(snippet.text)
            if snippet.language == "sched" and snippet.mark("run by") is None:
                self.schedule(snippet)
            if snippet.elsewhere or ("deep" in snippet.marks and not self.deep):
                continue
            if snippet.language == "console":
                self.transcript(snippet)
            elif snippet.language == "python" and not snippet.name:
                self.python(snippet, names)
        return self.played

    def schedule(self, snippet: Snippet) -> None:
        """Assert that a schedule passes `check`, is in canonical form, and verifies as it says."""
        file = self.folder / (snippet.name or f"at_{snippet.line}.sched")
        file.write_text(snippet.text)
        for library in re.findall(r'^use "(\w+\.sched)"', snippet.text, re.M):
            if not (self.folder / library).exists():  # not the page's own: it is an example's
                (library_file,) = (ROOT / "examples").glob(f"*/{library}")
                shutil.copy(library_file, self.folder)
        checked = CliRunner().invoke(app, ["check", str(file)])
        assert checked.exit_code == 0 and not checked.stderr, (str(snippet), checked.stderr)
        assert CliRunner().invoke(app, ["fmt", "--check", str(file)]).exit_code == 0, str(snippet)
        for command in snippet.asked if self.slow else ():
            verb, *options = (
                str(ROOT / argument) if argument.startswith("tests/") else argument
                for argument in shlex.split(command)
            )
            result = CliRunner().invoke(app, [verb, str(file), *options])
            assert result.exit_code == 0, (str(snippet), command, result.output)
            self.played += 1

    def transcript(self, snippet: Snippet) -> None:
        """Assert that each command has the expected exit code and output."""
        codes = (snippet.mark("ends with") or "").split()
        for index, (command, expected) in enumerate(snippet.commands()):
            arguments = shlex.split(command)
            if not self.slow and not is_quick(arguments):
                continue
            code, output = run_command(arguments, self.folder)
            # under torchrun the rank that speaks stands before it
            expects_error = re.search(r"^(\.\.\.)?error\[", expected, re.M) is not None
            expected_codes = {int(codes[index])} if codes else {1, 2} if expects_error else {0}
            assert code in expected_codes, (str(snippet), command, output)
            assert output_matches(expected, output), (str(snippet), command, output)
            self.played += 1

    def python(self, snippet: Snippet, names: dict[str, Any]) -> None:
        """Run a Python snippet; assert that it prints what its comments say."""
        expected_lines = re.findall(r"print\(.*\)  # (.*)$", snippet.text, re.M)
        output = io.StringIO()
        code = compile("\n" * snippet.line + snippet.text, str(snippet.page), "exec")
        with contextlib.redirect_stdout(output):
            exec(code, names)
        assert not expected_lines or output.getvalue().splitlines() == expected_lines, (
            str(snippet),
            output.getvalue(),
        )
        self.played += 1


def is_quick(arguments: list[str]) -> bool:
    """Whether a command needs neither torch nor a model."""
    return arguments[0] == "schedlang" and arguments[1] in QUICK and not SLOW & set(arguments)


def run_command(arguments: list[str], folder: Path) -> tuple[int, str]:
    """Exit code and output of a command; `schedlang` runs in this process, others in a new one."""
    if arguments[0] == "schedlang":
        result = CliRunner().invoke(app, arguments[1:])
        return result.exit_code, result.output if result.exit_code else result.stdout
    python_options = {
        "python": [],
        "pytest": ["-m", "pytest", "-n", "0", "-p", "no:cacheprovider"],
        "torchrun": ["-m", "torch.distributed.run", "--standalone"],
    }.get(arguments[0])
    paths = os.pathsep.join((str(folder), str(ROOT)))
    environ = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    if python_options is None:
        process = subprocess.run(
            arguments, cwd=folder, env=environ, capture_output=True, text=True, timeout=300
        )
    else:
        process = forks.run(*python_options, *arguments[1:], cwd=folder, env=environ, timeout=300)
    return (
        process.returncode,
        process.stdout if not process.returncode else process.stdout + process.stderr,
    )


def counts() -> dict[str, int]:
    """Count the snippets of all pages by what is done with them."""
    all_snippets = [snippet for page in PAGES for snippet in snippets(page)]
    played = [s for s in all_snippets if not s.elsewhere]
    typed = [shlex.split(c) for s in played if s.language == "console" for c, _ in s.commands()]
    return {
        "fences": len(all_snippets),
        "schedules checked": sum(
            s.language == "sched" and not s.mark("run by") for s in all_snippets
        ),
        "schedules verified as their comment says": sum(len(s.asked) for s in played),
        "commands": len(typed),
        "commands of a moment": sum(map(is_quick, typed)),
        "proofs among the commands": sum(arguments[1:2] == ["verify"] for arguments in typed),
        "programs": sum(s.language == "python" for s in played),
        "run by another test": sum(s.mark("run by") is not None for s in all_snippets),
        "only shown": sum(s.mark("not played") is not None for s in all_snippets),
    }


if __name__ == "__main__":
    for what, number in counts().items():
        print(f"{number:4} {what}")
