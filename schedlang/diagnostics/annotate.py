"""GitHub annotations on a line of a file, and the job's summary as Markdown."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_DATA = {"%": "%25", "\r": "%0D", "\n": "%0A"}
_PROPERTY = {**_DATA, ":": "%3A", ",": "%2C"}


@dataclass(frozen=True)
class Note:
    """One message about a line of a file; with line 0, about the whole file."""

    file: str
    line: int
    title: str
    text: str
    level: str = "error"  # or "warning", "notice"


def on_github() -> bool:
    """Return whether this process runs as a step of a GitHub workflow."""
    return os.environ.get("GITHUB_ACTIONS") == "true"


def annotation(note: Note, environ: Mapping[str, str] = os.environ) -> str:
    """Return the workflow command that shows a note on its line, escaped for the runner."""
    pairs = {"file": _workspace_path(note.file, environ)} if note.file else {}
    pairs |= {"line": str(note.line)} if note.file and note.line else {}
    pairs |= {"title": note.title} if note.title else {}
    properties = ",".join(f"{key}={_escape(value, _PROPERTY)}" for key, value in pairs.items())
    return f"::{note.level} {properties}::{_escape(note.text, _DATA)}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table in GitHub's Markdown; a cell may hold any text."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(map(_escape_cell, line))} |\n" for line in lines)


def summarize(text: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Append Markdown to the job's summary; return False if there is no summary."""
    path = environ.get("GITHUB_STEP_SUMMARY")
    if not path:
        return False
    with open(path, "a", encoding="utf-8") as summary:
        summary.write(text)
    return True


def _workspace_path(file: str, environ: Mapping[str, str]) -> str:
    """Return the path relative to the workspace, if the file is inside of it."""
    root = environ.get("GITHUB_WORKSPACE") or os.getcwd()
    relative = os.path.relpath(os.path.abspath(file), root)
    return file if relative.startswith(os.pardir) else relative.replace(os.sep, "/")


def _escape(text: str, signs: Mapping[str, str]) -> str:
    return "".join(signs.get(sign, sign) for sign in text)


def _escape_cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", "<br>")
