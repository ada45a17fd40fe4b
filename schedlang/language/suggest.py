"""Corrections of a refused call: words of other systems replaced by words of this language.

Used by `kinds.bind`: the diagnostic offers the whole corrected call, if that call is legal.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal
from schedlang.diagnostics.other_systems import ARGUMENTS, Replacement, Table
from schedlang.diagnostics.source import Span
from schedlang.language.kinds import Argument, Binder, CallSignature, words_of
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
    SymbolicCall,
    evaluate,
)
from schedlang.pipeline.schedules import guess_order


@dataclass
class CorrectedCall:
    """A corrected call: its arguments, the reasons, and rows to add beside the call or to use
    instead."""

    arguments: list[str] = field(default_factory=list)
    extra_rows: list[str] = field(default_factory=list)
    replacement_rows: list[str] = field(default_factory=list)
    why: dict[int, tuple[str, ...]] = field(default_factory=dict)  # by the position of an argument
    defaults: set[str] = field(default_factory=set)  # arguments that one of the same name replaces

    def add_argument(self, parts: Sequence[str], value: str) -> None:
        """Add the arguments `parts` that stand for one of another system, with its value for `{}`.

        An argument without `{}` is only a default: another of the same name replaces it.
        """
        main = next((one for one in parts if "{}" in one), parts[0])
        self.defaults |= {one for one in parts if one != main}
        self.arguments += [one.replace("{}", value) for one in parts]

    def helps(self, verb: str) -> tuple[str, ...]:
        """Return the help texts: what to write, ready to paste."""
        if self.replacement_rows:
            return tuple(f"its row here is `{row}`" for row in self.replacement_rows)
        rows = dict.fromkeys(self.extra_rows)
        beside = [f"and a separate row below: `{row}`" for row in rows]
        return (f"write `{self.call(verb)}`", *beside)

    def call(self, verb: str) -> str:
        """Return the call as text, keyword arguments last."""
        by_name: dict[str, str] = {}
        for one in self.arguments:
            name = one.partition("=")[0]
            if name not in by_name or one not in self.defaults:
                by_name[name] = one
        return f"{verb}({', '.join(sorted(by_name.values(), key=lambda one: '=' in one))})"


@dataclass(frozen=True)
class CallArgument:
    """One argument of a call, to be translated.

    `name` is its field's name, `named` whether the name was written, `words` the words that the
    argument may be.
    """

    name: str
    value: Any
    named: bool
    words: tuple[str, ...] = ()


def correct_call(
    verb: str, given: Sequence[CallArgument], keywords: Sequence[str]
) -> CorrectedCall | None:
    """Translate a call into words of this language; None where no argument is a known foreign word.

    `keywords` are the arguments that the verb accepts.
    """
    table = ARGUMENTS.get(verb, {})
    found = CorrectedCall()
    for place, one in enumerate(given):
        if UNKNOWN in _flatten(one.value):
            return None
        words = _ArgumentTranslator(table, frozenset(keywords), found)
        if words.put(one):
            found.why[place] = tuple(dict.fromkeys(words.why))
    return found if found.why else None


class _ArgumentTranslator:
    """Looks up arguments in the table of foreign words, one by one."""

    def __init__(self, table: Table, keywords: frozenset[str], into: CorrectedCall) -> None:
        self.table, self.keywords, self.into = table, keywords, into
        self.why: list[str] = []

    def put(self, one: CallArgument) -> bool:
        """Add an argument in this language's words; return whether that differs from the given
        argument."""
        if isinstance(one.value, SymbolicCall):
            return self._put_call(one, one.value)
        if isinstance(one.value, tuple):
            return self._put_list(one, one.value)
        other = self._find_entry(one.name, one.value)
        if other is None:
            text = format_argument(one.value)
            self.into.arguments.append(f"{one.name}={text}" if one.named else text)
            return False
        self._add_reasons(other, one.value)
        if other.argument:
            bare = "=" in other.argument or not one.named or one.name not in self.keywords
            parts = other.argument.split(", ") if bare else [f"{one.name}={other.argument}"]
            self.into.add_argument(parts, format_argument(one.value))
        return True

    def _find_entry(self, name: str, value: object) -> Replacement | None:
        """Return the table's entry for a word, or for an argument that this verb does not accept;
        else None."""
        word = format_argument(value)
        found = self.table.get(f"{name}={word}")
        if found is not None or name in self.keywords:
            return found
        if name:
            return self.table.get(name)
        found = self.table.get(word)  # an entry that drops its argument may also match a bare word
        return found if found is not None and found.argument == "" else self.table.get("=")

    def _add_reasons(self, other: Replacement, value: object) -> None:
        word = format_argument(value).strip('"')
        row = other.row
        if 'order="{}"' in row:
            row = row.replace("{}", guess_order(word) or "1F1B")
        row = row.replace("{}", word)
        self.why += [other.why] if other.why else []
        where = self.into.replacement_rows if other.argument is None else self.into.extra_rows
        where += [row] if row else []

    def _put_list(self, one: CallArgument, items: tuple[Any, ...]) -> bool:
        """Add a list, its words translated one by one."""
        if isinstance(items[0] if items else None, AxisSize):
            self.into.arguments.append(f"{one.name}={format_argument(items)}")
            return False
        others = [self.table.get(f"{one.name}={format_argument(item)}") for item in items]
        for other, item in zip(others, items):
            if other is not None:
                self._add_reasons(other, item)
        texts = [o.argument if o else format_argument(item) for o, item in zip(others, items)]
        inside = ", ".join(dict.fromkeys(text for text in texts if text))
        name = f"{one.name}=" if one.named else ""
        self.into.arguments.append(f"{name}[{inside}]")
        return any(others)

    def _put_call(self, one: CallArgument, call: SymbolicCall) -> bool:
        """Add a word with options in parentheses, `ring(layout=striped)`, as arguments beside each
        other."""
        word = Symbol(call.name)
        if not one.name and call.name in self.keywords and f"={word}" not in self.table:
            return (
                self.put(CallArgument(call.name, call.args[0], True)) or True
                if call.args
                else False
            )
        if word not in one.words and self._find_entry(one.name, word) is None:
            return False
        self.put(CallArgument(one.name, word, one.named))
        for value in call.args:
            if self._find_entry("", value) not in (None, self.table.get("=")):
                self.put(CallArgument("", value, False))
        for name, value in call.keywords:
            if name in self.keywords or self._find_entry(name, value) is not None:
                self.put(CallArgument(name, value, True))
        return True


def _flatten(value: Any) -> Iterator[Any]:
    """Yield a value and the values inside it."""
    yield value
    if isinstance(value, tuple):
        for item in value:
            yield from _flatten(item)
    elif isinstance(value, SymbolicCall):
        yield from _flatten((*value.args, *(item for _, item in value.keywords)))


def format_argument(value: Any) -> str:
    """Format a value as a row has it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, AxisSize):
        return value.name
    if isinstance(value, tuple):
        axes = len(value) > 1 and isinstance(value[0], AxisSize)
        return (
            f"({', '.join(map(format_argument, value))})"
            if axes
            else f"[{', '.join(map(format_argument, value))}]"
        )
    if isinstance(value, Bytes | Seconds):
        return _format_amount(value)
    if isinstance(value, str) and not all(part.isidentifier() for part in value.split(".")):
        return f'"{value}"'
    return str(value)


def _format_amount(value: Bytes | Seconds) -> str:
    """Format bytes or seconds in the largest unit that gives a whole number."""
    plain = "B" if isinstance(value, Bytes) else "s"
    mine = [(size, unit) for unit, size in UNITS.items() if unit[-1] == plain]
    size, unit = max((one for one in mine if value % one[0] == 0), default=(1, plain))
    return f"{value / size:g}{unit}"


AXES_IN_CALL = re.compile(
    r"(?:over|inner)=[\[(]?([\w, ]+?)(?:[\])]|, \w+=)"
)  # the axes that a call names


def suggest_call(binder: Binder, arguments: Sequence[Argument]) -> list[Diagnostic]:
    """Return the problems of a call; for foreign words, with the whole call in this language's
    words.

    If the corrected call would be refused too, the primitive's example is offered instead.
    """
    surface, example = binder.surface, binder.primitive.example
    found = correct_call(binder.name, _call_arguments(surface, arguments), surface.keywords)
    if found is None:
        return binder.problems
    present = {text.partition("=")[0] for text in found.arguments} | set(binder.bound)
    found.arguments += _missing_arguments(surface.required, present, example)
    wrong = None if found.replacement_rows else _objections(binder, found.call(binder.name))
    helps = found.helps(binder.name) if wrong is None else (f"for example `{example}`",)
    why: dict[Span, tuple[str, ...]] = {
        binder.span: ()
    }  # the corrected call also has the missing arguments
    for place, notes in found.why.items():
        why |= dict.fromkeys((arguments[place].span, arguments[place].value_span), notes)
    return [
        replace(one, notes=(*why[one.primary.span], *(wrong or ())), helps=helps)
        if one.primary.span in why
        else one
        for one in binder.problems
    ]


def _call_arguments(surface: CallSignature, arguments: Sequence[Argument]) -> list[CallArgument]:
    """Return the arguments by name; a positional argument has the name of its field."""
    free = list(surface.positional)
    found = []
    for one in arguments:
        name = one.name or surface.many or (free.pop(0) if free else "")
        words = words_of(surface.types.get(name))
        found.append(CallArgument(name, one.value, one.name is not None, words))
    return found


def _missing_arguments(required: Sequence[str], said: set[str], example: str) -> list[str]:
    """Return the required arguments that are missing, with the values of the example."""
    found = [re.search(rf"\b{name}=[\w\"-]+", example) for name in required if name not in said]
    return [one[0] for one in found if one]


def _objections(binder: Binder, call: str) -> tuple[str, ...] | None:
    """Return why a call would be refused, on this mesh extended by the axes it names; None if
    legal.

    Empty for a call that does not bind: binding has messages of its own.
    """
    axes = {**binder.axes}
    for names in AXES_IN_CALL.findall(call):
        axes |= {name: 2 for name in re.findall(r"\w+", names) if name not in axes}
    try:
        made = parse_expr(call, binder.span)
        assert isinstance(made, Call)
        given = [_argument(one, Names(axes=axes)) for one in made.args]
    except Refusal:
        return ()
    other = Binder(binder.primitive, binder.surface, binder.span, axes)
    if not other.bind_arguments(given):
        return ()
    try:
        other.build().agree(axes)
    except Refusal as refusal:
        diagnostic = refusal.diagnostic
        return (f"`{call}` would be refused: {diagnostic.title}", *diagnostic.helps)
    return None


def _argument(node: Expr | Keyword, names: Names) -> Argument:
    """Evaluate an argument of a parsed call."""
    if isinstance(node, Keyword):
        return Argument(node.name, evaluate(node.value, names), node.span, node.value.span)
    return Argument(None, evaluate(node, names), node.span, node.span)
