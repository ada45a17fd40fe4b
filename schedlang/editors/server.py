"""The language server's state: open files, what is known of each, and what is said of them.

While one writes, only what needs neither torch nor the model is said; what only the model can tell
is asked of the command line, in processes of their own, when a file is opened or saved.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lsprotocol import types as t
from pygls.lsp.server import LanguageServer
from pygls.workspace import TextDocument

from schedlang.editors import asked
from schedlang.editors.findings import findings
from schedlang.editors.outline import Outline


@dataclass
class Known:
    """What is known of one open file beside its text: the model, its plan, and the question."""

    outline: Outline | None = None
    rows: dict[int, list[Mapping[str, Any]]] = field(default_factory=dict)
    told: list[Mapping[str, Any]] = field(default_factory=list)  # the plan's messages
    question: asyncio.Task[None] | None = None


class Server(LanguageServer):
    """The server, and what it knows of open files; `model` lets model files be imported."""

    def __init__(self, version: str, *, model: bool = True) -> None:
        super().__init__("schedlang", version)
        self.model = model
        self.known: dict[str, Known] = {}

    def about(self, uri: str) -> Known:
        """What is known of a file."""
        return self.known.setdefault(uri, Known())

    def say(self, uri: str) -> None:
        """Publish what is wrong with a text; the plan's messages where the text itself is right."""
        document = self.workspace.get_text_document(uri)
        here = [d.to_json() for d in findings(document.source, str(document.path))]
        wrong = any(d["level"] == "error" for d in here)
        every = here if wrong else [*here, *self.about(uri).told]
        made = [diagnostic(document, d) for d in every]
        self.text_document_publish_diagnostics(t.PublishDiagnosticsParams(uri, made))

    async def learn(self, uri: str) -> None:
        """Ask the model about a saved file, then say what it answered."""
        known, file = self.about(uri), Path(self.workspace.get_text_document(uri).path)
        tree = await asked.ask("tree", file, "--each")
        if tree is not None and "path" in tree:
            known.outline = Outline(tree)
            plan = await asked.ask("plan", file)
            known.rows = asked.rows(plan)
            known.told = list((plan or {}).get("diagnostics", ()))
            self.say(uri)

    def ask(self, uri: str) -> None:
        """Start to learn; an older question about the same file is given up."""
        known = self.about(uri)
        if known.question is not None:
            known.question.cancel()
        if self.model and self.workspace.get_text_document(uri).path:
            known.question = asyncio.ensure_future(self.learn(uri))


def diagnostic(document: TextDocument, told: Mapping[str, Any]) -> t.Diagnostic:
    """A message as the protocol has it; one without a place of its own stands at the header."""
    at = told["at"]
    mine = at["line"] > 0 and Path(at["file"]).name == Path(document.path).name
    label = [at["label"]] if at["label"] else []
    text = [told["title"], *label, *told["notes"], *(f"help: {one}" for one in told["helps"])]
    return t.Diagnostic(
        _range(document, at) if mine else t.Range(t.Position(0, 0), t.Position(0, 1)),
        "\n".join(text),
        t.DiagnosticSeverity.Error if told["level"] == "error" else t.DiagnosticSeverity.Warning,
        code=told["code"],
        source="schedlang",
        related_information=[
            t.DiagnosticRelatedInformation(
                t.Location(document.uri, _range(document, also)), also["label"] or "here too"
            )
            for also in told["also"]
            if also["line"] > 0 and also["file"] == at["file"]
        ],
    )


def _range(document: TextDocument, at: Mapping[str, Any]) -> t.Range:
    """Lines and columns from 1, in characters, as the protocol counts them."""
    start = t.Position(at["line"] - 1, at["col"] - 1)
    end = t.Position(max(at["end_line"], 1) - 1, max(at["end_col"], 1) - 1)
    codec = document.position_codec
    return t.Range(
        codec.position_to_client_units(document.lines, start),
        codec.position_to_client_units(document.lines, end),
    )
