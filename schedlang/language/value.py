"""Values of the language, what a name means at one place, and expressions evaluated.

Evaluation reads plain data of the model and runs no code of a file.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, NoReturn, Protocol

from schedlang.diagnostics.diagnostic import Facts, Label, Refusal, guess, quoted, unknown
from schedlang.ir.placement import P, R, S
from schedlang.language import nodes as n
from schedlang.language import printer
from schedlang.language.grammar import LONGEST

UNITS: Mapping[str, float] = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
}


class Symbol(str):
    """A bare name that is no knob, axis or argument; whoever takes it has a closed list of them."""

    __slots__ = ()


def bare(value: Any) -> Facts:
    """The facts of a value that is a bare word, or has some in it: names that nothing knows."""
    every = value if isinstance(value, tuple) else (value,)
    return tuple(fact for one in every if isinstance(one, str) for fact in unknown(one))


class Choice(Symbol):
    """The value of a knob of type choice, with the symbols it could have been."""

    knob: str
    options: tuple[str, ...]

    @staticmethod
    def of(value: str, knob: str, options: Sequence[str]) -> Choice:
        """A choice of the knob `knob` among `options` (none: any)."""
        made = Choice(value)
        made.knob, made.options = knob, tuple(options)
        return made


class AxisSize(int):
    """The size of an axis that remembers the axis: a number to arithmetic, a name to `over=`."""

    name: str

    @staticmethod
    def of(name: str, size: int) -> AxisSize:
        """The size of the axis `name`."""
        made = AxisSize(size)
        made.name = name
        return made


class Bytes(int):
    """A number of bytes, written 40GiB."""


class Seconds(float):
    """A time in seconds, written 180ms."""


@dataclass(frozen=True)
class Symbolic:
    """A call that stands for itself, such as group(4), for whoever takes it."""

    name: str
    args: tuple[Any, ...] = ()
    keywords: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        named = [f"{key}={value}" for key, value in self.keywords]
        return f"{self.name}({', '.join([*map(str, self.args), *named])})"


class Unknown:
    """A value that cannot be known without the model; anything computed from it is unknown too."""

    def __repr__(self) -> str:
        return "unknown"


UNKNOWN = Unknown()


class Reader(Protocol):
    """The part of a model that evaluation reads: plain attributes of one module."""

    def attribute(self, fqn: str, name: str) -> object:
        """The attribute, or AttributeError."""

    def attributes(self, fqn: str) -> Sequence[str]:
        """The public names of a module's own attributes."""


class Missing(Exception):
    """Raised in a `where` for a name that is no attribute of the module."""


@dataclass(frozen=True)
class Names:
    """The meaning of names at one place: arguments of a def, then knobs and axes; `model.` its
    facts.

    `here` gives the attributes of one module, inside a `where`.
    """

    knobs: Mapping[str, Any] = field(default_factory=dict)
    axes: Mapping[str, int] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    model: Reader | None = None
    here: Callable[[str], object] | None = None

    def known(self) -> list[str]:
        """Every name with a meaning."""
        return [*self.arguments, *self.axes, *self.knobs]

    def lookup(self, name: str) -> Any:
        """The meaning of a bare name; a Symbol where it has none."""
        if name in self.arguments:
            return self.arguments[name]
        if name in self.axes:
            return AxisSize.of(name, self.axes[name])
        if name in self.knobs:
            return self.knobs[name]
        if self.here is not None:
            try:
                return self.here(name)
            except AttributeError:
                return Symbol(name)
        return R if name == "R" else Symbol(name)


def literal(text: str) -> Any:
    """The value of a literal as written."""
    if text.startswith('"'):
        return text[1:-1]
    if text in ("true", "false"):
        return text == "true"
    digits = text.rstrip("KMGTiBusm")
    if digits != text:
        unit = text[len(digits) :]
        amount = float(digits) * UNITS[unit]
        return Bytes(amount) if unit.endswith("B") else Seconds(amount)
    return int(text) if text.isdigit() else float(text)


def shown(value: object) -> str:
    """A value as the language writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, AxisSize):
        return f"the axis `{value.name}`"
    if isinstance(value, Symbol):
        return f"`{value}`"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return f"[{', '.join(map(shown, value))}]"
    return str(value)


def listed(values: Sequence[object]) -> str:
    """Values in code marks."""
    return quoted(shown(value).strip("`") for value in values)


def refused(
    node: n.Node, code: str, title: str, label: str = "", *helps: str, facts: Facts = ()
) -> NoReturn:
    """Refuse at a node."""
    raise Refusal.of(code, title, Label(node.span, label), helps=helps, facts=facts)


def evaluate(node: n.Node, names: Names) -> Any:
    """The value of an expression.  Refuses S210 (unknown name), S206 (no such attribute of the
    model), S304 (an operation on values it has no meaning for), S107 (division by zero)."""
    match node:
        case n.Lit(text):
            return literal(text)
        case n.Name((word,)):
            return names.lookup(word)
        case n.Name(parts):
            return _named(node, parts, names)
        case n.List(items):
            return tuple(evaluate(item, names) for item in items)
        case n.Group(items):
            values = tuple(evaluate(item, names) for item in items)
            return values if len(values) > 1 else values[0]
        case n.Call():
            return _call(node, names)
        case n.Unary(op, operand):
            return _unary(node, op, evaluate(operand, names), names)
        case n.Chain(items):
            return _chain(node, items, names)
    raise AssertionError(node)


def _named(node: n.Name, parts: tuple[str, ...], names: Names) -> Any:
    if parts[0] == "model" and "model" not in names.arguments:
        return _fact(node, parts, names)
    return names.lookup(node.text) if names.here is not None else Symbol(node.text)


def _fact(node: n.Name, parts: tuple[str, ...], names: Names) -> Any:
    """model.a.b: plain data of the model.  Nothing is called, nothing private is read."""
    if names.model is None:
        return UNKNOWN
    holder: Any = None
    for depth, name in enumerate(parts[1:], 1):
        path = ".".join(parts[:depth])
        if name.startswith("_") or _is_computed(holder, name):
            refused(node, "S206", f"`{path}.{name}` is not a plain value", "only data can be read")
        try:
            holder = names.model.attribute("", name) if depth == 1 else getattr(holder, name)
        except AttributeError:
            there = names.model.attributes("") if depth == 1 else vars(holder)
            public = [known for known in there if not known.startswith("_")]
            near = (guess(name, public, "it has"),) if public else ()
            title = f"`{path}` has no attribute `{name}`"
            refused(node, "S206", title, "", *near, facts=unknown(name, public))
        if inspect.isroutine(holder):
            refused(node, "S206", f"`{path}.{name}` is not a plain value", "only data can be read")
    value = plain(holder)
    if value is None:
        kind = type(holder).__name__
        refused(node, "S206", f"`{node.text}` is a {kind}, not a number or a string")
    return value


def _is_computed(holder: object, name: str) -> bool:
    """Return whether reading the attribute would run code written for it."""
    found = inspect.getattr_static(type(holder), name, None) if holder is not None else None
    return isinstance(found, property) or inspect.isroutine(found)


def reached(holder: object, path: Sequence[str]) -> Any:
    """The plain value at `path` below a value; AttributeError for what is private, computed by
    code of its own, or no plain data."""
    for name in path:
        if name.startswith("_") or _is_computed(holder, name):
            raise AttributeError(name)
        holder = getattr(holder, name)
    value = plain(holder)
    if value is None:
        raise AttributeError(path[-1] if path else "")
    return value


def plain(value: object) -> Any:
    """The value if it is plain data (a list becomes a tuple), else None."""
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple) and all(plain(item) is not None for item in value):
        return tuple(plain(item) for item in value)
    return None


# ---- calls --------------------------------------------------------------------------------


def _call(node: n.Call, names: Names) -> Any:
    given = [a for a in node.args if not isinstance(a, n.Keyword)]
    args = tuple(evaluate(a, names) for a in given)
    named = {a.name: evaluate(a.value, names) for a in node.args if isinstance(a, n.Keyword)}
    if node.name.text == "S":
        return _split(node, (*(_dim(a, names) for a in given[:1]), *args[1:]), named)
    if node.name.text == "P":
        if named or len(args) > 1 or (args and args[0] not in ("sum", "avg", "max")):
            refused(node, "S303", "a partial value is `P(sum)`, `P(avg)` or `P(max)`")
        return P(str(args[0]) if args else "sum")
    return Symbolic(node.name.text, args, tuple(named.items()))


def _dim(node: n.Expr, names: Names) -> Any:
    """The dim of S: a bare name is the dim's own, whatever else is called so, unless it is an
    argument that holds a name or a number: S(seq) where `seq` is a flag means the dim."""
    if isinstance(node, n.Name) and len(node.parts) == 1:
        value = names.arguments.get(node.text)
        holds = isinstance(value, str | int) and not isinstance(value, bool | AxisSize)
        return value if holds else Symbol(node.text)
    return evaluate(node, names)


def _split(node: n.Call, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """S(dim), S(dim, blocks=3), S(dim, blocks=[4096, 1024, 1024])"""
    for name in named:
        if name != "blocks":
            title = f"`S` takes no argument `{name}`"
            refused(node, "S302", title, "", *_meant(name, named[name]), facts=unknown(name))
    if len(args) != 1:
        refused(node, "S305", "`S` takes one dim", "", "by name: `S(out)`, or by position: `S(-1)`")
    dim, blocks = args[0], named.get("blocks", 1)
    if UNKNOWN in (dim, blocks):
        return UNKNOWN
    if isinstance(dim, bool) or not isinstance(dim, int | str):
        title = "the dim of `S` must be a name or an integer"
        refused(node, "S304", title, f"this is {shown(dim)}", facts=bare(dim))
    counts = blocks if isinstance(blocks, tuple) else (blocks,)
    if not counts or any(not _is_int(count) or count < 1 for count in counts):
        title = "`blocks` must be the number of blocks, or a list of their sizes"
        legal = ("`blocks=3`", "`blocks=[8, 4, 4]`")
        refused(node, "S304", title, f"this is {shown(blocks)}", *legal, facts=bare(blocks))
    plain_dim = int(dim) if isinstance(dim, int) else str(dim)
    return S(plain_dim, tuple(map(int, blocks)) if isinstance(blocks, tuple) else int(blocks))


def _meant(name: str, value: object) -> tuple[str, ...]:
    """Return helps for an argument that `S` does not take, with the row or word to use instead."""
    if name != "layout":
        return ("it takes `blocks`",)
    row = f"layers.*.attn  context_parallel(ring, over=cp, layout={value})"
    return (f"the tokens of a batch are distributed by the row of the attention: `{row}`",)


# ---- operators ----------------------------------------------------------------------------

ARITHMETIC: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
}
ORDER: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _unary(node: n.Unary, op: str, value: Any, names: Names) -> Any:
    if value is UNKNOWN:
        return UNKNOWN
    if op == "not":
        return not _truth(node.operand, value, names)
    _number(node.operand, value, names)
    return -value if op == "-" else +value


def _chain(node: n.Chain, items: tuple[Any, ...], names: Names) -> Any:
    op = items[1]
    if op in ("and", "or"):
        values = [evaluate(item, names) for item in items[::2]]
        truths = [v if v is UNKNOWN else _truth(i, v, names) for i, v in zip(items[::2], values)]
        decided = op == "or"
        if decided in truths:
            return decided
        return UNKNOWN if UNKNOWN in truths else not decided
    left = evaluate(items[0], names)
    if op in ORDER:
        return _compare(node, op, left, evaluate(items[2], names), names)
    for operator, item in zip(items[1::2], items[2::2]):
        left = _arithmetic(node, operator, items[0], left, item, names)
    return left


def _arithmetic(
    node: n.Chain, op: str, first: n.Expr, left: Any, item: n.Expr, names: Names
) -> Any:
    right = evaluate(item, names)
    if op == "@":
        refused(node, "S304", "`@` multiplies tensors: it may stand in a pattern only")
    for part, value in ((first, left), (item, right)):
        if value is not UNKNOWN:
            _number(part, value, names)
    if UNKNOWN in (left, right):
        return UNKNOWN
    if right == 0 and op in ("/", "//", "%"):
        word = printer.expr(item)
        help_ = f"set it: `--knob {word}=1`" if word in names.knobs else "divide by another number"
        refused(node, "S107", "division by zero", f"`{word}` is 0", help_)
    result = ARITHMETIC[op](left, right)
    if not isfinite(result) or (isinstance(result, int) and abs(result) >= 10**LONGEST):
        label = f"a number has at most {LONGEST} digits"
        refused(node, "S304", "the result is too large", label)
    kind = Bytes if Bytes in (type(left), type(right)) else Seconds
    return kind(result) if kind in (type(left), type(right)) and op != "/" else result


def _compare(node: n.Chain, op: str, left: Any, right: Any, names: Names) -> Any:
    if UNKNOWN in (left, right):
        return UNKNOWN
    for item, value, other in ((node.items[0], left, right), (node.items[2], right, left)):
        assert isinstance(item, n.Node)
        _is_known(item, value, other, names)
    numbers = _is_number(left) and _is_number(right)
    same = (
        numbers or type(left) is type(right) or (isinstance(left, str) and isinstance(right, str))
    )
    if not same or (op not in ("==", "!=") and not numbers):
        title = f"cannot compare {shown(left)} and {shown(right)}"
        refused(node, "S304", title, facts=bare((left, right)))
    return ORDER[op](left, right)


def _is_known(item: n.Node, value: Any, other: Any, names: Names) -> None:
    """A bare symbol may be compared with a choice that it could be, or with a text."""
    if type(value) is not Symbol:
        return
    if isinstance(other, Choice):
        if other.options and value not in other.options:
            title = f"`{other.knob}` is never `{value}`"
            help_ = guess(value, other.options, "choose one of")
            refused(item, "S303", title, "", help_, facts=unknown(value, other.options))
    elif isinstance(other, Symbol) or not isinstance(other, str):
        _unknown(item, str(value), names)


def _number(item: n.Node, value: Any, names: Names) -> None:
    if type(value) is Symbol:
        _unknown(item, str(value), names)
    if not _is_number(value):
        title = "this operator needs numbers"
        refused(item, "S304", title, f"this is {shown(value)}", facts=bare(value))


def _truth(item: n.Node, value: Any, names: Names) -> bool:
    if type(value) is Symbol:
        _unknown(item, str(value), names)
    if not isinstance(value, bool):
        title = "this must be `true` or `false`"
        refused(item, "S304", title, f"this is {shown(value)}", facts=bare(value))
    return value


def _unknown(item: n.Node, name: str, names: Names) -> NoReturn:
    if names.here is not None:
        raise Missing(name)
    known = names.known()
    helps = (guess(name, known, "the names are"),) if known else ()
    label = "no knob, axis or argument"
    refused(item, "S210", f"unknown name `{name}`", label, *helps, facts=unknown(name, known))
