"""A lexer for Pygments, so that pages, terminals and notebooks show schedules in colour."""

from __future__ import annotations

from typing import Any

from pygments.lexer import RegexLexer
from pygments.token import (
    Comment,
    Keyword,
    Literal,
    Name,
    Number,
    Operator,
    Punctuation,
    String,
    Whitespace,
)

from schedlang.editors.rules import rules

TOKENS: dict[str, Any] = {
    "comment": Comment.Single,
    "string": String.Double,
    "module": Name.Namespace,
    "quantity": Literal,
    "number": Number,
    "argument": Name.Attribute,
    "class": Name.Class,
    "operator word": Operator.Word,
    "constant": Keyword.Constant,
    "keyword": Keyword.Declaration,
    "type": Keyword.Type,
    "verb": Name.Function,
    "name": Name,
    "operator": Operator,
    "punctuation": Punctuation,
}


class SchedLexer(RegexLexer):  # type: ignore[misc]
    """Schedules: `.sched` files of schedlang."""

    name = "schedlang"
    aliases = ["sched", "schedlang"]
    filenames = ["*.sched"]
    mimetypes = ["text/x-sched"]
    tokens = {"root": [(r"\s+", Whitespace), *((p, TOKENS[kind]) for p, kind in rules())]}
