"""Text to syntax tree; nothing here knows what a primitive is."""

from __future__ import annotations

import re
from pathlib import Path as FilePath
from typing import Any

from lark.exceptions import UnexpectedInput

from schedlang.diagnostics.diagnostic import Diagnostic, Label, Refusal, closest, unknown
from schedlang.diagnostics.source import Source, Span, bytes_of
from schedlang.language import nodes as n
from schedlang.language.grammar import DEEPEST, TooDeep, parser, span_of
from schedlang.language.misread import explain, form_problems
from schedlang.language.treemaker import TreeMaker
from schedlang.uncollected import uncollected

LARGEST = 2**20  # bytes of a schedule, some 20,000 rows
COMMENT = re.compile(r'"[^"\n]*"|`[^`\n]+`|(#[^\n]*)')


def comments(source: Source) -> tuple[n.Comment, ...]:
    """Every comment of the text, in order."""
    found = []
    for number, line in enumerate(source.lines, 1):
        for match in COMMENT.finditer(line):
            if match[1]:
                span = Span(source, number, match.start(1) + 1, number, match.end(1) + 1)
                found.append(n.Comment(match[1].rstrip(), span))
    return tuple(found)


@uncollected()
def _tree(source: Source, start: str) -> tuple[Any, list[Diagnostic]]:
    maker = TreeMaker(source)
    try:
        return maker.transform(parser().parse(source.text, start=start)), maker.problems
    except UnexpectedInput as mistake:
        raise Refusal(explain(source, mistake)) from None
    except TooDeep as deep:
        label = Label(span_of(source, deep.token), f"{deep.nested} may be nested {DEEPEST} deep")
        raise Refusal(Diagnostic("S004", "this is nested too deep", label)) from None


def tree(source: Source) -> tuple[n.File, list[Diagnostic]]:
    """The tree of a text that the grammar accepts, and what is wrong with its form."""
    file, problems = _tree(source, "start")
    made = n.File(file.header, file.items, comments(source), span=file.span)
    return made, [*problems, *form_problems(made)]


def parse(source: Source) -> n.File:
    """The tree of a schedule; refuses what is not one (S001 to S007)."""
    file, problems = tree(source)
    if problems:
        raise Refusal(*problems)
    return file


def parse_path(text: str, span: Span) -> n.Path:
    """A selector given as a string; its mistakes are shown inside the string."""
    return _fragment(text, span, "path", n.Path)  # type: ignore[no-any-return]


def parse_expr(text: str, span: Span) -> n.Expr:
    """An expression given as a string; its mistakes are shown inside the string."""
    made = _fragment(text, span, "expr", n.Node)
    return made  # type: ignore[no-any-return]


def _fragment(text: str, span: Span, start: str, kind: type) -> Any:
    """Parse `text`, then let every node stand at `span`, the line that gave the string."""
    source = Source("<string>", text)
    try:
        made, problems = _tree(source, start)
    except Refusal as refused:
        inner = refused.diagnostic
        also = (Label(span, "given here"),) if span else ()
        raise Refusal(
            Diagnostic(inner.code, inner.title, inner.primary, also, inner.notes, inner.helps)
        ) from None
    if problems:
        raise Refusal(*problems)
    assert isinstance(made, kind)
    return n.placed(made, span)


def read(path: str | FilePath, name: str | None = None) -> Source:
    """A schedule file as a Source; refuses what is not a readable UTF-8 text."""
    shown = name or str(path)
    try:
        raw = bytes_of(path, LARGEST)
    except OSError as error:
        why = error.strerror or str(error)
        why = why[:1].lower() + why[1:]
        there = {each.name for each in FilePath(path).parent.glob("*.sched")}
        others = there - {FilePath(path).name}
        near, facts = closest(FilePath(path).name, others), unknown(FilePath(path).name, others)
        helps = (
            (f"did you mean `{near}`?",) if near else ("give the path of a schedule: `x.sched`",)
        )
        title = f"cannot read `{shown}`: {why}"
        raise Refusal(Diagnostic("S000", title, helps=helps, facts=facts)) from None
    try:
        return Source(shown, raw.decode("utf-8-sig").replace("\r\n", "\n"))
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        title = f"`{shown}` is not UTF-8 text"
        note = f"byte {error.start + 1}, on line {line}, is 0x{raw[error.start]:02x}"
        helps = ("save it as UTF-8",)
        raise Refusal(Diagnostic("S000", title, notes=(note,), helps=helps)) from None
