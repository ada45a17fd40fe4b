"""The colours of the language: an ordered table of patterns and kinds, for every highlighter.

A highlighter takes the first pattern that matches where it stands.  The patterns are those of the
grammar's terminals; look-behinds have one length, as all engines of regular expressions allow.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from schedlang.editors import words

NAME = r"[A-Za-z_][A-Za-z0-9_]*"


def _one_of(names: Iterable[str]) -> str:
    """Any of some words, where it is a whole word that no dot joins to others."""
    return rf"(?<![\w.])(?:{'|'.join(sorted(names))})\b(?![.:])"


@lru_cache
def rules() -> tuple[tuple[str, str], ...]:
    """(pattern, kind) in the order in which they are tried."""
    return (
        (words.regex("COMMENT"), "comment"),
        (words.regex("STRING"), "string"),
        (words.regex("QUOTED"), "module"),
        (words.regex("GLOB"), "module"),
        (words.regex("QUANTITY"), "quantity"),
        (rf"\b(?:{words.regex('FLOAT')})", "number"),
        (r"\b\d+\b", "number"),
        (rf"(?<=: )(?:{'|'.join(words.TYPES)})\b", "type"),
        (rf"{NAME}(?=\s*=(?!=))", "argument"),
        (rf"(?<=[\w*}}\]?`]):{NAME}", "class"),
        (_one_of(words.LOGIC), "operator word"),
        (_one_of(words.VALUES), "constant"),
        (_one_of(words.declarations()), "keyword"),
        (rf"(?<![\w.])(?:{'|'.join(words.PLACEMENTS)})\b(?!\.)", "constant"),
        (rf"{NAME}(?=\()", "verb"),
        (NAME, "name"),
        (r"\.\.|==|!=|<=|>=|//|[-+*/%@<>=?]", "operator"),
        (r"[(){}\[\],.:]", "punctuation"),
    )
