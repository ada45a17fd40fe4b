"""Run the examples of error codes: write their files, run the command, return its output."""

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

HERE = "/net"  # name of the folder on documentation pages
# lines with durations and progress
TIMES = re.compile(r"^((planned|written) in .*| +[\d.]+ s  .*\.\.\.)\n", re.MULTILINE)


@contextmanager
def _in_folder(folder: Path) -> Iterator[None]:
    """Change into the folder and import from it; undo both at exit."""
    old_folder, old_modules = os.getcwd(), set(sys.modules)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        os.chdir(old_folder)
        for name in set(sys.modules) - old_modules:
            if getattr(sys.modules[name], "__file__", None) in map(str, folder.iterdir()):
                del sys.modules[name]


def command_output(example: Example, folder: Path, threads: Any) -> str:
    """Return the command's warnings and refusals; the folder appears as `/net`."""
    for name, text in {MODEL: model(), **example.files}.items():
        (folder / name).write_text(text)
    with _in_folder(folder), _folder_as_net(folder):
        output = _run_example(example, threads)
    return output.replace(str(folder), HERE)


@contextmanager
def _folder_as_net(folder: Path) -> Iterator[None]:
    """Replace the folder by `/net` before text is wrapped, so line breaks do not depend on it."""
    wrap_text = diagnostic.wrap_text

    def wrapped(text: str, *args: Any) -> list[str]:
        return wrap_text(text.replace(str(folder), HERE), *args)

    with patch.object(diagnostic, "wrap_text", wrapped):
        yield


def _run_example(example: Example, threads: Any) -> str:
    if example.ranks:
        answers = threads.run(_script_refusal, example.ranks, example.words[-1])
        assert len(set(answers)) == 1, answers  # all ranks give the same refusal
        return str(answers[0])
    if example.command.startswith("python "):
        return _script_refusal(example.words[-1])
    with patch("schedlang.runtime.launch.pool.Pool", lambda **_: nullcontext(threads)):
        result = CliRunner().invoke(app, example.words)
    assert result.exit_code in (0, 1, 2), result.output
    return TIMES.sub("", result.stderr)


def json_output(example: Example, folder: Path, threads: Any) -> str:
    """Return the command's output with `--json`."""
    for name, text in {MODEL: model(), **example.files}.items():
        (folder / name).write_text(text)
    with (
        _in_folder(folder),
        patch("schedlang.runtime.launch.pool.Pool", lambda **_: nullcontext(threads)),
    ):
        return CliRunner().invoke(app, [*example.words, "--json"]).stdout


def _script_refusal(name: str) -> str:
    """Run a user's script and return its refusal; empty if it ends well."""
    try:
        exec(compile(Path(name).read_text(), name, "exec"), {"__name__": "__main__"})
    except Refusal as refusal:
        return str(refusal).removeprefix("\n") + "\n"  # as Python prints it
    return ""


def with_new_message(example: Example, folder: Path, threads: Any) -> Example:
    """Return the example with the message of the current code."""
    return replace(example, message=command_output(example, folder, threads))
