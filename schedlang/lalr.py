"""Reading a text with the table that lark made from the grammar; lark itself is not needed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

TABLE = Path(__file__).with_name("sched.table.json")
END = "$END"
NEWLINE = "_NL"
OPENS, CLOSES = ("LPAR", "LSQB"), ("RPAR", "RSQB")


class Token(NamedTuple):
    """A word of the text and its place: lines and columns from 1, the end column exclusive."""

    type: str
    text: str
    line: int
    col: int
    end_line: int
    end_col: int

    def __str__(self) -> str:
        return self.text


Place = tuple[Token, Token]  # the first and the last token of a piece of text


class Unread(Exception):
    """Reading stopped: at a token that may not stand there, or before what is no token (None)."""

    def __init__(self, line: int, col: int, token: Token | None, accepts: frozenset[str]) -> None:
        super().__init__(line, col, token)
        self.line: int = line
        self.col: int = col
        self.token: Token | None = token
        self.accepts: frozenset[str] = accepts


class Rule(NamedTuple):
    """What a rule makes of its parts.  Of `kept`: which, whether its items stand here in its
    place, how many nones before it; None keeps all.  `alone`: one part stands for itself."""

    of: str
    size: int
    name: str
    alone: bool = False
    kept: Sequence[tuple[int, bool, int]] | None = None
    nones: int = 0

    def children(self, parts: Sequence[Any]) -> list[Any]:
        """The parts that are kept, and nones for those that could stand there and do not."""
        if self.kept is None:
            return [part[0] for part in parts]
        made: list[Any] = []
        for index, spread, nones in self.kept:
            if nones:
                made += [None] * nones
            if not spread:
                made.append(parts[index][0])
            elif made:
                made += parts[index][0]
            else:
                made = parts[index][0]  # a long list grows in place
        if self.nones:
            made += [None] * self.nones
        return made


Try = tuple[str, Callable[[str, int], "re.Match[str] | None"], Mapping[str, str]]


class Table:
    """The generated table: what can be read in each state, and what is done then.

    An action is the state to go to, or -1 - n for rule n.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.regexes: dict[str, str] = {n: t["regex"] for n, t in data["terminals"].items()}
        self.texts: dict[str, str] = {
            name: one["text"] for name, one in data["terminals"].items() if "text" in one
        }
        self.does: list[dict[str, int]] = [state["does"] for state in data["states"]]
        self.rules: list[Rule] = [Rule(**rule) for rule in data["rules"]]
        self.starts: dict[str, tuple[int, int]] = data["starts"]
        self._ignored, self._lexers = data["ignored"], [*data["lexers"], data["any"]]
        self._of = [state["lexer"] for state in data["states"]]
        self._made: dict[int, list[Try]] = {}

    def tries(self, state: int) -> list[Try]:
        """The terminals that may stand in a state, in the order in which they are tried."""
        return self._tries(self._of[state])

    def anything(self) -> list[Try]:
        """All terminals."""
        return self._tries(len(self._lexers) - 1)

    def _tries(self, number: int) -> list[Try]:
        if number not in self._made:
            lexer = self._lexers[number]
            # nothing else begins as what is ignored does, and most tokens have a blank before them
            order = sorted(lexer["tries"], key=lambda name: name not in self._ignored)
            self._made[number] = [
                (
                    "" if name in self._ignored else name,
                    _match(self.regexes[name]),
                    lexer["words"].get(name, {}),
                )
                for name in order
            ]
        return self._made[number]


@cache
def _match(regex: str) -> Callable[[str, int], re.Match[str] | None]:
    return re.compile(regex).match


@cache
def table() -> Table:
    """The table of the language."""
    return Table(json.loads(TABLE.read_text(encoding="utf-8")))


class Reader:
    """One reading of a text; `maker` has a method for each rule, named after it with a `_` before,
    which gets the place of the rule's text and what its parts became."""

    def __init__(self, text: str, maker: object) -> None:
        self.text: str = text
        self.table: Table = table()
        self.makes: list[Any] = [getattr(maker, f"_{rule.name}", None) for rule in self.table.rules]
        self.stack: list[int] = []
        self.parts: list[tuple[Any, Token, Token]] = []

    def read(self, start: str) -> Any:
        """What the whole text became; Unread where it is no `start`."""
        first, end = self.table.starts[start]
        self.stack, self.parts = [first], []
        token = None
        for token in self._tokens():
            self._feed(token)
        line, col = (token.line, token.col) if token else (1, 1)
        self._feed(Token(END, "", line, col, line, col), end)
        return self.parts[-1][0]

    def _feed(self, token: Token, end: int = -1) -> None:
        """Take the next token, once all that ends before it is made; after the last one that is
        what leads to the state `end`."""
        stack, does = self.stack, self.table.does
        while True:
            action = does[stack[-1]].get(token.type)
            if action is None:
                raise Unread(token.line, token.col, token, self._accepts())
            if action >= 0:
                stack.append(action)
                self.parts.append((token, token, token))
                return
            self._reduce(-1 - action)
            if stack[-1] == end:
                return

    def _reduce(self, number: int) -> None:
        """Make of the last parts what the rule of this number says."""
        rule, stack = self.table.rules[number], self.stack
        size = rule.size
        del stack[-size:]
        if size > 1 or not rule.alone or rule.kept is not None:
            parts = self.parts[-size:]
            del self.parts[-size:]
            made: Any = rule.children(parts)
            first, last = parts[0][1], parts[-1][2]
            if rule.of[0] != "_":  # else its parts are those of the rule that it stands in
                alone = rule.alone and len(made) == 1
                make = self.makes[number]
                made = made[0] if alone else make((first, last), *made)
            self.parts.append((made, first, last))
        stack.append(self.table.does[stack[-1]][rule.of])

    def _tokens(self) -> Iterator[Token]:
        """The tokens; a newline ends a statement, except inside parentheses and square brackets.

        What may stand at a place depends on what was read before it.
        """
        text, stack, tries, taken = self.text, self.stack, self.table.tries, self._taken
        pos, line, begin = 0, 1, 0  # `begin` is where the line begins
        depth, last, size = 0, "", len(text)
        while pos < size:
            start = pos
            found = taken(tries(stack[-1]), start) or self._stuck(start, line, begin)
            kind, word = found
            pos += len(word)
            if not kind:
                continue
            before, col = line, start - begin + 1
            if kind == NEWLINE:
                line += word.count("\n")
                begin = text.rindex("\n", start, pos) + 1
                if depth > 0 or last == NEWLINE:
                    continue
            elif kind in OPENS:
                depth += 1
            elif kind in CLOSES:
                depth -= 1
            last = kind
            yield Token(kind, word, before, col, line, pos - begin + 1)

    def _taken(self, tries: Sequence[Try], pos: int) -> tuple[str, str] | None:
        """The first of these terminals that stands at a place, and its text."""
        text = self.text
        for name, match, words in tries:
            found = match(text, pos)
            if found is not None:
                word = found[0]
                return words.get(word, name), word
        return None

    def _stuck(self, pos: int, line: int, begin: int) -> NoReturn:
        """Nothing that may stand here does: what stands here in place of it, if anything."""
        col = pos - begin + 1
        found = self._taken(self.table.anything(), pos)
        if found is None:
            raise Unread(line, col, None, frozenset())
        token = Token(*found, line, col, line, col + len(found[1]))
        raise Unread(line, col, token, self._accepts())

    def _accepts(self) -> frozenset[str]:
        """The terminals that could come next."""
        return frozenset(
            name for name in self.table.does[self.stack[-1]] if name.isupper() and self._takes(name)
        )

    def _takes(self, terminal: str) -> bool:
        """Whether a terminal that has an action here is taken at last."""
        stack, does = list(self.stack), self.table.does
        ends = [end for _, end in self.table.starts.values()]
        while (action := does[stack[-1]].get(terminal)) is not None:
            if action >= 0:
                return True
            rule = self.table.rules[-1 - action]
            del stack[-rule.size :]
            stack.append(does[stack[-1]][rule.of])
            if terminal == END and stack[-1] in ends:
                return True
        return False
