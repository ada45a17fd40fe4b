"""Answer a refused call with the whole call in this language's words, if that is legal.

* A call in words of other systems, mended into the words of this language.
* What a refused call is answered with: the whole call in our own words, if that is legal.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal
from schedlang.diagnostics.other_systems import ARGUMENTS, Other, Table
from schedlang.diagnostics.source import Span
from schedlang.language.kinds import Argument, Binder, Surface, words_of
from schedlang.language.nodes import Call, Expr, Keyword
from schedlang.language.syntax import parse_expr
from schedlang.language.value import (
    UNITS,
    UNKNOWN,
    AxisSize,
    Bytes,
    Names,
    Seconds,
    Symbol,
    Symbolic,
    evaluate,
)
from schedlang.pipeline.schedules import meant


@dataclass
class Mended:
    """The mended call: its arguments, the reasons, and rows beside it or in its place."""

    arguments: list[str] = field(default_factory=list)
    beside: list[str] = field(default_factory=list)
    instead: list[str] = field(default_factory=list)
    why: dict[int, tuple[str, ...]] = field(default_factory=dict)  # of arguments in other words
    beneath: set[str] = field(default_factory=set)  # arguments that any other of the name replaces

    def take(self, parts: Sequence[str], value: str) -> None:
        """An argument in the place of another, and what goes with it where nothing else is said."""
        main = next((one for one in parts if "{}" in one), parts[0])
        self.beneath |= {one for one in parts if one != main}
        self.arguments += [one.replace("{}", value) for one in parts]

    def helps(self, verb: str) -> tuple[str, ...]:
        """Return the text to write, ready to paste."""
        if self.instead:
            return tuple(f"its row here is `{row}`" for row in self.instead)
        rows = dict.fromkeys(self.beside)
        beside = [f"and a row of its own, below: `{row}`" for row in rows]
        return (f"write `{self.call(verb)}`", *beside)

    def call(self, verb: str) -> str:
        """The call with its arguments, of which the named ones stand last."""
        by_name: dict[str, str] = {}
        for one in self.arguments:
            name = one.partition("=")[0]
            if name not in by_name or one not in self.beneath:
                by_name[name] = one
        return f"{verb}({', '.join(sorted(by_name.values(), key=lambda one: '=' in one))})"


@dataclass(frozen=True)
class Given:
    """One argument of a call: the name that it has or stands for, whether the name was written, and
    the words that it may be."""

    name: str
    value: Any
    named: bool
    words: tuple[str, ...] = ()


def mended(verb: str, given: Sequence[Given], keywords: Sequence[str]) -> Mended | None:
    """The call in words of this language; None where none of its words is known to be another's.

    `keywords` are the arguments that the verb takes.
    """
    table = ARGUMENTS.get(verb, {})
    found = Mended()
    for place, one in enumerate(given):
        if UNKNOWN in _parts(one.value):
            return None
        words = _Words(table, frozenset(keywords), found)
        if words.put(one):
            found.why[place] = tuple(dict.fromkeys(words.why))
    return found if found.why else None


class _Words:
    """Looks arguments up, one by one."""

    def __init__(self, table: Table, keywords: frozenset[str], into: Mended) -> None:
        self.table, self.keywords, self.into = table, keywords, into
        self.why: list[str] = []

    def put(self, one: Given) -> bool:
        """Add an argument as it is written here; whether that differs from what was given."""
        if isinstance(one.value, Symbolic):
            return self._call(one, one.value)
        if isinstance(one.value, tuple):
            return self._list(one, one.value)
        other = self._other(one.name, one.value)
        if other is None:
            text = written(one.value)
            self.into.arguments.append(f"{one.name}={text}" if one.named else text)
            return False
        self._note(other, one.value)
        if other.here:
            bare = "=" in other.here or not one.named or one.name not in self.keywords
            parts = other.here.split(", ") if bare else [f"{one.name}={other.here}"]
            self.into.take(parts, written(one.value))
        return True

    def _other(self, name: str, value: object) -> Other | None:
        """Return the table's entry for a word, or for an argument that this verb does not take;
        None: none."""
        word = written(value)
        found = self.table.get(f"{name}={word}")
        if found is not None or name in self.keywords:
            return found
        if name:
            return self.table.get(name)
        found = self.table.get(word)  # an argument that is only left out may be a bare word, too
        return found if found is not None and found.here == "" else self.table.get("=")

    def _note(self, other: Other, value: object) -> None:
        word = written(value).strip('"')
        row = other.row
        if 'order="{}"' in row:
            row = row.replace("{}", meant(word) or "1F1B")
        row = row.replace("{}", word)
        self.why += [other.why] if other.why else []
        where = self.into.instead if other.here is None else self.into.beside
        where += [row] if row else []

    def _list(self, one: Given, items: tuple[Any, ...]) -> bool:
        """A list, its words exchanged one by one."""
        if isinstance(items[0] if items else None, AxisSize):
            self.into.arguments.append(f"{one.name}={written(items)}")
            return False
        others = [self.table.get(f"{one.name}={written(item)}") for item in items]
        for other, item in zip(others, items):
            if other is not None:
                self._note(other, item)
        texts = [o.here if o else written(item) for o, item in zip(others, items)]
        inside = ", ".join(dict.fromkeys(text for text in texts if text))
        name = f"{one.name}=" if one.named else ""
        self.into.arguments.append(f"{name}[{inside}]")
        return any(others)

    def _call(self, one: Given, call: Symbolic) -> bool:
        """Options in parentheses behind a word, as `ring(layout=striped)`, stand beside it."""
        word = Symbol(call.name)
        if not one.name and call.name in self.keywords and f"={word}" not in self.table:
            return self.put(Given(call.name, call.args[0], True)) or True if call.args else False
        if word not in one.words and self._other(one.name, word) is None:
            return False
        self.put(Given(one.name, word, one.named))
        for value in call.args:
            if self._other("", value) not in (None, self.table.get("=")):
                self.put(Given("", value, False))
        for name, value in call.keywords:
            if name in self.keywords or self._other(name, value) is not None:
                self.put(Given(name, value, True))
        return True


def _parts(value: Any) -> Iterator[Any]:
    """A value and what it holds."""
    yield value
    if isinstance(value, tuple):
        for item in value:
            yield from _parts(item)
    elif isinstance(value, Symbolic):
        yield from _parts((*value.args, *(item for _, item in value.keywords)))


def written(value: Any) -> str:
    """A value as it is written in a row."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, AxisSize):
        return value.name
    if isinstance(value, tuple):
        axes = len(value) > 1 and isinstance(value[0], AxisSize)
        return (
            f"({', '.join(map(written, value))})" if axes else f"[{', '.join(map(written, value))}]"
        )
    if isinstance(value, Bytes | Seconds):
        return _amount(value)
    if isinstance(value, str) and not all(part.isidentifier() for part in value.split(".")):
        return f'"{value}"'
    return str(value)


def _amount(value: Bytes | Seconds) -> str:
    """Bytes and seconds in the largest unit that leaves a whole number."""
    plain = "B" if isinstance(value, Bytes) else "s"
    mine = [(size, unit) for unit, size in UNITS.items() if unit[-1] == plain]
    size, unit = max((one for one in mine if value % one[0] == 0), default=(1, plain))
    return f"{value / size:g}{unit}"


OVER = re.compile(r"(?:over|inner)=[\[(]?([\w, ]+?)(?:[\])]|, \w+=)")  # the axes that a call names


def in_our_words(binder: Binder, arguments: Sequence[Argument]) -> list[Diagnostic]:
    """The problems of a call; of words that others use with the whole call as it is written here.

    A call that would be refused again is not offered, but the primitive's example.
    """
    surface, example = binder.surface, binder.primitive.example
    found = mended(binder.name, _given(surface, arguments), surface.keywords)
    if found is None:
        return binder.problems
    said = {text.partition("=")[0] for text in found.arguments} | set(binder.bound)
    found.arguments += _lacking(surface.required, said, example)
    wrong = None if found.instead else _refused(binder, found.call(binder.name))
    helps = found.helps(binder.name) if wrong is None else (f"for example `{example}`",)
    why: dict[Span, tuple[str, ...]] = {binder.span: ()}  # what lacks is in the whole call, too
    for place, notes in found.why.items():
        why |= dict.fromkeys((arguments[place].span, arguments[place].inner), notes)
    return [
        replace(one, notes=(*why[one.primary.span], *(wrong or ())), helps=helps)
        if one.primary.span in why
        else one
        for one in binder.problems
    ]


def _given(surface: Surface, arguments: Sequence[Argument]) -> list[Given]:
    """The arguments by name, those without one by the field that they stand for."""
    free = list(surface.positional)
    found = []
    for one in arguments:
        name = one.name or surface.many or (free.pop(0) if free else "")
        words = words_of(surface.types.get(name))
        found.append(Given(name, one.value, one.name is not None, words))
    return found


def _lacking(required: Sequence[str], said: set[str], example: str) -> list[str]:
    """Return the required arguments that are missing, as the example has them."""
    found = [re.search(rf"\b{name}=[\w\"-]+", example) for name in required if name not in said]
    return [one[0] for one in found if one]


def _refused(binder: Binder, call: str) -> tuple[str, ...] | None:
    """Return why a call would be refused, on the mesh there is or on axes of any name; None: it is
    not.

    Empty for a call that does not bind: that has messages of its own.
    """
    axes = {**binder.axes}
    for names in OVER.findall(call):
        axes |= {name: 2 for name in re.findall(r"\w+", names) if name not in axes}
    try:
        made = parse_expr(call, binder.span)
        assert isinstance(made, Call)
        given = [_argument(one, Names(axes=axes)) for one in made.args]
    except Refusal:
        return ()
    other = Binder(binder.primitive, binder.surface, binder.span, axes)
    if not other.fits(given):
        return ()
    try:
        other.made().agree(axes)
    except Refusal as refusal:
        told = refusal.diagnostic
        return (f"`{call}` would be refused: {told.title}", *told.helps)
    return None


def _argument(node: Expr | Keyword, names: Names) -> Argument:
    """An argument as it is evaluated."""
    if isinstance(node, Keyword):
        return Argument(node.name, evaluate(node.value, names), node.span, node.value.span)
    return Argument(None, evaluate(node, names), node.span, node.span)
