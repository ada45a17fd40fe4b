"""Findings: every message about a text as it is being written, without torch or the model."""

from __future__ import annotations

from schedlang.diagnostic import Diagnostic, Refusal
from schedlang.passes.reading.expand import expand
from schedlang.passes.reading.lint import lint
from schedlang.source import Source
from schedlang.syntax import parse


def findings(text: str, name: str) -> list[Diagnostic]:
    """What `check` would say of a text; `name` is its file, beside which others are found."""
    try:
        tree = parse(Source(name, text.replace("\r\n", "\n")))
        expand(tree, None)
        return lint(tree)
    except Refusal as refusal:
        return list(refusal.diagnostics)
