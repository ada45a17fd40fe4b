"""Examples of codes, played: their files written, their command given, what it says."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from typer.testing import CliRunner

from schedlang.cli import app
from schedlang.diagnostics import diagnostic
from schedlang.diagnostics.codes import MODEL, Example, model
from schedlang.diagnostics.diagnostic import Refusal

HERE = "/net"  # what a page calls the folder
# what took how long, and on a busy machine how far it has come
TIMES = re.compile(r"^((planned|written) in .*| +[\d.]+ s  .*\.\.\.)\n", re.MULTILINE)


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """In the folder, from which modules may be imported; afterwards nothing is left of it."""
    before, known = os.getcwd(), set(sys.modules)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        os.chdir(before)
        for name in set(sys.modules) - known:
            if getattr(sys.modules[name], "__file__", None) in map(str, folder.iterdir()):
                del sys.modules[name]


def said(example: Example, folder: Path, threads: Any) -> str:
    """What the command says to the user, warnings and refusals alike; the folder is `/net`."""
    for name, text in {MODEL: model(), **example.files}.items():
        (folder / name).write_text(text)
    with _inside(folder), _named(folder):
        told = _told(example, threads)
    return told.replace(str(folder), HERE)


@contextmanager
def _named(folder: Path) -> Iterator[None]:
    """The folder is called `/net` before lines are broken: they do not hang on where it is."""
    plain = diagnostic.wrap_text

    def wrapped(text: str, *more: Any) -> list[str]:
        return plain(text.replace(str(folder), HERE), *more)

    with patch.object(diagnostic, "wrap_text", wrapped):
        yield


def _told(example: Example, threads: Any) -> str:
    if example.ranks:
        answers = threads.run(_script, example.ranks, example.words[-1])
        assert len(set(answers)) == 1, answers  # all ranks refuse alike
        return str(answers[0])
    if example.command.startswith("python "):
        return _script(example.words[-1])
    with patch("schedlang.runtime.launch.pool.Pool", lambda **_: nullcontext(threads)):
        done = CliRunner().invoke(app, example.words)
    assert done.exit_code in (0, 1, 2), done.output
    return TIMES.sub("", done.stderr)


def told_as_json(example: Example, folder: Path, threads: Any) -> str:
    """The document that the command prints for machines."""
    for name, text in {MODEL: model(), **example.files}.items():
        (folder / name).write_text(text)
    with (
        _inside(folder),
        patch("schedlang.runtime.launch.pool.Pool", lambda **_: nullcontext(threads)),
    ):
        return CliRunner().invoke(app, [*example.words, "--json"]).stdout


def _script(name: str) -> str:
    """The refusal that a script of the user's ends in; empty if it ends well."""
    try:
        exec(compile(Path(name).read_text(), name, "exec"), {"__name__": "__main__"})
    except Refusal as refusal:
        return str(refusal).removeprefix("\n") + "\n"  # as Python prints it
    return ""


def rewritten(example: Example, folder: Path, threads: Any) -> Example:
    """The example with what is said today."""
    return replace(example, message=said(example, folder, threads))
