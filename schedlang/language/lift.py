"""Python values to syntax: how a call made in Python is written in a schedule."""

from __future__ import annotations

import dataclasses
import math
import operator
import re
from collections.abc import Callable
from typing import Any, NoReturn

from schedlang.diagnostics.diagnostic import Diagnostic, Label, Refusal
from schedlang.diagnostics.source import NOWHERE, Span, python_span
from schedlang.ir.placement import P, Replicate, S
from schedlang.ir.primitive import Primitive
from schedlang.language import nodes as n
from schedlang.language.binding import surface
from schedlang.language.evaluate import evaluate
from schedlang.language.misread import KEYWORDS
from schedlang.language.value import UNITS, Names, Symbolic

MEASURED = re.compile(rf"\d+(\.\d+)?({'|'.join(UNITS)})")  # "40GiB": a number of bytes or seconds


class Remembered:
    """A value that remembers how it was written: a knob, a fact of the model, or their arithmetic.

    It counts as its value in Python (`if`, `range`, comparisons); given to a schedule it is
    recorded as the expression.
    """

    def __init__(self, node: n.Expr, names: Callable[[], Names]) -> None:
        self._node, self._names = node, names

    @property
    def value(self) -> Any:
        """What it is now."""
        return evaluate(self._node, self._names())

    def _with(self, op: str, other: object, swapped: bool = False) -> Remembered:
        pair = [self._node, lift(other)]
        left, right = pair[::-1] if swapped else pair
        return Remembered(_chain(left, op, right), self._names)

    def __add__(self, other: object) -> Remembered:
        return self._with("+", other)

    def __radd__(self, other: object) -> Remembered:
        return self._with("+", other, True)

    def __sub__(self, other: object) -> Remembered:
        return self._with("-", other)

    def __rsub__(self, other: object) -> Remembered:
        return self._with("-", other, True)

    def __mul__(self, other: object) -> Remembered:
        return self._with("*", other)

    def __rmul__(self, other: object) -> Remembered:
        return self._with("*", other, True)

    def __truediv__(self, other: object) -> Remembered:
        return self._with("/", other)

    def __floordiv__(self, other: object) -> Remembered:
        return self._with("//", other)

    def __rtruediv__(self, other: object) -> Remembered:
        return self._with("/", other, True)

    def __rfloordiv__(self, other: object) -> Remembered:
        return self._with("//", other, True)

    def __mod__(self, other: object) -> Remembered:
        return self._with("%", other)

    def __rmod__(self, other: object) -> Remembered:
        return self._with("%", other, True)

    def __eq__(self, other: object) -> Remembered:  # type: ignore[override]
        return self._with("==", other)

    def __ne__(self, other: object) -> Remembered:  # type: ignore[override]
        return self._with("!=", other)

    def __lt__(self, other: object) -> Remembered:
        return self._with("<", other)

    def __le__(self, other: object) -> Remembered:
        return self._with("<=", other)

    def __gt__(self, other: object) -> Remembered:
        return self._with(">", other)

    def __ge__(self, other: object) -> Remembered:
        return self._with(">=", other)

    def __hash__(self) -> int:
        return hash(self._node)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __index__(self) -> int:
        return operator.index(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def __float__(self) -> float:
        return float(self.value)

    def __str__(self) -> str:
        return str(self.value)

    def __repr__(self) -> str:
        return repr(self.value)


class Facts:
    """`sch.model.config.n_head`: reads plain data of the model and remembers the path."""

    def __init__(self, parts: tuple[str, ...], holder: object, names: Callable[[], Names]) -> None:
        self._parts, self._holder, self._facts = parts, holder, names

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        value, parts = getattr(self._holder, name), (*self._parts, name)
        if isinstance(value, bool | int | float | str):
            return Remembered(n.Name(parts, span=python_span()), self._facts)
        return Facts(parts, value, self._facts)


LEVELS = {"+": 1, "-": 1, "*": 2, "/": 2, "//": 2, "%": 2}  # comparisons bind less: 0


def _chain(left: n.Expr, op: str, right: n.Expr) -> n.Chain:
    """`left op right` with the parentheses that keep its meaning, and no others."""
    level = LEVELS.get(op, 0)
    items: tuple[n.Expr | str, ...] = (left,)
    if isinstance(left, n.Chain):
        binds = _level(left)
        same = binds == level > 0
        items = left.items if same else (left if binds > level else n.Group((left,)),)
    if isinstance(right, n.Chain) and _level(right) <= level:
        right = n.Group((right,))
    return n.Chain((*items, op, right))


def _level(chain: n.Chain) -> int:
    op = chain.items[1]
    return LEVELS.get(op, 0) if isinstance(op, str) else 0


def lift(value: object, span: Span = NOWHERE) -> n.Expr:
    """The expression for a Python value; a text becomes a bare name where it can be one."""
    if isinstance(value, Remembered):
        return n.placed(value._node, span) if span else value._node
    if isinstance(value, bool):
        return n.Lit(str(value).lower(), span=span)
    if isinstance(value, int | float):
        return _number(value, span)
    if isinstance(value, str):
        return _text(value, span)
    if isinstance(value, list | tuple):
        items = tuple(lift(item, span) for item in value)
        many = isinstance(value, tuple) and len(items) > 1
        return n.Group(items, span=span) if many else n.List(items, span=span)
    if isinstance(value, Replicate):
        return n.Name(("R",), span=span)
    if isinstance(value, P):
        return _call("P", (value.op,), {}, span)
    if isinstance(value, S):
        blocks = list(value.blocks) if isinstance(value.blocks, tuple) else value.blocks
        return _call("S", (value.dim,), {} if blocks == 1 else {"blocks": blocks}, span)
    if isinstance(value, Symbolic):
        return _call(value.name, value.args, dict(value.keywords), span)
    _strange(value, span)


def _number(value: int | float, span: Span) -> n.Expr:
    if isinstance(value, float) and not math.isfinite(value):
        _strange(value, span)
    literal = n.Lit(repr(abs(value)), span=span)
    return n.Unary("-", literal, span=span) if value < 0 else literal


def _text(value: str, span: Span) -> n.Expr:
    parts = tuple(value.split("."))
    if all(p.isascii() and p.isidentifier() and p not in KEYWORDS for p in parts):
        return n.Name(parts, span=span)
    if '"' in value or "\n" in value:
        _strange(value, span)
    if MEASURED.fullmatch(value):
        return n.Lit(value, span=span)
    return n.Lit(f'"{value}"', span=span)


def _strange(value: object, span: Span) -> NoReturn:
    kind = type(value).__name__
    title = "this value has no form in a schedule"
    label = Label(span or python_span(), f"a {kind}: {str(value)[:60]!r}")
    help_ = "numbers, names, strings, lists, `S(...)`, `R` and `P(...)` have one"
    raise Refusal(Diagnostic("S304", title, label, helps=(help_,)))


def _call(name: str, args: Any, named: Any, span: Span) -> n.Call:
    return call(name, args, named, span)


def call(name: str, args: Any, named: Any, span: Span = NOWHERE) -> n.Call:
    """The call `name(*args, **named)`; `except_=` stands for a word that Python reserves."""
    given: list[n.Expr | n.Keyword] = [lift(value, span) for value in args]
    for key, value in named.items():
        given.append(n.Keyword(key.rstrip("_"), lift(value, span), span=span))
    return n.Call(n.Name(tuple(name.split(".")), span=span), tuple(given), span=span)


def call_of(primitive: Primitive, span: Span) -> n.Call:
    """The call that makes a bound primitive: what differs from the defaults."""
    own = surface(type(primitive))
    args: list[object] = []
    named: dict[str, object] = {}
    for field in dataclasses.fields(primitive):  # type: ignore[arg-type]
        value = getattr(primitive, field.name)
        if field.name == own.many:
            args += value
        elif field.name == own.rest:
            named |= dict(value)
        elif value != field.default:
            first = field.name in own.required and not field.kw_only and not named
            args.append(value) if first else named.update({field.name: value})
    return call(type(primitive).__name__, args, named, span)
