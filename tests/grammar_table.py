"""The parser's table, made by lark from the grammar: `python -m tests.grammar_table` writes it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from lark import Lark, Token
from lark.parse_tree_builder import maybe_create_child_filter
from lark.parsers.lalr_analysis import Shift

ROOT = Path(__file__).parent.parent
GRAMMAR = ROOT / "schedlang" / "sched.lark"
TABLE = ROOT / "schedlang" / "sched.table.json"
STARTS = ("start", "path", "expr")


class Newlines:
    """A newline ends a statement, except inside parentheses and square brackets."""

    always_accept = ("_NL",)

    def process(self, stream: Iterable[Token]) -> Iterable[Token]:
        """The tokens without the newlines that end nothing."""
        depth, last = 0, ""
        for token in stream:
            depth += (token.type in ("LPAR", "LSQB")) - (token.type in ("RPAR", "RSQB"))
            if token.type == "_NL" and (depth > 0 or last == "_NL"):
                continue
            last = token.type
            yield token


@cache
def grammar() -> Lark:
    """The grammar as lark reads it; it refuses every conflict."""
    return Lark(
        GRAMMAR.read_text(encoding="utf-8"),
        parser="lalr",
        lexer="contextual",
        start=list(STARTS),
        postlex=Newlines(),
        propagate_positions=True,
        maybe_placeholders=True,
        strict=True,
    )


def table() -> dict[str, Any]:
    """All that reading a text needs: terminals, lexers by state, rules, actions by state."""
    lark = grammar()
    parser: Any = lark.parser
    found = parser.parser._parse_table
    contextual = parser.lexer.lexer
    numbers = _numbered(found)
    lexers: list[Any] = []
    rules: list[Any] = []
    states = []
    for state in numbers:
        does = {}
        for symbol, (action, target) in sorted(found.states[state].items()):
            if action is Shift:
                does[symbol] = numbers[target]
            else:
                does[symbol] = -1 - _place(rules, _rule(target))
        states.append({"lexer": _place(lexers, _lexer(contextual.lexers[state])), "does": does})
    starts = {
        name: [numbers[found.start_states[name]], numbers[found.end_states[name]]]
        for name in STARTS
    }
    return {
        "terminals": {one.name: _pattern(one) for one in sorted(lark.terminals, key=str)},
        "ignored": sorted(lark.ignore_tokens),
        "starts": starts,
        "any": _lexer(contextual.root_lexer),
        "lexers": lexers,
        "rules": rules,
        "states": states,
    }


def _numbered(found: Any) -> dict[int, int]:
    """Lark's states in an order that does not change from run to run: as they are reached."""
    numbers: dict[int, int] = {}
    waiting = [found.start_states[name] for name in STARTS]
    for state in waiting:
        if state not in numbers:
            numbers[state] = len(numbers)
            does = sorted(found.states[state].items())
            waiting += [target for _, (action, target) in does if action is Shift]
    return numbers


def _place(known: list[Any], one: Any) -> int:
    """Where `one` stands among those that are known, and now it is."""
    if one not in known:
        known.append(one)
    return known.index(one)


def _pattern(terminal: Any) -> dict[str, str]:
    """What a terminal matches, and its text where it has only one."""
    text = {"text": terminal.pattern.value} if terminal.pattern.type == "str" else {}
    return {"regex": terminal.pattern.to_regexp(), **text}


def _lexer(lexer: Any) -> dict[str, Any]:
    """The terminals that are tried at a place, in order, and the words among what one matches."""
    tries = [one.name for one in lexer.scanner.terminals]  # asking for the scanner makes it
    words = {
        name: {word.pattern.value: word.name for word in callback.scanner.terminals}
        for name, callback in sorted(lexer.callback.items())
    }
    return {"tries": tries, "words": words}


def _rule(rule: Any) -> dict[str, Any]:
    """What a rule makes of its parts: those kept, nones between them, what it is called."""
    options = rule.options
    kept = maybe_create_child_filter(
        rule.expansion, options.keep_all_tokens, False, options.empty_indices
    )
    made: dict[str, Any] = {"of": rule.origin.name, "size": len(rule.expansion)}
    made["name"] = rule.alias or rule.origin.name
    if options.expand1 and not rule.alias:
        made["alone"] = True  # one part stands for itself
    if kept is not None:
        include, *nones = kept.args
        made["kept"] = [[one[0], bool(one[1]), one[2] if nones else 0] for one in include]
        made["nones"] = nones[0] if nones else 0
    return made


def text() -> str:
    """The table as it is kept: one line for each lexer, rule and state, so that changes show."""
    parts = []
    for name, value in table().items():
        if isinstance(value, list):
            rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in value)
            parts.append(f'"{name}": [\n{rows}\n]')
        else:
            parts.append(f'"{name}": {json.dumps(value)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    TABLE.write_text(text(), encoding="utf-8")
