"""The language server: the state of open files, and the handlers of an editor's requests."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lsprotocol import types
from pygls.lsp.server import LanguageServer
from pygls.uris import from_fs_path
from pygls.workspace import TextDocument

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal
from schedlang.diagnostics.source import Source
from schedlang.editors import services
from schedlang.editors.services import (
    Outline,
    complete_at,
    find_declarations,
    find_definition,
    hover_text,
)
from schedlang.language.printer import fmt
from schedlang.language.syntax import parse
from schedlang.passes.elaborate.expand import expand
from schedlang.passes.elaborate.lint import lint

# -- findings, without torch or the model ----------------------------------------------------------


def find_problems(text: str, name: str) -> list[Diagnostic]:
    """Return the findings of `check` for a text; `name` is its file."""
    try:
        tree = parse(Source(name, text.replace("\r\n", "\n")))
        expand(tree, None)
        return lint(tree)
    except Refusal as refusal:
        return list(refusal.diagnostics)


# -- state -----------------------------------------------------------------------------------------
# While the user types, only findings that need neither torch nor the model are published. The
# command line computes what needs the model, in its own processes, when a file is opened or saved.


@dataclass
class FileState:
    """The state of one open file: the model's outline, the plan's rows and messages, the running
    query."""

    outline: Outline | None = None
    rows: dict[int, list[Mapping[str, Any]]] = field(default_factory=dict)
    messages: list[Mapping[str, Any]] = field(default_factory=list)  # messages of the plan
    facts: dict[tuple[object, ...], dict[str, str]] = field(default_factory=dict)  # of each message
    query: asyncio.Task[None] | None = None


class Server(LanguageServer):
    """The server, with the state of open files; `model` allows importing model files."""

    def __init__(self, version: str, *, model: bool = True) -> None:
        super().__init__("schedlang", version)
        self.model = model
        self.file_states: dict[str, FileState] = {}

    def state_of(self, uri: str) -> FileState:
        """Return the state of a file."""
        return self.file_states.setdefault(uri, FileState())

    def publish_findings(self, uri: str) -> None:
        """Publish the findings about a text; the plan's messages, too, if the text itself has no
        error."""
        document = self.workspace.get_text_document(uri)
        local = [d.to_json() for d in find_problems(document.source, str(document.path))]
        has_error = any(d["level"] == "error" for d in local)
        findings = local if has_error else [*local, *self.state_of(uri).messages]
        diagnostics = [diagnostic(document, d) for d in findings]
        self.state_of(uri).facts = {
            _message_key(m): dict(d.get("facts", ())) for m, d in zip(diagnostics, findings)
        }
        self.text_document_publish_diagnostics(types.PublishDiagnosticsParams(uri, diagnostics))

    async def query_model(self, uri: str) -> None:
        """Query the model for a saved file, then publish the result."""
        state, file = self.state_of(uri), Path(self.workspace.get_text_document(uri).path)
        tree = await services.run_verb("tree", file, "--each")
        if tree is not None and "path" in tree:
            state.outline = Outline(tree)
            plan = await services.run_verb("plan", file)
            state.rows = services.rows_by_line(plan)
            state.messages = list((plan or {}).get("diagnostics", ()))
            self.publish_findings(uri)

    def start_query(self, uri: str) -> None:
        """Start `query_model`; an older query for the same file is cancelled."""
        state = self.state_of(uri)
        if state.query is not None:
            state.query.cancel()
        if self.model and self.workspace.get_text_document(uri).path:
            state.query = asyncio.ensure_future(self.query_model(uri))


def diagnostic(document: TextDocument, message: Mapping[str, Any]) -> types.Diagnostic:
    """Convert a message for the protocol; a message without a place goes to the header."""
    span = message["at"]
    in_file = span["line"] > 0 and Path(span["file"]).name == Path(document.path).name
    label = [span["label"]] if span["label"] else []
    text = [
        message["title"],
        *label,
        *message["notes"],
        *(f"help: {help_text}" for help_text in message["helps"]),
    ]
    return types.Diagnostic(
        _to_range(document, span)
        if in_file
        else types.Range(types.Position(0, 0), types.Position(0, 1)),
        "\n".join(text),
        types.DiagnosticSeverity.Error
        if message["level"] == "error"
        else types.DiagnosticSeverity.Warning,
        code=message["code"],
        source="schedlang",
        related_information=[
            types.DiagnosticRelatedInformation(
                types.Location(document.uri, _to_range(document, also)), also["label"] or "here too"
            )
            for also in message["also"]
            if also["line"] > 0 and also["file"] == span["file"]
        ],
    )


def _to_range(document: TextDocument, span: Mapping[str, Any]) -> types.Range:
    """Convert lines and columns (from 1, in characters) to the protocol's units."""
    start = types.Position(span["line"] - 1, span["col"] - 1)
    end = types.Position(max(span["end_line"], 1) - 1, max(span["end_col"], 1) - 1)
    codec = document.position_codec
    return types.Range(
        codec.position_to_client_units(document.lines, start),
        codec.position_to_client_units(document.lines, end),
    )


# -- requests --------------------------------------------------------------------------------------


KINDS = {
    "module": types.CompletionItemKind.Module,
    "verb": types.CompletionItemKind.Function,
    "argument": types.CompletionItemKind.Property,
    "value": types.CompletionItemKind.EnumMember,
    "name": types.CompletionItemKind.Variable,
    "keyword": types.CompletionItemKind.Keyword,
}
SYMBOLS = {
    "step": types.SymbolKind.Event,
    "def": types.SymbolKind.Function,
    "axis": types.SymbolKind.Constant,
}


def make_server(version: str, *, model: bool = True) -> Server:
    """Make a server with all features; `model` allows importing model files."""
    server = Server(version, model=model)
    for feature, (handler, *options) in FEATURES.items():
        server.feature(feature, *options)(handler)
    return server


async def on_open(ls: Server, params: types.DidOpenTextDocumentParams) -> None:
    """Publish the findings, and query the model."""
    ls.publish_findings(params.text_document.uri)
    ls.start_query(params.text_document.uri)


def on_change(ls: Server, params: types.DidChangeTextDocumentParams) -> None:
    """Publish the findings about the current text."""
    state = ls.state_of(params.text_document.uri)
    state.rows, state.messages = {}, []  # their lines belong to the saved text
    ls.publish_findings(params.text_document.uri)


async def on_save(ls: Server, params: types.DidSaveTextDocumentParams) -> None:
    """Query the model again."""
    ls.start_query(params.text_document.uri)


def on_close(ls: Server, params: types.DidCloseTextDocumentParams) -> None:
    """Drop the state of the file."""
    state = ls.file_states.pop(params.text_document.uri, None)
    if state is not None and state.query is not None:
        state.query.cancel()


def on_completion(ls: Server, params: types.CompletionParams) -> types.CompletionList:
    """Return completions at a position."""
    document = ls.workspace.get_text_document(params.text_document.uri)
    offset = document.offset_at_position(params.position)
    completions = complete_at(document.source, offset, ls.state_of(document.uri).outline)
    items = [
        types.CompletionItem(
            o.text, kind=KINDS[o.kind], detail=o.detail or None, documentation=o.page or None
        )
        for o in completions
    ]
    return types.CompletionList(is_incomplete=False, items=items)


def on_hover(ls: Server, params: types.HoverParams) -> types.Hover | None:
    """Return the hover text of a word."""
    document = ls.workspace.get_text_document(params.text_document.uri)
    state = ls.state_of(document.uri)
    rows = state.rows.get(params.position.line + 1, [])
    text = hover_text(
        document.source, document.offset_at_position(params.position), state.outline, rows
    )
    return types.Hover(types.MarkupContent(types.MarkupKind.Markdown, text)) if text else None


def on_definition(ls: Server, params: types.DefinitionParams) -> types.Location | None:
    """Return the place where a name is declared."""
    document = ls.workspace.get_text_document(params.text_document.uri)
    offset = document.offset_at_position(params.position)
    target = find_definition(document.source, offset, Path(document.path))
    if target is None:
        return None
    target_document = TextDocument("", target.text) if target.file else document
    position = target_document.client_position_at_offset(target.offset)
    uri = from_fs_path(str(target.file.resolve())) if target.file else document.uri
    return types.Location(uri or document.uri, types.Range(position, position))


def on_formatting(ls: Server, params: types.DocumentFormattingParams) -> list[types.TextEdit]:
    """Return the edit to the canonical form; [] if the text does not parse."""
    document = ls.workspace.get_text_document(params.text_document.uri)
    text = document.source
    try:
        canonical = fmt(Source(str(document.path), text.replace("\r\n", "\n")))
    except Refusal:
        return []  # its messages are already published
    end = document.client_position_at_offset(len(text))
    return (
        []
        if canonical == text
        else [types.TextEdit(types.Range(types.Position(0, 0), end), canonical)]
    )


def on_symbols(ls: Server, params: types.DocumentSymbolParams) -> list[types.DocumentSymbol]:
    """Return the declarations of a file."""
    document = ls.workspace.get_text_document(params.text_document.uri)
    symbols = []
    for entry in find_declarations(document.source):
        start = document.client_position_at_offset(entry.offset)
        end = document.client_position_at_offset(entry.offset + len(entry.name))
        extent = types.Range(start, end)
        kind = SYMBOLS.get(entry.kind, types.SymbolKind.Variable)
        symbols.append(
            types.DocumentSymbol(entry.name or entry.kind, kind, extent, extent, entry.line)
        )
    return symbols


def on_code_action(ls: Server, params: types.CodeActionParams) -> list[types.CodeAction]:
    """Return fixes for messages with a guessed name."""
    document = params.text_document
    return [
        fix for message in params.context.diagnostics for fix in _fix_message(ls, document, message)
    ]


def _fix_message(
    ls: Server, document: types.TextDocumentIdentifier, message: types.Diagnostic
) -> list[types.CodeAction]:
    """Replace the wrong name by the guessed one, if the marked text contains it."""
    marked = ls.workspace.get_text_document(document.uri).text_in_client_range(message.range)
    facts = ls.state_of(document.uri).facts.get(_message_key(message), {})
    unknown, suggestion = facts.get("unknown"), facts.get("meant")
    if unknown is None or suggestion is None or unknown not in marked:
        return []
    edit = types.TextEdit(message.range, marked.replace(unknown, suggestion, 1))
    change = types.WorkspaceEdit(changes={document.uri: [edit]})
    return [
        types.CodeAction(
            f"write `{suggestion}`", types.CodeActionKind.QuickFix, [message], edit=change
        )
    ]


def _message_key(message: types.Diagnostic) -> tuple[object, ...]:
    """Return a key for a message that an editor sends back: editors store no data of ours."""
    start = message.range.start
    return message.code, start.line, start.character, message.message


FEATURES: dict[str, tuple[Any, ...]] = {
    types.TEXT_DOCUMENT_DID_OPEN: (on_open,),
    types.TEXT_DOCUMENT_DID_CHANGE: (on_change,),
    types.TEXT_DOCUMENT_DID_SAVE: (on_save,),
    types.TEXT_DOCUMENT_DID_CLOSE: (on_close,),
    types.TEXT_DOCUMENT_COMPLETION: (
        on_completion,
        types.CompletionOptions(trigger_characters=[".", "("]),
    ),
    types.TEXT_DOCUMENT_HOVER: (on_hover,),
    types.TEXT_DOCUMENT_DEFINITION: (on_definition,),
    types.TEXT_DOCUMENT_FORMATTING: (on_formatting,),
    types.TEXT_DOCUMENT_DOCUMENT_SYMBOL: (on_symbols,),
    types.TEXT_DOCUMENT_CODE_ACTION: (
        on_code_action,
        types.CodeActionOptions(code_action_kinds=[types.CodeActionKind.QuickFix]),
    ),
}
