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
        main = next((part for part in parts if "{}" in part), parts[0])
        self.defaults |= {part for part in parts if part != main}
        self.arguments += [part.replace("{}", value) for part in parts]

    def helps(self, verb: str) -> tuple[str, ...]:
        """Return the help texts: what to write, ready to paste."""
        if self.replacement_rows:
            return tuple(f"its row here is `{row}`" for row in self.replacement_rows)
        rows = dict.fromkeys(self.extra_rows)
        notes = [f"and a separate row below: `{row}`" for row in rows]
        return (f"write `{self.call(verb)}`", *notes)

    def call(self, verb: str) -> str:
        """Return the call as text, keyword arguments last."""
        by_name: dict[str, str] = {}
        for arg in self.arguments:
            name = arg.partition("=")[0]
            if name not in by_name or arg not in self.defaults:
                by_name[name] = arg
        return f"{verb}({', '.join(sorted(by_name.values(), key=lambda arg: '=' in arg))})"


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
    verb: str, arguments: Sequence[CallArgument], keywords: Sequence[str]
) -> CorrectedCall | None:
    """Translate a call into words of this language; None where no argument is a known foreign word.

    `keywords` are the arguments that the verb accepts.
    """
    table = ARGUMENTS.get(verb, {})
    corrected = CorrectedCall()
    for index, argument in enumerate(arguments):
        if UNKNOWN in _flatten(argument.value):
            return None
        translator = _ArgumentTranslator(table, frozenset(keywords), corrected)
        if translator.put(argument):
            corrected.why[index] = tuple(dict.fromkeys(translator.why))
    return corrected if corrected.why else None


class _ArgumentTranslator:
    """Looks up arguments in the table of foreign words, one by one."""

    def __init__(self, table: Table, keywords: frozenset[str], into: CorrectedCall) -> None:
        self.table, self.keywords, self.into = table, keywords, into
        self.why: list[str] = []

    def put(self, argument: CallArgument) -> bool:
        """Add an argument in this language's words; return whether that differs from the given
        argument."""
        if isinstance(argument.value, SymbolicCall):
            return self._put_call(argument, argument.value)
        if isinstance(argument.value, tuple):
            return self._put_list(argument, argument.value)
        entry = self._find_entry(argument.name, argument.value)
        if entry is None:
            text = format_argument(argument.value)
            self.into.arguments.append(f"{argument.name}={text}" if argument.named else text)
            return False
        self._add_reasons(entry, argument.value)
        if entry.argument:
            positional = (
                "=" in entry.argument or not argument.named or argument.name not in self.keywords
            )
            parts = (
                entry.argument.split(", ") if positional else [f"{argument.name}={entry.argument}"]
            )
            self.into.add_argument(parts, format_argument(argument.value))
        return True

    def _find_entry(self, name: str, value: object) -> Replacement | None:
        """Return the table's entry for a word, or for an argument that this verb does not accept;
        else None."""
        text = format_argument(value)
        entry = self.table.get(f"{name}={text}")
        if entry is not None or name in self.keywords:
            return entry
        if name:
            return self.table.get(name)
        entry = self.table.get(text)  # an entry that drops its argument may also match a bare word
        return entry if entry is not None and entry.argument == "" else self.table.get("=")

    def _add_reasons(self, entry: Replacement, value: object) -> None:
        text = format_argument(value).strip('"')
        row = entry.row
        if 'order="{}"' in row:
            row = row.replace("{}", guess_order(text) or "1F1B")
        row = row.replace("{}", text)
        self.why += [entry.why] if entry.why else []
        rows = self.into.replacement_rows if entry.argument is None else self.into.extra_rows
        rows += [row] if row else []

    def _put_list(self, argument: CallArgument, items: tuple[Any, ...]) -> bool:
        """Add a list, its words translated one by one."""
        if isinstance(items[0] if items else None, AxisSize):
            self.into.arguments.append(f"{argument.name}={format_argument(items)}")
            return False
        others = [self.table.get(f"{argument.name}={format_argument(item)}") for item in items]
        for entry, item in zip(others, items):
            if entry is not None:
                self._add_reasons(entry, item)
        texts = [o.argument if o else format_argument(item) for o, item in zip(others, items)]
        inside = ", ".join(dict.fromkeys(text for text in texts if text))
        name = f"{argument.name}=" if argument.named else ""
        self.into.arguments.append(f"{name}[{inside}]")
        return any(others)

    def _put_call(self, argument: CallArgument, call: SymbolicCall) -> bool:
        """Add a word with options in parentheses, `ring(layout=striped)`, as arguments beside each
        other."""
        symbol = Symbol(call.name)
        if not argument.name and call.name in self.keywords and f"={symbol}" not in self.table:
            return (
                self.put(CallArgument(call.name, call.args[0], True)) or True
                if call.args
                else False
            )
        if symbol not in argument.words and self._find_entry(argument.name, symbol) is None:
            return False
        self.put(CallArgument(argument.name, symbol, argument.named))
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
    base_unit = "B" if isinstance(value, Bytes) else "s"
    units = [(size, unit) for unit, size in UNITS.items() if unit[-1] == base_unit]
    size, unit = max((pair for pair in units if value % pair[0] == 0), default=(1, base_unit))
    return f"{value / size:g}{unit}"


# the axes that a call names
AXES_IN_CALL = re.compile(r"(?:over|inner)=[\[(]?([\w, ]+?)(?:[\])]|, \w+=)")


def suggest_call(binder: Binder, arguments: Sequence[Argument]) -> list[Diagnostic]:
    """Return the problems of a call; for foreign words, with the whole call in this language's
    words.

    If the corrected call would be refused too, the primitive's example is offered instead.
    """
    signature, example = binder.surface, binder.primitive.example
    corrected = correct_call(binder.name, _call_arguments(signature, arguments), signature.keywords)
    if corrected is None:
        return binder.problems
    present = {text.partition("=")[0] for text in corrected.arguments} | set(binder.bound)
    corrected.arguments += _missing_arguments(signature.required, present, example)
    objections = (
        None if corrected.replacement_rows else _objections(binder, corrected.call(binder.name))
    )
    helps = corrected.helps(binder.name) if objections is None else (f"for example `{example}`",)
    # the corrected call also has the missing arguments
    reasons: dict[Span, tuple[str, ...]] = {binder.span: ()}
    for index, notes in corrected.why.items():
        reasons |= dict.fromkeys((arguments[index].span, arguments[index].value_span), notes)
    return [
        replace(problem, notes=(*reasons[problem.primary.span], *(objections or ())), helps=helps)
        if problem.primary.span in reasons
        else problem
        for problem in binder.problems
    ]


def _call_arguments(signature: CallSignature, arguments: Sequence[Argument]) -> list[CallArgument]:
    """Return the arguments by name; a positional argument has the name of its field."""
    unbound = list(signature.positional)
    call_arguments = []
    for argument in arguments:
        name = argument.name or signature.many or (unbound.pop(0) if unbound else "")
        words = words_of(signature.types.get(name))
        call_arguments.append(CallArgument(name, argument.value, argument.name is not None, words))
    return call_arguments


def _missing_arguments(required: Sequence[str], present: set[str], example: str) -> list[str]:
    """Return the required arguments that are missing, with the values of the example."""
    matches = [
        re.search(rf"\b{name}=[\w\"-]+", example) for name in required if name not in present
    ]
    return [match[0] for match in matches if match]


def _objections(binder: Binder, call: str) -> tuple[str, ...] | None:
    """Return why a call would be refused, on this mesh extended by the axes it names; None if
    legal.

    Empty for a call that does not bind: binding has messages of its own.
    """
    axes = {**binder.axes}
    for names in AXES_IN_CALL.findall(call):
        axes |= {name: 2 for name in re.findall(r"\w+", names) if name not in axes}
    try:
        node = parse_expr(call, binder.span)
        assert isinstance(node, Call)
        arguments = [_argument(arg, Names(axes=axes)) for arg in node.args]
    except Refusal:
        return ()
    trial = Binder(binder.primitive, binder.surface, binder.span, axes)
    if not trial.bind_arguments(arguments):
        return ()
    try:
        trial.build().agree(axes)
    except Refusal as refusal:
        diagnostic = refusal.diagnostic
        return (f"`{call}` would be refused: {diagnostic.title}", *diagnostic.helps)
    return None


def _argument(node: Expr | Keyword, names: Names) -> Argument:
    """Evaluate an argument of a parsed call."""
    if isinstance(node, Keyword):
        return Argument(node.name, evaluate(node.value, names), node.span, node.value.span)
    return Argument(None, evaluate(node, names), node.span, node.span)
