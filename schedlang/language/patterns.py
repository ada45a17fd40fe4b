"""Patterns: functions of tensors that a schedule declares, `pattern name(x, b) { gelu(x + b) }`.

Parsed from the syntax tree here; fusion matches them against the graph of a module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias, Union

from schedlang.diagnostics.diagnostic import Facts, Label, Refusal
from schedlang.diagnostics.source import Source
from schedlang.language import nodes as n
from schedlang.language import printer
from schedlang.language.syntax import parse

# the functions of torch that a pattern may use, and the order of their positional arguments there;
# other arguments (shapes, flags) are given by name (`NAMED_ARGUMENTS`), or match anything
FUNCTIONS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            *("gelu", "relu", "silu", "sigmoid", "tanh", "erf", "exp", "log", "sqrt", "rsqrt"),
            *("square", "abs", "neg", "softplus", "mish", "relu6", "hardswish", "elu"),
            *("leaky_relu", "logsigmoid", "reciprocal", "sin", "cos", "to"),
        ),
        ("input",),
    ),
    **dict.fromkeys(
        ("add", "sub", "mul", "div", "matmul", "maximum", "minimum"), ("input", "other")
    ),
    "pow": ("input", "exponent"),
    "mean": ("input", "dim"),
    "sum": ("input", "dim"),
    "softmax": ("input", "dim"),
    "log_softmax": ("input", "dim"),
    "dropout": ("input", "p"),
    "layer_norm": ("input", "weight", "bias"),
    "rms_norm": ("input", "weight"),
    "linear": ("input", "weight", "bias"),
    "masked_fill": ("input", "mask", "value"),
    "where": ("condition", "input", "other"),
    "clamp": ("input", "min", "max"),
}
NAMED_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "gelu": ("approximate",),
    "layer_norm": ("eps",),
    "rms_norm": ("eps",),
    "to": ("dtype",),
    "elu": ("alpha",),
    "leaky_relu": ("negative_slope",),
    "mean": ("keepdim",),
    "sum": ("keepdim",),
}
COMMUTATIVE = frozenset({"add", "mul", "maximum", "minimum"})
OPERATORS: Mapping[str, str] = {"+": "add", "-": "sub", "*": "mul", "/": "div", "@": "matmul"}


@dataclass(frozen=True)
class Var:
    """A parameter of a pattern: matches any value, the same value at every use."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Const:
    """A literal: matches only an equal value."""

    value: Any

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True)
class Op:
    """A function of torch and its arguments by name; an argument that is left out may be
    anything."""

    name: str
    arguments: tuple[tuple[str, Term], ...]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(str(term) for _, term in self.arguments)})"

    @property
    def size(self) -> int:
        """The number of functions in the pattern."""
        return 1 + sum(term.size for _, term in self.arguments if isinstance(term, Op))


Term: TypeAlias = Union[Var, Const, Op]  # noqa: UP007


@dataclass(frozen=True)
class Pattern:
    """A declared pattern; `text` is its declaration in canonical form."""

    name: str
    params: tuple[str, ...]
    body: Op
    text: str


def pattern_of(node: n.Pattern) -> Pattern:
    """Return the pattern of a declaration; refuses S885 where the declaration is not a valid
    pattern."""
    params = tuple(p.name for p in node.params)
    for param in node.params:
        if param.type or param.default is not None:
            _refuse("a pattern's parameters are tensors", param, f"write `{param.name}`")
    body = _term(node.body, params)
    if not isinstance(body, Op):
        _refuse(
            "a pattern must be a function of its parameters", node.body, "for example `gelu(x + b)`"
        )
    idle = [name for name in params if name not in _names(body)]
    if idle:
        _refuse(f"the pattern does not use `{idle[0]}`", node, "drop it")
    return Pattern(node.name, params, body, printer.head(node))


def parse_pattern(text: str) -> Pattern:
    """Parse the text of a declaration into a pattern."""
    return pattern_of(parse_declaration(text))


def parse_declaration(text: str) -> n.Pattern:
    """Parse the text of a declaration, with or without its keyword `pattern`, into a syntax
    node."""
    declaration = text if text.lstrip().startswith("pattern ") else f"pattern {text}"
    items = parse(Source("<string>", f"schedule 1\n{declaration}\n")).items
    if len(items) != 1 or not isinstance(items[0], n.Pattern):
        raise Refusal.of(
            "S885",
            "this is not a single pattern",
            helps=("write `bias_gelu(x, b) { gelu(x + b) }`",),
        )
    return items[0]


def _literal(text: str, node: n.Node) -> Any:
    try:
        return {"true": True, "false": False}[text] if text in ("true", "false") else _plain(text)
    except ValueError:
        _refuse(
            f"`{text}` is not a number", node, "a pattern may contain plain numbers and strings"
        )


def _plain(text: str) -> Any:
    if text.startswith('"'):
        return text[1:-1]
    return int(text) if text.isdigit() else float(text)


def _names(term: Term) -> set[str]:
    if isinstance(term, Op):
        return {name for _, inner in term.arguments for name in _names(inner)}
    return {term.name} if isinstance(term, Var) else set()


def _term(node: n.Node, params: Sequence[str]) -> Term:
    match node:
        case n.Lit(text):
            return Const(_literal(text, node))
        case n.Name(parts):
            name = ".".join(parts)
            return Var(name) if name in params else Const(name)
        case n.Group((inner,)):
            return _term(inner, params)
        case n.Unary("-", operand):
            term = _term(operand, params)
            if isinstance(term, Const) and isinstance(term.value, int | float):
                return Const(-term.value)
            return Op("neg", (("input", term),))
        case n.Chain(items):
            return _chain(node, items, params)
        case n.Call():
            return _call(node, params)
    _refuse("a pattern may contain functions, operators and literals", node)


def _chain(node: n.Node, items: Sequence[Any], params: Sequence[str]) -> Term:
    left = _term(items[0], params)
    for op, right in zip(items[1::2], items[2::2], strict=True):
        if op not in OPERATORS:
            _refuse(
                f"`{op}` is not allowed in a pattern", node, f"allowed are {', '.join(OPERATORS)}"
            )
        left = Op(OPERATORS[op], (("input", left), ("other", _term(right, params))))
    return left


def _call(node: n.Call, params: Sequence[str]) -> Op:
    name = node.name.text
    if name not in FUNCTIONS:
        title = f"the function `{name}` is not allowed in a pattern"
        raise Refusal.unknown("S885", title, name, FUNCTIONS, "it knows", Label(node.name.span))
    order, operands = FUNCTIONS[name], {}
    unbound = list(order)
    for arg in node.args:
        keyword = arg.name if isinstance(arg, n.Keyword) else unbound[0] if unbound else ""
        if keyword not in (*order, *NAMED_ARGUMENTS.get(name, ())):
            accepted = ", ".join(
                (*order, *(f"{option}=" for option in NAMED_ARGUMENTS.get(name, ())))
            )
            _refuse(f"`{name}` takes no such argument", arg, f"it takes {accepted}")
        if keyword in unbound:
            unbound.remove(keyword)
        operands[keyword] = _term(arg.value if isinstance(arg, n.Keyword) else arg, params)
    if order[0] not in operands:
        _refuse(f"`{name}` needs an argument", node, f"write `{name}(x)`")
    return Op(name, tuple(operands.items()))


def _refuse(title: str, node: n.Node, *helps: str, facts: Facts = ()) -> NoReturn:
    raise Refusal.of("S885", title, Label(node.span), helps=helps, facts=facts)
