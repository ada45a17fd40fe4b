"""The parser of the language, which lark makes of its grammar."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from lark import Lark, Token
from lark.lark import PostLex
from lark.tree import Meta

import schedlang
from schedlang.diagnostics.source import Source, Span

STARTS = ("start", "path", "expr")
DEEPEST = 48  # brackets and signs inside one another; nothing a person writes comes near
LONGEST = 18  # digits of a whole number: what fits a machine word
OPENS = {"LPAR": "(", "LSQB": "[", "LBRACE": "{"}
CLOSES = ("RPAR", "RSQB", "RBRACE")
SIGNS = ("PLUS", "NOT")  # the terminal of + and - is one


class TooDeep(Exception):
    """A text nested deeper than those who walk its tree could follow: where, and in what."""

    def __init__(self, token: Token, nested: str) -> None:
        super().__init__(token, nested)
        self.token: Token = token
        self.nested: str = nested


class Statements(PostLex):
    """Between lexer and parser: a newline ends a statement, except inside ( ) and [ ], and nothing
    stands too deep."""

    always_accept = ("_NL",)

    def process(self, stream: Iterator[Token]) -> Iterator[Token]:
        """The tokens without the newlines that end nothing."""
        opened: list[tuple[str, int]] = []  # brackets, each with the signs before it
        run: list[Token] = []  # signs, one before the other
        depth, last = 0, ""
        for token in stream:
            kind = token.type
            if kind == "_NL":
                if last == "_NL" or (opened and opened[-1][0] != "LBRACE"):
                    continue
                run = []
            elif kind in SIGNS:
                run.append(token)
            elif kind in OPENS:
                opened.append((kind, len(run)))
                depth, run = depth + 1 + len(run), []
            else:
                run = []
                if kind in CLOSES and opened:
                    depth -= 1 + opened.pop()[1]
            if depth + len(run) > DEEPEST:
                raise _too_deep(token, run, len(opened))
            last = kind
            yield token


def _too_deep(token: Token, run: list[Token], brackets: int) -> TooDeep:
    if len(run) > DEEPEST:
        return TooDeep(run[0], "signs")
    return TooDeep(token, "brackets" if brackets > DEEPEST else "brackets and signs")


def span_of(source: Source, piece: Token | Meta) -> Span:
    """The place of a token or of a rule's text."""
    lines = piece.line, piece.column, piece.end_line, piece.end_column
    return Span(source, *lines)  # type: ignore[arg-type]  # what was parsed has a place


@cache
def parser(strict: bool = False) -> Lark:
    """The parser; a strict one is made only of a grammar in which nothing is ambiguous."""
    return Lark.open(
        "sched.lark",
        rel_to=schedlang.__file__,
        parser="lalr",
        start=list(STARTS),
        strict=strict,
        postlex=Statements(),
        propagate_positions=True,
    )
