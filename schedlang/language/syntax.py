"""Parser entry points: text to syntax tree, with diagnostics for text that cannot be parsed.

Knows no primitive. `read` and `parse` are the first doors of every run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

from lark import Token
from lark.exceptions import UnexpectedInput, UnexpectedToken

from schedlang.diagnostics.diagnostic import (
    Diagnostic,
    Label,
    Refusal,
    facts_of_unknown,
    find_closest,
)
from schedlang.diagnostics.other_systems import VERBS
from schedlang.diagnostics.source import Source, Span, read_bytes
from schedlang.garbage_collection import without_collector
from schedlang.language import grammar
from schedlang.language import nodes as n
from schedlang.language.grammar import (
    CLOSES,
    MAX_DEPTH,
    OPENS,
    TooDeep,
    TreeMaker,
    edition_mismatch,
    parser,
    span_of,
)

MAX_BYTES = 2**20  # bytes of a schedule, some 20,000 rows
COMMENT = re.compile(r'"[^"\n]*"|`[^`\n]+`|(#[^\n]*)')


def comments(source: Source) -> tuple[n.Comment, ...]:
    """Return every comment of the text, in order."""
    result = []
    for number, line in enumerate(source.lines, 1):
        for match in COMMENT.finditer(line):
            if match[1]:
                span = Span(source, number, match.start(1) + 1, number, match.end(1) + 1)
                result.append(n.Comment(match[1].rstrip(), span))
    return tuple(result)


@without_collector()
def _parse_tree(source: Source, start: str) -> tuple[Any, list[Diagnostic]]:
    maker = TreeMaker(source)
    try:
        return maker.transform(parser().parse(source.text, start=start)), maker.problems
    except UnexpectedInput as mistake:
        raise Refusal(explain_error(source, mistake)) from None
    except TooDeep as deep:
        label = Label(span_of(source, deep.token), f"{deep.nested} may be nested {MAX_DEPTH} deep")
        raise Refusal.of("S004", "this is nested too deep", label) from None


def parse_with_problems(source: Source) -> tuple[n.File, list[Diagnostic]]:
    """Parse a text; return its tree and the problems of form that the grammar does not exclude.

    The problems: S004 (a call on a glob or a type), S006 (the version), S007 (a reserved word
    bound).
    """
    file, problems = _parse_tree(source, "start")
    if file.header.version != str(grammar.EDITION):
        problems.append(edition_mismatch(file.header.version, file.header.span))
    for node in n.walk(file):
        bound: Iterable[str] = ()  # the names that the node binds
        if isinstance(node, n.Do):
            problems += _missing_primitive(node)
        elif isinstance(node, BINDING_NODES):
            bound = (node.name,)
        elif isinstance(node, n.Use) and node.alias:
            bound = (node.alias,)
        elif isinstance(node, n.Mesh):
            bound = (arg.name for arg in node.args if isinstance(arg, n.Keyword))
        problems += [_reserved_name(name, node.span) for name in bound if name in RESERVED]
    if "#" in source.text:
        file = n.File(file.header, file.items, comments(source), span=file.span)
    return file, problems


def parse(source: Source) -> n.File:
    """Parse a schedule; refuses S001 to S007."""
    file, problems = parse_with_problems(source)
    if problems:
        raise Refusal(*problems)
    return file


def parse_path(text: str, span: Span) -> n.Path:
    """Parse a selector given as a string; mistakes are shown inside the string."""
    return _parse_fragment(text, span, "path", n.Path)  # type: ignore[no-any-return]


def parse_expr(text: str, span: Span) -> n.Expr:
    """Parse an expression given as a string; mistakes are shown inside the string."""
    node = _parse_fragment(text, span, "expr", n.Node)
    return node  # type: ignore[no-any-return]


def _parse_fragment(text: str, span: Span, start: str, kind: type) -> Any:
    """Parse `text`, then set all spans to `span`, the line that gave the string."""
    source = Source("<string>", text)
    try:
        node, problems = _parse_tree(source, start)
    except Refusal as refused:
        inner = refused.diagnostic
        also = (Label(span, "given here"),) if span else ()
        raise Refusal.of(
            inner.code, inner.title, inner.primary, also, inner.notes, inner.helps
        ) from None
    if problems:
        raise Refusal(*problems)
    assert isinstance(node, kind)
    return n.with_spans(node, span)


def source_of(schedule: str | os.PathLike[str]) -> Source:
    """Return the source of a schedule argument: a text of several lines, or the path of a file."""
    text = str(schedule)
    return Source("schedule", text) if "\n" in text else read(text)


def read(path: str | FilePath, name: str | None = None) -> Source:
    """Read a schedule file; refuses S000 a file that is not readable UTF-8 text."""
    shown = name or str(path)
    try:
        raw = read_bytes(path, MAX_BYTES)
    except OSError as error:
        reason = error.strerror or str(error)
        reason = reason[:1].lower() + reason[1:]
        names: set[str] = set()
        with suppress(OSError):  # the folder may be unreadable, too
            names = {file.name for file in FilePath(path).parent.glob("*.sched")}
        others = names - {FilePath(path).name}
        hint = find_closest(FilePath(path).name, others)
        facts = facts_of_unknown(FilePath(path).name, others)
        helps = (
            (f"did you mean `{hint}`?",) if hint else ("give the path of a schedule: `x.sched`",)
        )
        title = f"cannot read `{shown}`: {reason}"
        raise Refusal.of("S000", title, helps=helps, facts=facts) from None
    try:
        return Source(shown, raw.decode("utf-8-sig").replace("\r\n", "\n"))
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        title = f"`{shown}` is not UTF-8 text"
        note = f"byte {error.start + 1}, on line {line}, is 0x{raw[error.start]:02x}"
        helps = ("save it as UTF-8",)
        raise Refusal.of("S000", title, notes=(note,), helps=helps) from None


DECLARATIONS = (
    *(
        "use",
        "mesh",
        "view",
        "knob",
        "require",
        "search",
        "pattern",
        "def",
        "step",
        "override",
        "drop",
    ),
)
STATEMENTS = ("at", "when", "expect")
KEYWORDS = frozenset(DECLARATIONS + STATEMENTS) | {
    *("schedule", "for", "as", "on", "of", "in", "relax", "where", "except", "else"),
    *("or", "and", "not", "true", "false"),
}
BINDING_NODES = (n.Knob, n.View, n.Param, n.Pattern, n.Def)  # nodes that bind their name
RESERVED = KEYWORDS | {"model", "_"}
PYTHON_HELPS = (
    "this is Python; a schedule is another file: `schedlang init model.py --mesh tp=2` writes one",
    "check a program of your own: `schedlang verify original.py --against program.py`",
)
CLOSING = {"(": ")", "[": "]", "{": "}"}
TOKEN_NAMES = {
    "LPAR": "`(`",
    "RPAR": "`)`",
    "LBRACE": "`{`",
    "RBRACE": "`}`",
    "LSQB": "`[`",
    "RSQB": "`]`",
    "EQUAL": "`=`",
    "DOT": "`.`",
    "COLON": "`:`",
    "COMMA": "`,`",
    "STRING": "a string in double quotes",
    "INT": "a number",
    "NAME": "a name",
    "_NL": "the end of the line",
    "$END": "the end of the file",
    "SCHEDULE": "`schedule 1`",
    "PIN": "`pin`",
    "FORBID": "`forbid`",
    "LEAST": "`at least`",
}


def explain_error(source: Source, mistake: UnexpectedInput) -> Diagnostic:
    """Return the diagnostic for text that could not be parsed."""
    if not isinstance(mistake, UnexpectedToken):
        return _explain_character(source, mistake.line, mistake.column)
    return _explain_unclosed(source, mistake) or _explain_unexpected(
        source, mistake.token, mistake.accepts
    )


def _explain_character(source: Source, line: int, col: int) -> Diagnostic:
    char = source.line(line)[col - 1 : col] or "\\r"
    span = Span(source, line, col, line, col + 1)
    rest = source.line(line)[col - 1 :]
    if char == '"':
        closing = Span(source, line, col, line, col + len(rest))
        return Diagnostic("S001", "this string is never closed", Label(closing, 'no `"` follows'))
    helps: tuple[str, ...] = ()
    if char in "'“”„‘’":
        helps = ('write strings in double quotes: `"..."`',)
    elif char == ";":
        helps = ("write one statement per line, without `;`",)
    elif char == "%":
        helps = ("write a percentage as a number: 0.4",)
    elif char.isalpha():
        helps = ("names have letters a to z, digits and `_`; in backquotes any: `` `größe` ``",)
    elif not char.isprintable() or char.isspace():
        helps = ("delete it: spaces and line ends are the only characters that are not seen",)
    shown = char if char.isprintable() else f"U+{ord(char[0]):04X}"
    return Diagnostic("S001", f"unexpected character `{shown}`", Label(span), helps=helps)


def _explain_unclosed(source: Source, mistake: UnexpectedToken) -> Diagnostic | None:
    """Return the diagnostic for the bracket still open where the parser stopped, if it is to
    blame."""
    token, ended = mistake.token, mistake.token.type == "$END"
    opened: list[Token] = []
    for value in mistake.interactive_parser.parser_state.value_stack:
        if isinstance(value, Token) and value.type in OPENS:
            opened.append(value)
        elif isinstance(value, Token) and value.type in CLOSES:
            opened.pop()
    if not opened:
        return None
    char, bracket, stop = str(opened[-1]), span_of(source, opened[-1]), span_of(source, token)
    close = CLOSING[char]
    close_accepted = {"(": "RPAR", "[": "RSQB"}.get(char) in mistake.accepts
    # a declaration at the margin was not meant to stand in the block before it
    first = re.match(r"[a-z]+", source.line(stop.line))
    opens_block = char == "{" and first is not None and first[0] in DECLARATIONS
    if not ended and not opens_block and not (close_accepted and stop.line > bracket.line):
        return None
    opening = Label(bracket, "opened here")
    if ended:
        last = len(source.text.rstrip("\n").split("\n"))
        end = len(source.line(last)) + 1
        label = Label(
            Span(source, last, end, last, end + 1), f"end of the file; expected `{close}`"
        )
    elif opens_block and first is not None:
        span = Span(source, stop.line, 1, stop.line, len(first[0]) + 1)
        label = Label(span, f"expected `{close}` before this")
    else:
        match = re.match(r"[\w*{}]+", source.line(stop.line)[stop.col - 1 :])
        width = min(3, len(match[0])) if match else 1
        span = replace(stop, end_line=stop.line, end_col=stop.col + width)
        label = Label(span, f"expected `{close}` or `,` before this")
    row = source.line(bracket.line).partition("#")[0].strip()
    closed = "close it with `}` on its own line" if char == "{" else f"close it: `{row}{close}`"
    return Diagnostic("S002", f"this `{char}` is never closed", opening, (label,), helps=(closed,))


def _explain_unexpected(source: Source, token: Token, accepts: set[str]) -> Diagnostic:
    stop, shown = _stop_place(source, token)
    before = source.line(stop.line)[: stop.col - 1]
    misspelt = _suggest_keyword(before or str(token))
    if token.type in ("_NL", "$END") and {"LPAR", "DOT", "COLON"} <= accepts and before.strip():
        row = before.strip().split()[-1]
        help_ = misspelt or f"add a primitive: `{row}  checkpoint()`"
        title = f"expected `(`, `.` or `:`, found {shown}"
        return Diagnostic("S003", title, Label(stop, "the primitive is missing"), helps=(help_,))
    expected = [TOKEN_NAMES[name] for name in TOKEN_NAMES if name in accepts]
    if "AT" in accepts:
        expected = ["a declaration", "a step"] if "KNOB" in accepts else ["a row", "`}`"]
    elif "QUANTITY" in accepts:
        expected = ["a value"]
    elif "SCHEDULE" in accepts:
        expected = ["`schedule 1`"]
    expectation = " or ".join(expected[:3]) or "something else"
    helps = [misspelt] if misspelt else []
    first = (before.split() or [""])[0]
    if first in DECLARATIONS and "KNOB" not in accepts and before[:1].isspace():
        helps = [f"`{first}` must stand outside of steps and blocks"]
    if "SCHEDULE" in accepts:
        helps = ["a schedule begins with its version and its model: `schedule 1 for Class`"]
        helps = list(PYTHON_HELPS) if source.name.endswith(".py") else helps
    elif str(token) in KEYWORDS and "NAME" in accepts:
        helps = [f"`{token}` is a keyword; in a selector write it in backquotes"]
    suggestions = (
        tuple(helps)
        or _suggest_punctuation(source.line(stop.line), stop)
        or _suggest_row_form(source.line(stop.line))
    )
    return Diagnostic(
        "S003", f"expected {expectation}, found {shown}", Label(stop), helps=suggestions
    )


def _suggest_punctuation(line: str, stop: Span) -> tuple[str, ...]:
    """Return the help for a value without quotes, a call without brackets, or a misspelt unit."""
    from schedlang.language.value import UNITS  # `value` imports this module

    before, rest = line[: stop.col - 1], line[stop.col - 1 :]
    if number := _end_of(before, r"\d*"):
        word = (re.match(r"[\w.+-]*", rest) or [""])[0]
        if unit := next((u for u in UNITS if u.lower() == word.lower()), ""):  # `70Gib`
            return (f"write `{number}{unit}`",)
        stem = before.removesuffix(number)
        name = _end_of(stem[:-1], r"\w*") if stem.endswith("=") else ""  # `order=1F1B`
        return (f'write `{name}="{number}{word}"`',) if name and word else ()
    row = re.match(r"\s*(\S+[ \t]+[a-z_]+)\s*(?:#|$)", line)
    on_several = row is not None and re.search("[.*]", row[1]) is not None
    ends = not rest.partition("#")[0].strip()
    return (f"write `{row[1]}()`",) if row is not None and on_several and ends else ()


def _end_of(text: str, repeated: str) -> str:
    """Return the longest end of a text that matches; a search from its start is quadratic."""
    match = re.match(repeated, text[::-1])
    return text[len(text) - match.end() :] if match else ""


def _suggest_row_form(line: str) -> tuple[str, ...]:
    """Return the helps for a row in words, such as `zero model stage 2 over dp`."""
    match = re.match(r"\s*([a-z_]\w*)[ \t]+[^\s(]+(?:\s|$)", line)
    if not match or match[1] in KEYWORDS:
        return ()
    hint = "a row is a selector and a primitive: `layers.*  shard(col, over=tp)`"
    return (*VERBS.get(match[1], ()), hint)


def _suggest_keyword(line: str) -> str | None:
    """Return the help for a line whose first word is almost a keyword that begins a declaration."""
    first = re.match(r"\s*([A-Za-z]+)", line)
    if not first or first[1] in KEYWORDS:
        return None
    closest = find_closest(first[1], DECLARATIONS + STATEMENTS)
    return f"did you mean `{closest}`?" if closest else None


def _stop_place(source: Source, token: Token) -> tuple[Span, str]:
    """Return the span where the parser stopped, and the text there in words."""
    if token.type == "$END":
        last = len(source.text.rstrip("\n").split("\n"))
        end = len(source.line(last)) + 1
        return Span(source, last, end, last, end + 1), "the end of the file"
    if token.type == "_NL":
        span = span_of(source, token)
        return replace(span, end_line=span.line, end_col=span.col + 1), "the end of the line"
    return span_of(source, token), f"`{token}`"


# ---- what the grammar accepts and the language does not ----------------------------------


def _reserved_name(name: str, span: Span) -> Diagnostic:
    label = Label(span, f"declares `{name}`")
    return Diagnostic("S007", f"`{name}` is a keyword of the language", label, helps=("rename it",))


def _missing_primitive(do: n.Do) -> Iterator[Diagnostic]:
    path = do.path
    if path.type is not None:
        left = ".".join(seg.text for seg in path.segs)
        label = Label(path.span, "`:` selects modules by their class")
        title = "a selector and its primitive are separated by a space"
        help_ = f"write `{left}  {path.type}(...)`"
        yield Diagnostic("S004", title, label, helps=(help_,))
    elif path.optional or any(seg.index or not seg.text.isidentifier() for seg in path.segs):
        label = Label(path.span, "this is a selector without a primitive")
        title = "the primitive is missing"
        yield Diagnostic("S004", title, label, helps=("write `selector  primitive(...)`",))
