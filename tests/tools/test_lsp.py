"""The language server, spoken to over its protocol as by an editor."""

import asyncio
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pygls")
from lsprotocol import types as t  # noqa: E402
from pygls.lsp.client import LanguageClient  # noqa: E402

MODEL = """
import torch
from torch import nn

def model():
    return nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(8, 8) for _ in range(3))})
"""
TEXT = """schedule 1 for ModuleDict

knob tp: int = 2 in [1, 2]

mesh(tp=tp)

step "s" {
  layers.*  shard(col, over=tp)
  verify(forward)
}
"""
URI = t.TextDocumentIdentifier


class Editor(LanguageClient):
    """A client that queues the published diagnostics."""

    def __init__(self) -> None:
        super().__init__("editor", "1")
        self.said: asyncio.Queue[t.PublishDiagnosticsParams] = asyncio.Queue()

        @self.feature(t.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS)
        def published(params: t.PublishDiagnosticsParams) -> None:
            self.said.put_nowait(params)

    async def opened(self, file: Path) -> str:
        """Open a file and return its uri."""
        item = t.TextDocumentItem(file.as_uri(), "sched", 1, file.read_text())
        self.text_document_did_open(t.DidOpenTextDocumentParams(item))
        return file.as_uri()

    async def heard(self) -> list[t.Diagnostic]:
        """Wait for the next diagnostics."""
        return list((await asyncio.wait_for(self.said.get(), 600)).diagnostics)

    def changed(self, uri: str, text: str) -> None:
        """Send a new text of a file."""
        document = t.VersionedTextDocumentIdentifier(2, uri)
        changes = [t.TextDocumentContentChangeWholeDocument(text)]
        self.text_document_did_change(t.DidChangeTextDocumentParams(document, changes))


def run_session(talk: Callable[[Editor], Coroutine[Any, Any, None]], *options: str) -> None:
    """Start a server, run a session with it, and stop it."""

    async def whole() -> None:
        editor = Editor()
        await editor.start_io(sys.executable, "-m", "schedlang", "lsp", *options)
        try:
            await editor.initialize_async(t.InitializeParams(t.ClientCapabilities()))
            editor.initialized(t.InitializedParams())
            await talk(editor)
        finally:
            await editor.shutdown_async(None)
            editor.exit(None)
            await editor.stop()

    asyncio.run(whole())


def test_text_alone(tmp_path: Path) -> None:
    """Without a model: mistakes, fixes, formatting, definitions and symbols."""
    file = tmp_path / "a.sched"
    file.write_text(TEXT)

    async def talk(editor: Editor) -> None:
        uri = await editor.opened(file)
        assert await editor.heard() == []
        editor.changed(uri, TEXT.replace("shard(col", "shrad(col"))
        (diagnostic,) = await editor.heard()
        assert (diagnostic.code, diagnostic.range.start.line, diagnostic.range.start.character) == (
            "S301",
            7,
            12,
        )
        params = t.CodeActionParams(URI(uri), diagnostic.range, t.CodeActionContext([diagnostic]))
        (fix,) = await editor.text_document_code_action_async(params) or ()
        assert isinstance(fix, t.CodeAction) and fix.edit and fix.edit.changes
        assert "shard" in fix.edit.changes[uri][0].new_text
        for misspelt, correct in (("over=tpp", "over=tp"), ("shard(cl,", "shard(col,")):
            editor.changed(uri, TEXT.replace(correct, misspelt))
            (diagnostic,) = await editor.heard()
            params = t.CodeActionParams(
                URI(uri), diagnostic.range, t.CodeActionContext([diagnostic])
            )
            (fix,) = await editor.text_document_code_action_async(params) or ()
            assert isinstance(fix, t.CodeAction) and fix.edit and fix.edit.changes
            assert fix.edit.changes[uri][0].new_text in correct, misspelt
        editor.changed(uri, TEXT.replace("shard(col, over=tp)", "shard( col,over=tp )"))
        assert await editor.heard() == []
        options = t.FormattingOptions(2, True)
        format_params = t.DocumentFormattingParams(URI(uri), options)
        (edit,) = await editor.text_document_formatting_async(format_params) or ()
        assert edit.new_text == TEXT
        position = t.Position(7, TEXT.split("\n")[7].index("over=tp") + 6)
        location = await editor.text_document_definition_async(
            t.DefinitionParams(URI(uri), position)
        )
        assert isinstance(location, t.Location) and location.range.start == t.Position(2, 5)
        symbols = await editor.text_document_document_symbol_async(t.DocumentSymbolParams(URI(uri)))
        assert [symbol.name for symbol in symbols or ()] == ["tp", "tp", "s"]

    run_session(talk, "--no-model")


def test_the_model_is_asked(tmp_path: Path) -> None:
    """With a model: wrong paths are published, paths completed, and hovers have shapes."""
    (tmp_path / "model.py").write_text(MODEL)
    file = tmp_path / "a.sched"
    file.write_text(TEXT.replace("layers.*", "layer.*"))

    async def talk(editor: Editor) -> None:
        uri = await editor.opened(file)
        assert await editor.heard() == []  # the text itself is right
        (diagnostic,) = await editor.heard()
        assert diagnostic.code == "S201" and diagnostic.range.start == t.Position(7, 2)
        line = "  layers."
        editor.changed(uri, TEXT.replace("  layers.*  shard(col, over=tp)", line))
        params = t.CompletionParams(URI(uri), t.Position(7, len(line)))
        offered = await editor.text_document_completion_async(params)
        assert isinstance(offered, t.CompletionList)
        assert [item.label for item in offered.items] == ["*", "0", "1", "2"]
        editor.changed(uri, TEXT)
        params_at = t.HoverParams(URI(uri), t.Position(7, 4))
        hover = await editor.text_document_hover_async(params_at)
        assert hover and "3 modules" in str(hover.contents)
        assert "weight float32[8, 8]" in str(hover.contents)

    run_session(talk)


def test_without_pygls(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without pygls, `lsp` says what to install."""
    from typer.testing import CliRunner

    from schedlang.cli import app

    monkeypatch.setitem(sys.modules, "pygls.lsp.server", None)
    for name in [name for name in sys.modules if name.startswith("schedlang.editors.")]:
        monkeypatch.delitem(sys.modules, name)
    result = CliRunner().invoke(app, ["lsp"])
    assert result.exit_code == 2
    assert "S909" in result.stderr and "pip install 'schedlang[editors]'" in result.stderr
