"""Pages that are played: files that they introduce are written, commands run, outputs compared."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)
NAMED = re.compile(r"as\s+`([\w.]+)`[^`]*$")


@dataclass(frozen=True)
class Typed:
    """A command, and what a page says that it prints."""

    words: tuple[str, ...]
    expected: str


def play(page: Path, folder: Path) -> Iterator[Typed]:
    """Write the files that a page introduces (as `name`), and give its commands, in its order."""
    text, last = page.read_text(), 0
    for fence in FENCE.finditer(text):
        before, last = text[last : fence.start()], fence.end()
        if fence[1] == "console":
            for part in re.split(r"^\$ ", fence[2], flags=re.M)[1:]:
                command, _, expected = part.partition("\n")
                yield Typed(tuple(shlex.split(command)), expected)
        elif name := NAMED.search(before):
            (folder / name[1]).write_text(fence[2])


def printed(expected: str, output: str) -> bool:
    """Whether an output is what is expected; `...` is anything, also several lines."""
    lines = [line.rstrip() for line in expected.rstrip().split("\n")]
    pattern = "\n".join(re.escape(line).replace(r"\.\.\.", ".*") for line in lines)
    text = "\n".join(line.rstrip() for line in output.strip("\n").split("\n"))
    return re.fullmatch(pattern, text, re.S) is not None
