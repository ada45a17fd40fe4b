"""The words of the language by kind, read from its grammar and its registered verbs."""

from __future__ import annotations

from functools import lru_cache

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
