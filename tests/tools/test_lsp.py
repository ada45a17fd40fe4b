"""The language server over its protocol, as an editor speaks it."""

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
    """A client that keeps what is published of each file."""

    def __init__(self) -> None:
        super().__init__("editor", "1")
        self.said: asyncio.Queue[t.PublishDiagnosticsParams] = asyncio.Queue()

        @self.feature(t.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS)
        def published(params: t.PublishDiagnosticsParams) -> None:
            self.said.put_nowait(params)

    async def opened(self, file: Path) -> str:
        """Open a file; its uri."""
        item = t.TextDocumentItem(file.as_uri(), "sched", 1, file.read_text())
        self.text_document_did_open(t.DidOpenTextDocumentParams(item))
        return file.as_uri()

    async def heard(self) -> list[t.Diagnostic]:
        """The next diagnostics."""
        return list((await asyncio.wait_for(self.said.get(), 600)).diagnostics)

    def changed(self, uri: str, text: str) -> None:
        """Another text."""
        document = t.VersionedTextDocumentIdentifier(2, uri)
        whole = [t.TextDocumentContentChangeWholeDocument(text)]
        self.text_document_did_change(t.DidChangeTextDocumentParams(document, whole))


def speak(talk: Callable[[Editor], Coroutine[Any, Any, None]], *options: str) -> None:
    """Start a server, talk to it, end it."""

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
    """Without a model: mistakes while one writes, fixes, formatting, definitions, symbols."""
    file = tmp_path / "a.sched"
    file.write_text(TEXT)

    async def talk(editor: Editor) -> None:
        uri = await editor.opened(file)
        assert await editor.heard() == []
        editor.changed(uri, TEXT.replace("shard(col", "shrad(col"))
        (wrong,) = await editor.heard()
        assert (wrong.code, wrong.range.start.line, wrong.range.start.character) == ("S301", 7, 12)
        asked = t.CodeActionParams(URI(uri), wrong.range, t.CodeActionContext([wrong]))
        (fix,) = await editor.text_document_code_action_async(asked) or ()
        assert isinstance(fix, t.CodeAction) and fix.edit and fix.edit.changes
        assert "shard" in fix.edit.changes[uri][0].new_text
        for slip, legal in (("over=tpp", "over=tp"), ("shard(cl,", "shard(col,")):
            editor.changed(uri, TEXT.replace(legal, slip))
            (wrong,) = await editor.heard()
            asked = t.CodeActionParams(URI(uri), wrong.range, t.CodeActionContext([wrong]))
            (fix,) = await editor.text_document_code_action_async(asked) or ()
            assert isinstance(fix, t.CodeAction) and fix.edit and fix.edit.changes
            assert fix.edit.changes[uri][0].new_text in legal, slip
        editor.changed(uri, TEXT.replace("shard(col, over=tp)", "shard( col,over=tp )"))
        assert await editor.heard() == []
        options = t.FormattingOptions(2, True)
        asked_form = t.DocumentFormattingParams(URI(uri), options)
        (edit,) = await editor.text_document_formatting_async(asked_form) or ()
        assert edit.new_text == TEXT
        place = t.Position(7, TEXT.split("\n")[7].index("over=tp") + 6)
        found = await editor.text_document_definition_async(t.DefinitionParams(URI(uri), place))
        assert isinstance(found, t.Location) and found.range.start == t.Position(2, 5)
        named = await editor.text_document_document_symbol_async(t.DocumentSymbolParams(URI(uri)))
        assert [one.name for one in named or ()] == ["tp", "tp", "s"]

    speak(talk, "--no-model")


def test_the_model_is_asked(tmp_path: Path) -> None:
    """With a model: what only it can tell is published, paths are completed, hovers have shapes."""
    (tmp_path / "model.py").write_text(MODEL)
    file = tmp_path / "a.sched"
    file.write_text(TEXT.replace("layers.*", "layer.*"))

    async def talk(editor: Editor) -> None:
        uri = await editor.opened(file)
        assert await editor.heard() == []  # the text itself is right
        (wrong,) = await editor.heard()
        assert wrong.code == "S201" and wrong.range.start == t.Position(7, 2)
        line = "  layers."
        editor.changed(uri, TEXT.replace("  layers.*  shard(col, over=tp)", line))
        asked = t.CompletionParams(URI(uri), t.Position(7, len(line)))
        offered = await editor.text_document_completion_async(asked)
        assert isinstance(offered, t.CompletionList)
        assert [one.label for one in offered.items] == ["*", "0", "1", "2"]
        editor.changed(uri, TEXT)
        place = t.HoverParams(URI(uri), t.Position(7, 4))
        shown = await editor.text_document_hover_async(place)
        assert shown and "3 modules" in str(shown.contents)
        assert "weight float32[8, 8]" in str(shown.contents)

    speak(talk)


def test_without_pygls(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where pygls is missing the verb says what to install."""
    from typer.testing import CliRunner

    from schedlang.cli import app

    monkeypatch.setitem(sys.modules, "pygls.lsp.server", None)
    for name in [name for name in sys.modules if name.startswith("schedlang.editors.")]:
        monkeypatch.delitem(sys.modules, name)
    done = CliRunner().invoke(app, ["lsp"])
    assert done.exit_code == 2
    assert "S909" in done.stderr and "pip install 'schedlang[editors]'" in done.stderr
