"""The words and colours of the language: an ordered table of patterns and kinds, for highlighters.

A highlighter takes the first pattern that matches where it stands.  Words are read from the grammar
and the registered verbs; patterns are those of the grammar's terminals; look-behinds have one
length, as all engines of regular expressions allow.

`python -m schedlang.editors.rules` writes the grammar by which TextMate, VS Code, Sublime and
others colour schedules, as JSON, to standard output.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from schedlang.ir.primitive import load_all, registry
from schedlang.language.grammar import parser

LOGIC = frozenset({"and", "or", "not", "in"})
VALUES = frozenset({"true", "false"})
PLACEMENTS = ("S", "R", "P")
TYPES = ("int", "float", "bool", "choice", "axis")


@lru_cache
def spelled() -> dict[str, str]:
    """The text of every terminal that is a word: STEP is `step`."""
    found = ((one.name, one.pattern.value) for one in parser().terminals)
    return {name: text for name, text in found if text.isalpha() and text.islower()}


def declarations() -> tuple[str, ...]:
    """The words that begin or join declarations and statements: step, at, where."""
    return tuple(sorted(set(spelled().values()) - LOGIC - VALUES))


def verbs() -> tuple[str, ...]:
    """The names of all primitives."""
    load_all()
    return tuple(sorted(registry()))


def regex(terminal: str) -> str:
    """The pattern of a terminal of the grammar: QUANTITY, GLOB, QUOTED."""
    return parser().get_terminal(terminal).pattern.to_regexp()


NAME = r"[A-Za-z_][A-Za-z0-9_]*"


def _one_of(names: Iterable[str]) -> str:
    """Any of some words, where it is a whole word that no dot joins to others."""
    return rf"(?<![\w.])(?:{'|'.join(sorted(names))})\b(?![.:])"


@lru_cache
def rules() -> tuple[tuple[str, str], ...]:
    """(pattern, kind) in the order in which they are tried."""
    return (
        (regex("COMMENT"), "comment"),
        (regex("STRING"), "string"),
        (regex("QUOTED"), "module"),
        (regex("GLOB"), "module"),
        (regex("QUANTITY"), "quantity"),
        (rf"\b(?:{regex('FLOAT')})", "number"),
        (r"\b\d+\b", "number"),
        (rf"(?<=: )(?:{'|'.join(TYPES)})\b", "type"),
        (rf"{NAME}(?=\s*=(?!=))", "argument"),
        (rf"(?<=[\w*}}\]?`]):{NAME}", "class"),
        (_one_of(LOGIC), "operator word"),
        (_one_of(VALUES), "constant"),
        (_one_of(declarations()), "keyword"),
        (rf"(?<![\w.])(?:{'|'.join(PLACEMENTS)})\b(?!\.)", "constant"),
        (rf"{NAME}(?=\()", "verb"),
        (NAME, "name"),
        (r"\.\.|==|!=|<=|>=|//|[-+*/%@<>=?]", "operator"),
        (r"[(){}\[\],.:]", "punctuation"),
    )


SCOPES = {
    "comment": "comment.line.number-sign",
    "string": "string.quoted.double",
    "module": "entity.name.namespace",
    "quantity": "constant.numeric",
    "number": "constant.numeric",
    "argument": "variable.parameter",
    "class": "entity.name.type.class",
    "operator word": "keyword.operator.logical",
    "constant": "constant.language",
    "keyword": "keyword.control",
    "type": "storage.type",
    "verb": "entity.name.function",
    "name": "variable.other",
    "operator": "keyword.operator",
    "punctuation": "punctuation",
}


def textmate() -> dict[str, Any]:
    """The grammar as plain values."""
    return {
        "name": "schedlang",
        "scopeName": "source.sched",
        "fileTypes": ["sched"],
        "patterns": [
            {"match": pattern, "name": f"{SCOPES[kind]}.sched"} for pattern, kind in rules()
        ],
    }


def text() -> str:
    """The grammar as the text of its file."""
    return json.dumps(textmate(), indent=2) + "\n"


if __name__ == "__main__":
    print(text(), end="")
