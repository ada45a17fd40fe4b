"""What the language server does when an editor tells or asks it something."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from lsprotocol import types as t
from pygls.uris import from_fs_path
from pygls.workspace import TextDocument

from schedlang.diagnostic import Refusal
from schedlang.editors.complete import offers
from schedlang.editors.declared import declared
from schedlang.editors.define import definition
from schedlang.editors.hover import hover
from schedlang.editors.server import Server
from schedlang.printer import fmt
from schedlang.source import Source

KINDS = {
    "module": t.CompletionItemKind.Module,
    "verb": t.CompletionItemKind.Function,
    "argument": t.CompletionItemKind.Property,
    "value": t.CompletionItemKind.EnumMember,
    "name": t.CompletionItemKind.Variable,
    "keyword": t.CompletionItemKind.Keyword,
}
SYMBOLS = {"step": t.SymbolKind.Event, "def": t.SymbolKind.Function, "axis": t.SymbolKind.Constant}
MEANT = re.compile(r"did you mean `([^`]+)`\?")


def server(version: str, *, model: bool = True) -> Server:
    """A server with all its features; `model` lets model files be imported."""
    made = Server(version, model=model)
    for feature, (handler, *options) in FEATURES.items():
        made.feature(feature, *options)(handler)
    return made


async def opened(ls: Server, params: t.DidOpenTextDocumentParams) -> None:
    """Say what is wrong, and ask the model."""
    ls.say(params.text_document.uri)
    ls.ask(params.text_document.uri)


def changed(ls: Server, params: t.DidChangeTextDocumentParams) -> None:
    """Say what is wrong with the text as it is now."""
    known = ls.about(params.text_document.uri)
    known.rows, known.told = {}, []  # their lines are those of the saved text
    ls.say(params.text_document.uri)


async def saved(ls: Server, params: t.DidSaveTextDocumentParams) -> None:
    """Ask the model again."""
    ls.ask(params.text_document.uri)


def closed(ls: Server, params: t.DidCloseTextDocumentParams) -> None:
    """Forget the file."""
    known = ls.known.pop(params.text_document.uri, None)
    if known is not None and known.question is not None:
        known.question.cancel()


def complete(ls: Server, params: t.CompletionParams) -> t.CompletionList:
    """What may stand at a place."""
    document = ls.workspace.get_text_document(params.text_document.uri)
    offset = document.offset_at_position(params.position)
    found = offers(document.source, offset, ls.about(document.uri).outline)
    items = [
        t.CompletionItem(o.text, kind=KINDS[o.kind], detail=o.detail or None,
                         documentation=o.page or None)
        for o in found
    ]  # fmt: skip
    return t.CompletionList(is_incomplete=False, items=items)


def hovered(ls: Server, params: t.HoverParams) -> t.Hover | None:
    """What is known of a word."""
    document = ls.workspace.get_text_document(params.text_document.uri)
    known = ls.about(document.uri)
    rows = known.rows.get(params.position.line + 1, [])
    said = hover(document.source, document.offset_at_position(params.position), known.outline, rows)
    return t.Hover(t.MarkupContent(t.MarkupKind.Markdown, said)) if said else None


def defined(ls: Server, params: t.DefinitionParams) -> t.Location | None:
    """Where a name is declared."""
    document = ls.workspace.get_text_document(params.text_document.uri)
    offset = document.offset_at_position(params.position)
    found = definition(document.source, offset, Path(document.path))
    if found is None:
        return None
    other = TextDocument("", found.text) if found.file else document
    at = other.client_position_at_offset(found.offset)
    uri = from_fs_path(str(found.file.resolve())) if found.file else document.uri
    return t.Location(uri or document.uri, t.Range(at, at))


def formatted(ls: Server, params: t.DocumentFormattingParams) -> list[t.TextEdit]:
    """The canonical form; nothing where the text does not parse."""
    document = ls.workspace.get_text_document(params.text_document.uri)
    text = document.source
    try:
        canonical = fmt(Source(str(document.path), text.replace("\r\n", "\n")))
    except Refusal:
        return []  # its messages are shown already
    end = document.client_position_at_offset(len(text))
    return [] if canonical == text else [t.TextEdit(t.Range(t.Position(0, 0), end), canonical)]


def symbols(ls: Server, params: t.DocumentSymbolParams) -> list[t.DocumentSymbol]:
    """The declarations of a file."""
    document = ls.workspace.get_text_document(params.text_document.uri)
    found = []
    for one in declared(document.source):
        start = document.client_position_at_offset(one.offset)
        end = document.client_position_at_offset(one.offset + len(one.name))
        place = t.Range(start, end)
        kind = SYMBOLS.get(one.kind, t.SymbolKind.Variable)
        found.append(t.DocumentSymbol(one.name or one.kind, kind, place, place, one.line))
    return found


def fixes(ls: Server, params: t.CodeActionParams) -> list[t.CodeAction]:
    """The names that were meant, for messages that guess one."""
    document = params.text_document
    return [fix for one in params.context.diagnostics for fix in _fixes(ls, document, one)]


def _fixes(ls: Server, document: t.TextDocumentIdentifier, one: t.Diagnostic) -> list[t.CodeAction]:
    """Put the name that was meant where the wrong one stands, if that is the marked word."""
    marked = ls.workspace.get_text_document(document.uri).text_in_client_range(one.range)
    made = []
    for meant in MEANT.findall(one.message):
        wrong = re.search(r"`([^`]+)`", one.message)
        if wrong is None or wrong[1] not in marked:
            continue
        edit = t.TextEdit(one.range, marked.replace(wrong[1], meant, 1))
        change = t.WorkspaceEdit(changes={document.uri: [edit]})
        made.append(t.CodeAction(f"write `{meant}`", t.CodeActionKind.QuickFix, [one], edit=change))
    return made


FEATURES: dict[str, tuple[Any, ...]] = {
    t.TEXT_DOCUMENT_DID_OPEN: (opened,),
    t.TEXT_DOCUMENT_DID_CHANGE: (changed,),
    t.TEXT_DOCUMENT_DID_SAVE: (saved,),
    t.TEXT_DOCUMENT_DID_CLOSE: (closed,),
    t.TEXT_DOCUMENT_COMPLETION: (complete, t.CompletionOptions(trigger_characters=[".", "("])),
    t.TEXT_DOCUMENT_HOVER: (hovered,),
    t.TEXT_DOCUMENT_DEFINITION: (defined,),
    t.TEXT_DOCUMENT_FORMATTING: (formatted,),
    t.TEXT_DOCUMENT_DOCUMENT_SYMBOL: (symbols,),
    t.TEXT_DOCUMENT_CODE_ACTION: (
        fixes,
        t.CodeActionOptions(code_action_kinds=[t.CodeActionKind.QuickFix]),
    ),
}
