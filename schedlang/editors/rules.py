"""The words and colours of the language: an ordered table of patterns and kinds, for highlighters.

A highlighter takes the first pattern that matches at a position. Words are read from the grammar
and the registered verbs; patterns are those of the grammar's terminals; look-behinds have a fixed
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
def word_terminals() -> dict[str, str]:
    """Return the text of every terminal that is a word: STEP is `step`."""
    terminals = ((terminal.name, terminal.pattern.value) for terminal in parser().terminals)
    return {name: text for name, text in terminals if text.isalpha() and text.islower()}


def declarations() -> tuple[str, ...]:
    """Return the words that begin or join declarations and statements: step, at, where."""
    return tuple(sorted(set(word_terminals().values()) - LOGIC - VALUES))


def verbs() -> tuple[str, ...]:
    """Return the names of all primitives."""
    load_all()
    return tuple(sorted(registry()))


def terminal_pattern(terminal: str) -> str:
    """Return the pattern of a terminal of the grammar: QUANTITY, GLOB, QUOTED."""
    return parser().get_terminal(terminal).pattern.to_regexp()


NAME = r"[A-Za-z_][A-Za-z0-9_]*"


def _words_pattern(names: Iterable[str]) -> str:
    """Return a pattern for whole words that no dot joins to others."""
    return rf"(?<![\w.])(?:{'|'.join(sorted(names))})\b(?![.:])"


@lru_cache
def rules() -> tuple[tuple[str, str], ...]:
    """Return (pattern, kind) pairs in the order in which they are tried."""
    return (
        (terminal_pattern("COMMENT"), "comment"),
        (terminal_pattern("STRING"), "string"),
        (terminal_pattern("QUOTED"), "module"),
        (terminal_pattern("GLOB"), "module"),
        (terminal_pattern("QUANTITY"), "quantity"),
        (rf"\b(?:{terminal_pattern('FLOAT')})", "number"),
        (r"\b\d+\b", "number"),
        (rf"(?<=: )(?:{'|'.join(TYPES)})\b", "type"),
        (rf"{NAME}(?=\s*=(?!=))", "argument"),
        (rf"(?<=[\w*}}\]?`]):{NAME}", "class"),
        (_words_pattern(LOGIC), "operator word"),
        (_words_pattern(VALUES), "constant"),
        (_words_pattern(declarations()), "keyword"),
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
    """Return the TextMate grammar as plain values."""
    return {
        "name": "schedlang",
        "scopeName": "source.sched",
        "fileTypes": ["sched"],
        "patterns": [
            {"match": pattern, "name": f"{SCOPES[kind]}.sched"} for pattern, kind in rules()
        ],
    }


def textmate_json() -> str:
    """Return the TextMate grammar as the text of its file."""
    return json.dumps(textmate(), indent=2) + "\n"


if __name__ == "__main__":
    print(textmate_json(), end="")
