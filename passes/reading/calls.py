"""A row's call, before any module is looked at: arguments, what they name, and if they agree."""

from __future__ import annotations

from typing import Any

from schedlang import nodes as n
from schedlang.binding import Argument
from schedlang.diagnostic import Diagnostic, Label, Refusal, guess
from schedlang.evaluate import evaluate
from schedlang.other_words import VERBS
from schedlang.passes.reading.state import State
from schedlang.primitive import Primitive, load_all, registry
from schedlang.source import Span
from schedlang.value import UNKNOWN, Names


def no_primitive(name: n.Name, state: State) -> Diagnostic:
    """S301: neither a primitive nor a definition above."""
    load_all()
    known = [*sorted(registry()), *state.defs]
    helps = VERBS.get(name.text) or (guess(name.text, known, "there are"),)
    label = Label(name.span, "neither a primitive nor a `def` above this line")
    return Diagnostic("S301", f"there is no primitive `{name.text}`", label, helps=helps)


def arguments(call: n.Call, names: Names) -> list[Argument]:
    """The evaluated arguments of a call."""
    found = []
    for arg in call.args:
        inner = arg.value if isinstance(arg, n.Keyword) else arg
        name = arg.name if isinstance(arg, n.Keyword) else None
        word = inner.text if isinstance(inner, n.Name) else ""
        found.append(Argument(name, evaluate(inner, names), arg.span, inner.span, word))
    return found


def resolved(primitive: Primitive, state: State, span: Span) -> Primitive:
    """A row with the pattern that it names (S885); what only a model can tell stays open."""
    if any(value is UNKNOWN for value in vars(primitive).values()):
        return primitive
    try:
        return primitive.resolved(state.patterns)
    except Refusal as refusal:
        raise refusal.at(span) from None


def agreed(primitive: Primitive, state: State, span: Span) -> None:
    """Refuse arguments that do not go together, where all are known without a model."""
    if any(map(_open, vars(primitive).values())):
        return
    try:
        primitive.agree(tuple(state.axes))
    except Refusal as refusal:
        raise refusal.at(span) from None


def _open(value: Any) -> bool:
    """Whether only a model can tell a value, or one of a list."""
    return value is UNKNOWN or (isinstance(value, tuple) and any(map(_open, value)))
