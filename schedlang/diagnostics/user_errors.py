"""Refusals for exceptions raised by functions of a user's model file, placed at the user's line."""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from schedlang.diagnostics.diagnostic import Label, Refusal
from schedlang.diagnostics.source import NOWHERE, Source, Span, relative_path

OURS = tuple(  # files that are not the user's
    str(Path(__file__).resolve().parents[2] / room) + os.sep
    for room in ("schedlang", "passes", "primitives")
)
CODES = {"model": "S863", "batch": "S864", "loss": "S865", "weight": "S865"}
HELPS = {
    "model": "it is called without arguments, and once more on the meta device: `model()`",
    "batch": "it is called with a seed, if it takes one, and must return a dict: `batch(seed)`",
    "loss": "it is called with the model's output and the batch: `loss(output, batch)`",
    "weight": "it is called with a part of the batch: `weight(batch)`",
}


def refusal_of(error: Exception, name: str, function: Callable[..., Any]) -> Refusal:
    """Return the refusal for an error in a function of the model file (one of CODES), at its line.

    Where a library that the function calls raised the error, a note says where.
    """
    file = file_of(function)
    own_frames, notes = frames_in(file, error)
    message = f"{type(error).__name__}: {error}".split("\n")[0].removesuffix(": ")
    label = Label(at_frame(own_frames[-1]), "here") if own_frames else Label()
    title = f"`{name}` of the model file raises {message}"
    return Refusal.of(CODES[name], title, label, notes=notes, helps=(HELPS[name],))


def frames_in(
    file: str, error: BaseException
) -> tuple[list[traceback.FrameSummary], tuple[str, ...]]:
    """Return the frames of an error in a file, and a note on where it was raised if that was
    deeper.

    Functions of torch run under modes of ours, whose frames may be the innermost: no note names
    them.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own_frames = [frame for frame in frames if file and os.path.abspath(frame.filename) == file]
    raising = [f for f in frames if not os.path.realpath(f.filename).startswith(OURS)][-1:]
    return own_frames, tuple(
        f"raised at {Path(raised.filename).name}:{raised.lineno}: {raised.line}"
        for raised in raising
        if raised not in own_frames[-1:]
    )


def file_of(function: Callable[..., Any]) -> str:
    """Return the absolute path of the file that defines a function; "" if unknown."""
    try:
        source = inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:  # a callable object, a partial function
        return ""
    return os.path.abspath(source) if source else ""


def at_frame(frame: traceback.FrameSummary) -> Span:
    """Return the span of the expression that a frame was executing."""
    try:
        text = Path(frame.filename).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return NOWHERE
    source, line = Source(relative_path(frame.filename), text), frame.lineno or 1
    col, end = frame.colno, frame.end_colno
    if col is None or end is None or frame.end_lineno is None:
        return Span(source, line, 1, line, len(source.line(line)) + 1)
    return Span(source, line, col + 1, frame.end_lineno, end + 1)
