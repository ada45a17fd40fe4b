"""Values of the language, the meaning of names at one place, and the evaluation of expressions.

Evaluation reads plain data of the model and runs no code of a file.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, NoReturn, Protocol

from schedlang.diagnostics.diagnostic import (
    Facts,
    Label,
    Refusal,
    facts_of_unknown,
    quote_names,
)
from schedlang.ir.placement import P, R, S
from schedlang.language import nodes as n
from schedlang.language import printer
from schedlang.language.grammar import MAX_DIGITS

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
    """A bare name that is no knob, axis or argument; its user checks it against a closed list."""

    __slots__ = ()


def unknown_words(value: Any) -> Facts:
    """Return the facts `unknown` of a value that is a bare word, or a tuple with some."""
    values = value if isinstance(value, tuple) else (value,)
    return tuple(
        fact for item in values if isinstance(item, str) for fact in facts_of_unknown(item)
    )


class Choice(Symbol):
    """The value of a knob of type choice, with the symbols it could have been."""

    knob: str
    options: tuple[str, ...]

    @staticmethod
    def of(value: str, knob: str, options: Sequence[str]) -> Choice:
        """Return a choice of the knob `knob` among `options` (empty: any)."""
        choice = Choice(value)
        choice.knob, choice.options = knob, tuple(options)
        return choice


class AxisSize(int):
    """The size of an axis with the axis's name: a number in arithmetic, a name in `over=`."""

    name: str

    @staticmethod
    def of(name: str, size: int) -> AxisSize:
        """Return the size of the axis `name`."""
        axis = AxisSize(size)
        axis.name = name
        return axis


class Bytes(int):
    """A number of bytes, written 40GiB."""


class Seconds(float):
    """A time in seconds, written 180ms."""


@dataclass(frozen=True)
class SymbolicCall:
    """A call that is not evaluated, such as group(4); the primitive that accepts it interprets
    it."""

    name: str
    args: tuple[Any, ...] = ()
    keywords: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        keywords = [f"{key}={value}" for key, value in self.keywords]
        return f"{self.name}({', '.join([*map(str, self.args), *keywords])})"


class Unknown:
    """A value that cannot be known without the model; all that is computed from it is unknown,
    too."""

    def __repr__(self) -> str:
        return "unknown"


UNKNOWN = Unknown()


class AttributeReader(Protocol):
    """The part of a model that evaluation reads: plain attributes of one module."""

    def attribute(self, fqn: str, name: str) -> object:
        """Return the attribute, or raise AttributeError."""

    def attributes(self, fqn: str) -> Sequence[str]:
        """Return the public names of a module's own attributes."""


class MissingAttribute(Exception):
    """Raised in a `where` for a name that is not an attribute of the module."""


@dataclass(frozen=True)
class Names:
    """The meaning of names at one place: arguments of a def, axes, knobs, and `model.` facts.

    `module_lookup` returns the attributes of one module, inside a `where`.
    """

    knobs: Mapping[str, Any] = field(default_factory=dict)
    axes: Mapping[str, int] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    model: AttributeReader | None = None
    module_lookup: Callable[[str], object] | None = None

    def known_names(self) -> list[str]:
        """Return every name with a meaning."""
        return [*self.arguments, *self.axes, *self.knobs]

    def lookup(self, name: str) -> Any:
        """Return the meaning of a bare name; a Symbol if it has none."""
        if name in self.arguments:
            return self.arguments[name]
        if name in self.axes:
            return AxisSize.of(name, self.axes[name])
        if name in self.knobs:
            return self.knobs[name]
        if self.module_lookup is not None:
            try:
                return self.module_lookup(name)
            except AttributeError:
                return Symbol(name)
        return R if name == "R" else Symbol(name)


def literal(text: str) -> Any:
    """Return the value of a literal as written."""
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


def show_value(value: object) -> str:
    """Format a value as the language writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, AxisSize):
        return f"the axis `{value.name}`"
    if isinstance(value, Symbol):
        return f"`{value}`"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return f"[{', '.join(map(show_value, value))}]"
    return str(value)


def quote_values(values: Sequence[object]) -> str:
    """Format values in code marks."""
    return quote_names(show_value(value).strip("`") for value in values)


def refuse_at(
    node: n.Node, code: str, title: str, label: str = "", *helps: str, facts: Facts = ()
) -> NoReturn:
    """Raise a Refusal at a node."""
    raise Refusal.of(code, title, Label(node.span, label), helps=helps, facts=facts)


def evaluate(node: n.Node, names: Names) -> Any:
    """Evaluate an expression.

    Refuses S210 (unknown name), S206 (no such attribute of the model), S304 (an operation that is
    undefined for its values) and S107 (division by zero).
    """
    match node:
        case n.Lit(text):
            return literal(text)
        case n.Name((word,)):
            return names.lookup(word)
        case n.Name(parts):
            return _evaluate_name(node, parts, names)
        case n.List(items):
            return tuple(evaluate(item, names) for item in items)
        case n.Group(items):
            values = tuple(evaluate(item, names) for item in items)
            return values if len(values) > 1 else values[0]
        case n.Call():
            return _evaluate_call(node, names)
        case n.Unary(op, operand):
            return _evaluate_unary(node, op, evaluate(operand, names), names)
        case n.Chain(items):
            return _evaluate_chain(node, items, names)
    raise AssertionError(node)


def _evaluate_name(node: n.Name, parts: tuple[str, ...], names: Names) -> Any:
    if parts[0] == "model" and "model" not in names.arguments:
        return _read_model_fact(node, parts, names)
    return names.lookup(node.text) if names.module_lookup is not None else Symbol(node.text)


def _read_model_fact(node: n.Name, parts: tuple[str, ...], names: Names) -> Any:
    """Return plain data of the model, `model.a.b`; calls nothing and reads nothing private."""
    if names.model is None:
        return UNKNOWN
    holder: Any = None
    for depth, name in enumerate(parts[1:], 1):
        path = ".".join(parts[:depth])
        if name.startswith("_") or _is_computed(holder, name):
            refuse_at(
                node, "S206", f"`{path}.{name}` is not a plain value", "only data can be read"
            )
        try:
            holder = names.model.attribute("", name) if depth == 1 else getattr(holder, name)
        except AttributeError:
            attributes = names.model.attributes("") if depth == 1 else vars(holder)
            public = [attribute for attribute in attributes if not attribute.startswith("_")]
            title = f"`{path}` has no attribute `{name}`"
            raise Refusal.unknown("S206", title, name, public, "it has", Label(node.span)) from None
        if inspect.isroutine(holder):
            refuse_at(
                node, "S206", f"`{path}.{name}` is not a plain value", "only data can be read"
            )
    value = plain_value(holder)
    if value is None:
        kind = type(holder).__name__
        refuse_at(node, "S206", f"`{node.text}` is a {kind}, not a number or a string")
    return value


def _is_computed(holder: object, name: str) -> bool:
    """Return whether reading the attribute would run code written for it."""
    attribute = inspect.getattr_static(type(holder), name, None) if holder is not None else None
    return isinstance(attribute, property) or inspect.isroutine(attribute)


def read_plain_value(holder: object, path: Sequence[str]) -> Any:
    """Return the plain value at an attribute path below `holder`.

    Raises AttributeError for an attribute that is private, computed by code, or not plain data.
    """
    for name in path:
        if name.startswith("_") or _is_computed(holder, name):
            raise AttributeError(name)
        holder = getattr(holder, name)
    value = plain_value(holder)
    if value is None:
        raise AttributeError(path[-1] if path else "")
    return value


def plain_value(value: object) -> Any:
    """Return the value if it is plain data (a list becomes a tuple), else None."""
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple) and all(plain_value(item) is not None for item in value):
        return tuple(plain_value(item) for item in value)
    return None


# ---- calls --------------------------------------------------------------------------------


def _evaluate_call(node: n.Call, names: Names) -> Any:
    positional = [a for a in node.args if not isinstance(a, n.Keyword)]
    args = tuple(evaluate(a, names) for a in positional)
    keywords = {a.name: evaluate(a.value, names) for a in node.args if isinstance(a, n.Keyword)}
    if node.name.text == "S":
        return _evaluate_split(
            node, (*(_evaluate_dim(a, names) for a in positional[:1]), *args[1:]), keywords
        )
    if node.name.text == "P":
        if keywords or len(args) > 1 or (args and args[0] not in ("sum", "avg", "max")):
            refuse_at(node, "S303", "a partial value is `P(sum)`, `P(avg)` or `P(max)`")
        return P(str(args[0]) if args else "sum")
    return SymbolicCall(node.name.text, args, tuple(keywords.items()))


def _evaluate_dim(node: n.Expr, names: Names) -> Any:
    """Return the dim of S. A bare name is a dim's name, even if a knob or axis has the same name.

    Only an argument that holds a name or a number is replaced by its value: S(seq) where `seq` is a
    flag means the dim.
    """
    if isinstance(node, n.Name) and len(node.parts) == 1:
        value = names.arguments.get(node.text)
        is_dim = isinstance(value, str | int) and not isinstance(value, bool | AxisSize)
        return value if is_dim else Symbol(node.text)
    return evaluate(node, names)


def _evaluate_split(node: n.Call, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """S(dim), S(dim, blocks=3), S(dim, blocks=[4096, 1024, 1024])"""
    for name in keywords:
        if name != "blocks":
            title = f"`S` takes no argument `{name}`"
            refuse_at(
                node,
                "S302",
                title,
                "",
                *_suggest_for_split(name, keywords[name]),
                facts=facts_of_unknown(name),
            )
    if len(args) != 1:
        refuse_at(
            node, "S305", "`S` takes one dim", "", "by name: `S(out)`, or by position: `S(-1)`"
        )
    dim, blocks = args[0], keywords.get("blocks", 1)
    if UNKNOWN in (dim, blocks):
        return UNKNOWN
    if isinstance(dim, bool) or not isinstance(dim, int | str):
        title = "the dim of `S` must be a name or an integer"
        refuse_at(node, "S304", title, f"this is {show_value(dim)}", facts=unknown_words(dim))
    counts = blocks if isinstance(blocks, tuple) else (blocks,)
    if not counts or any(not _is_int(count) or count < 1 for count in counts):
        title = "`blocks` must be the number of blocks, or a list of their sizes"
        legal = ("`blocks=3`", "`blocks=[8, 4, 4]`")
        refuse_at(
            node,
            "S304",
            title,
            f"this is {show_value(blocks)}",
            *legal,
            facts=unknown_words(blocks),
        )
    plain_dim = int(dim) if isinstance(dim, int) else str(dim)
    return S(plain_dim, tuple(map(int, blocks)) if isinstance(blocks, tuple) else int(blocks))


def _suggest_for_split(name: str, value: object) -> tuple[str, ...]:
    """Return helps for an argument that `S` does not accept, with the row or word to use
    instead."""
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
COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
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


def _evaluate_unary(node: n.Unary, op: str, value: Any, names: Names) -> Any:
    if value is UNKNOWN:
        return UNKNOWN
    if op == "not":
        return not _require_bool(node.operand, value, names)
    _require_number(node.operand, value, names)
    return -value if op == "-" else +value


def _evaluate_chain(node: n.Chain, items: tuple[Any, ...], names: Names) -> Any:
    op = items[1]
    if op in ("and", "or"):
        values = [evaluate(item, names) for item in items[::2]]
        truths = [
            v if v is UNKNOWN else _require_bool(i, v, names) for i, v in zip(items[::2], values)
        ]
        deciding = op == "or"
        if deciding in truths:
            return deciding
        return UNKNOWN if UNKNOWN in truths else not deciding
    left = evaluate(items[0], names)
    if op in COMPARISONS:
        return _apply_comparison(node, op, left, evaluate(items[2], names), names)
    for operator, item in zip(items[1::2], items[2::2]):
        left = _apply_operator(node, operator, items[0], left, item, names)
    return left


def _apply_operator(
    node: n.Chain, op: str, first: n.Expr, left: Any, item: n.Expr, names: Names
) -> Any:
    right = evaluate(item, names)
    if op == "@":
        refuse_at(node, "S304", "`@` multiplies tensors: it may stand in a pattern only")
    for part, value in ((first, left), (item, right)):
        if value is not UNKNOWN:
            _require_number(part, value, names)
    if UNKNOWN in (left, right):
        return UNKNOWN
    if right == 0 and op in ("/", "//", "%"):
        text = printer.expr(item)
        help_ = f"set it: `--knob {text}=1`" if text in names.knobs else "divide by another number"
        refuse_at(node, "S107", "division by zero", f"`{text}` is 0", help_)
    result = ARITHMETIC[op](left, right)
    if not isfinite(result) or (isinstance(result, int) and abs(result) >= 10**MAX_DIGITS):
        label = f"a number has at most {MAX_DIGITS} digits"
        refuse_at(node, "S304", "the result is too large", label)
    kind = Bytes if Bytes in (type(left), type(right)) else Seconds
    return kind(result) if kind in (type(left), type(right)) and op != "/" else result


def _apply_comparison(node: n.Chain, op: str, left: Any, right: Any, names: Names) -> Any:
    if UNKNOWN in (left, right):
        return UNKNOWN
    for item, value, other in ((node.items[0], left, right), (node.items[2], right, left)):
        assert isinstance(item, n.Node)
        _check_symbol(item, value, other, names)
    numbers = _is_number(left) and _is_number(right)
    comparable = (
        numbers or type(left) is type(right) or (isinstance(left, str) and isinstance(right, str))
    )
    if not comparable or (op not in ("==", "!=") and not numbers):
        title = f"cannot compare {show_value(left)} and {show_value(right)}"
        refuse_at(node, "S304", title, facts=unknown_words((left, right)))
    return COMPARISONS[op](left, right)


def _check_symbol(item: n.Node, value: Any, other: Any, names: Names) -> None:
    """Check that a bare symbol is compared with a choice that it could be, or with a text."""
    if type(value) is not Symbol:
        return
    if isinstance(other, Choice):
        if other.options and value not in other.options:
            title = f"`{other.knob}` is never `{value}`"
            choices, label = other.options, Label(item.span)
            raise Refusal.unknown("S303", title, value, choices, "choose one of", label)
    elif isinstance(other, Symbol) or not isinstance(other, str):
        _refuse_unknown(item, str(value), names)


def _require_number(item: n.Node, value: Any, names: Names) -> None:
    if type(value) is Symbol:
        _refuse_unknown(item, str(value), names)
    if not _is_number(value):
        title = "this operator needs numbers"
        refuse_at(item, "S304", title, f"this is {show_value(value)}", facts=unknown_words(value))


def _require_bool(item: n.Node, value: Any, names: Names) -> bool:
    if type(value) is Symbol:
        _refuse_unknown(item, str(value), names)
    if not isinstance(value, bool):
        title = "this must be `true` or `false`"
        refuse_at(item, "S304", title, f"this is {show_value(value)}", facts=unknown_words(value))
    return value


def _refuse_unknown(item: n.Node, name: str, names: Names) -> NoReturn:
    if names.module_lookup is not None:
        raise MissingAttribute(name)
    title, label = f"unknown name `{name}`", Label(item.span, "no knob, axis or argument")
    raise Refusal.unknown("S210", title, name, names.known_names(), "the names are", label)
