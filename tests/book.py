"""The book's snippets: found on its pages, and played: files written, commands run, code executed.

One folder for a page, one walk from its first line to its last.  What is done with a fence:

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

Sybil would do half of it (https://sybil.readthedocs.io): its examples are tests of their own, which
`-n 2` deals out to two workers, and these depend on one another.
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
# verbs that take a moment; the others are for the long tests, but on pages that are played whole
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

    def mark(self, word: str) -> str | None:
        """What follows a word in one of the comments."""
        found = (m.removeprefix(word).lstrip(": ") for m in self.marks if m.split(":")[0] == word)
        return next(found, None)

    @property
    def elsewhere(self) -> str | None:
        """Why it is not played here."""
        return self.mark("not played") or self.mark("run by")

    @property
    def asked(self) -> tuple[str, ...]:
        """Commands about a schedule that comments ask for."""
        return tuple(m for m in self.marks if m.split()[0] in ("verify", "plan"))

    def commands(self) -> Iterator[tuple[str, str]]:
        """The command lines of a transcript, with what they print."""
        for part in re.split(r"^\$ ", self.text, flags=re.M)[1:]:
            command, _, expected = part.partition("\n")
            yield command, expected


def snippets(page: Path) -> Iterator[Snippet]:
    """The fences of a page, in its order."""
    text, last = page.read_text(), 0
    general = re.findall(r"^<!-- every (\w+) (.*?) -->$", text, re.M)
    for fence in FENCE.finditer(text):
        before, last = text[last : fence.start()], fence.end()
        above = MARKS.search(before)
        assert above is not None
        marks = tuple(" ".join(m.split()) for m in re.findall(r"<!--(.*?)-->", above[1], re.S))
        marks += tuple(m for language, m in general if language == fence[1])
        name = NAMED.search(before[: above.start()])
        line = text.count("\n", 0, fence.start()) + 1
        yield Snippet(page, line, fence[1], fence[2], name and name[1], marks)


def printed(expected: str, output: str) -> bool:
    """Whether an output is what is expected; `...` is anything, also several lines."""
    lines = [line.rstrip() for line in expected.rstrip().split("\n")]
    pattern = "\n".join(re.escape(line).replace(r"\.\.\.", ".*") for line in lines)
    text = "\n".join(line.rstrip() for line in output.strip("\n").split("\n"))
    return re.fullmatch(pattern, text, re.S) is not None


@dataclass
class Player:
    """One page in one folder, which is the current one; `slow`: also verbs that run ranks."""

    folder: Path
    slow: bool
    deep: bool
    played: int = 0

    def play(self, page: Path) -> int:
        """Everything on a page, in its order; how many snippets were executed."""
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
        """It passes `check` without a warning, stands in canonical form, and holds as it says."""
        file = self.folder / (snippet.name or f"at_{snippet.line}.sched")
        file.write_text(snippet.text)
        for library in re.findall(r'^use "(\w+\.sched)"', snippet.text, re.M):
            if not (self.folder / library).exists():  # not the page's own: it is an example's
                (found,) = (ROOT / "examples").glob(f"*/{library}")
                shutil.copy(found, self.folder)
        checked = CliRunner().invoke(app, ["check", str(file)])
        assert checked.exit_code == 0 and not checked.stderr, (str(snippet), checked.stderr)
        assert CliRunner().invoke(app, ["fmt", "--check", str(file)]).exit_code == 0, str(snippet)
        for asked in snippet.asked if self.slow else ():
            verb, *options = (
                str(ROOT / word) if word.startswith("tests/") else word
                for word in shlex.split(asked)
            )
            done = CliRunner().invoke(app, [verb, str(file), *options])
            assert done.exit_code == 0, (str(snippet), asked, done.output)
            self.played += 1

    def transcript(self, snippet: Snippet) -> None:
        """Its commands end as they should, and print what stands below them."""
        codes = (snippet.mark("ends with") or "").split()
        for place, (command, expected) in enumerate(snippet.commands()):
            words = shlex.split(command)
            if not self.slow and not quick(words):
                continue
            code, output = execute(words, self.folder)
            # under torchrun the rank that speaks stands before it
            refused = re.search(r"^(\.\.\.)?error\[", expected, re.M) is not None
            wanted = {int(codes[place])} if codes else {1, 2} if refused else {0}
            assert code in wanted, (str(snippet), command, output)
            assert printed(expected, output), (str(snippet), command, output)
            self.played += 1

    def python(self, snippet: Snippet, names: dict[str, Any]) -> None:
        """It runs, and prints what its comments say."""
        said = re.findall(r"print\(.*\)  # (.*)$", snippet.text, re.M)
        told = io.StringIO()
        code = compile("\n" * snippet.line + snippet.text, str(snippet.page), "exec")
        with contextlib.redirect_stdout(told):
            exec(code, names)
        assert not said or told.getvalue().splitlines() == said, (str(snippet), told.getvalue())
        self.played += 1


def quick(words: list[str]) -> bool:
    """Whether a command needs neither torch nor a model."""
    return words[0] == "schedlang" and words[1] in QUICK and not SLOW & set(words)


def execute(words: list[str], folder: Path) -> tuple[int, str]:
    """Exit code and output of a command: ours in this process, others in one of their own."""
    if words[0] == "schedlang":
        done = CliRunner().invoke(app, words[1:])
        return done.exit_code, done.output if done.exit_code else done.stdout
    start = {
        "python": [],
        "pytest": ["-m", "pytest", "-n", "0", "-p", "no:cacheprovider"],
        "torchrun": ["-m", "torch.distributed.run", "--standalone"],
    }.get(words[0])
    paths = os.pathsep.join((str(folder), str(ROOT)))
    environ = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    if start is None:
        ran = subprocess.run(
            words, cwd=folder, env=environ, capture_output=True, text=True, timeout=300
        )
    else:
        ran = forks.run(*start, *words[1:], cwd=folder, env=environ, timeout=300)
    return ran.returncode, ran.stdout if not ran.returncode else ran.stdout + ran.stderr


def counts() -> dict[str, int]:
    """How much of the book is played, by what is done with it."""
    found = [snippet for page in PAGES for snippet in snippets(page)]
    here = [s for s in found if not s.elsewhere]
    typed = [shlex.split(c) for s in here if s.language == "console" for c, _ in s.commands()]
    return {
        "fences": len(found),
        "schedules checked": sum(s.language == "sched" and not s.mark("run by") for s in found),
        "schedules verified as their comment says": sum(len(s.asked) for s in here),
        "commands": len(typed),
        "commands of a moment": sum(map(quick, typed)),
        "proofs among the commands": sum(words[1:2] == ["verify"] for words in typed),
        "programs": sum(s.language == "python" for s in here),
        "run by another test": sum(s.mark("run by") is not None for s in found),
        "only shown": sum(s.mark("not played") is not None for s in found),
    }


if __name__ == "__main__":
    for what, number in counts().items():
        print(f"{number:4} {what}")
