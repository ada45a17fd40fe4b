"""Conversions between Python and the language: Python values to syntax, and rows to Python calls.

Used by `Schedule`, which records calls as syntax, and for help texts shown to a Python caller.
"""

from __future__ import annotations

import dataclasses
import keyword
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from schedlang.diagnostics.diagnostic import HELP_SPELLERS, Label, Refusal
from schedlang.diagnostics.source import NOWHERE, Source, Span, python_span
from schedlang.ir.placement import P, Replicate, S
from schedlang.ir.primitive import Primitive, find
from schedlang.language import nodes as n
from schedlang.language import printer
from schedlang.language.kinds import signature_of
from schedlang.language.syntax import KEYWORDS, parse
from schedlang.language.value import UNITS, Names, SymbolicCall, evaluate

QUANTITY = re.compile(rf"\d+(\.\d+)?({'|'.join(UNITS)})")  # bytes or seconds: "40GiB"


def _make_operator(
    op: str, swapped: bool = False
) -> Callable[[RecordedValue, object], RecordedValue]:
    """Make the method of an operator; `swapped`: the reflected one, such as `__radd__`."""

    def method(self: RecordedValue, other: object) -> RecordedValue:
        pair = [self._node, lift(other)]
        left, right = pair[::-1] if swapped else pair
        return RecordedValue(_chain(left, op, right), self._names)

    return method


class RecordedValue:
    """A value with the expression it was written as: a knob, a fact of the model, or their
    arithmetic.

    In Python (`if`, `range`, comparisons) it is its value; in a schedule it is recorded as the
    expression.
    """

    def __init__(self, node: n.Expr, names: Callable[[], Names]) -> None:
        self._node, self._names = node, names

    @property
    def value(self) -> Any:
        """The value of the expression under the current names."""
        return evaluate(self._node, self._names())

    __add__ = _make_operator("+")
    __radd__ = _make_operator("+", True)
    __sub__ = _make_operator("-")
    __rsub__ = _make_operator("-", True)
    __mul__ = _make_operator("*")
    __rmul__ = _make_operator("*", True)
    __truediv__ = _make_operator("/")
    __floordiv__ = _make_operator("//")
    __rtruediv__ = _make_operator("/", True)
    __rfloordiv__ = _make_operator("//", True)
    __mod__ = _make_operator("%")
    __rmod__ = _make_operator("%", True)
    __eq__ = _make_operator("==")  # type: ignore[assignment]
    __ne__ = _make_operator("!=")  # type: ignore[assignment]
    __lt__ = _make_operator("<")
    __le__ = _make_operator("<=")
    __gt__ = _make_operator(">")
    __ge__ = _make_operator(">=")

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


class RecordedFacts:
    """`sch.model.config.n_head`: reads plain data of the model and records the path."""

    def __init__(self, parts: tuple[str, ...], holder: object, names: Callable[[], Names]) -> None:
        self._parts, self._holder, self._facts = parts, holder, names

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        value, parts = getattr(self._holder, name), (*self._parts, name)
        if isinstance(value, bool | int | float | str):
            return RecordedValue(n.Name(parts, span=python_span()), self._facts)
        return RecordedFacts(parts, value, self._facts)


PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "//": 2, "%": 2}  # comparisons bind less: 0


def _chain(left: n.Expr, op: str, right: n.Expr) -> n.Chain:
    """Return `left op right` with only the parentheses that keep its meaning."""
    level = PRECEDENCE.get(op, 0)
    items: tuple[n.Expr | str, ...] = (left,)
    if isinstance(left, n.Chain):
        binds = _precedence(left)
        same_level = binds == level > 0
        items = left.items if same_level else (left if binds > level else n.Group((left,)),)
    if isinstance(right, n.Chain) and _precedence(right) <= level:
        right = n.Group((right,))
    return n.Chain((*items, op, right))


def _precedence(chain: n.Chain) -> int:
    op = chain.items[1]
    return PRECEDENCE.get(op, 0) if isinstance(op, str) else 0


def lift(value: object, span: Span = NOWHERE) -> n.Expr:
    """Return the expression for a Python value; a text becomes a bare name where it can be one."""
    if isinstance(value, RecordedValue):
        return n.with_spans(value._node, span) if span else value._node
    if isinstance(value, n.Lit):
        return value
    if isinstance(value, bool):
        return n.Lit(str(value).lower(), span=span)
    if isinstance(value, int | float):
        return _number(value, span)
    if isinstance(value, str):
        return _text(value, span)
    if isinstance(value, list | tuple):
        items = tuple(lift(item, span) for item in value)
        is_list = isinstance(value, tuple) and len(items) > 1
        return n.Group(items, span=span) if is_list else n.List(items, span=span)
    if isinstance(value, Replicate):
        return n.Name(("R",), span=span)
    if isinstance(value, P):
        return call("P", (value.op,), {}, span)
    if isinstance(value, S):
        blocks = list(value.blocks) if isinstance(value.blocks, tuple) else value.blocks
        return call("S", (value.dim,), {} if blocks == 1 else {"blocks": blocks}, span)
    if isinstance(value, SymbolicCall):
        return call(value.name, value.args, dict(value.keywords), span)
    _refuse_value(value, span)


def _number(value: int | float, span: Span) -> n.Expr:
    if isinstance(value, float) and not math.isfinite(value):
        _refuse_value(value, span)
    literal = n.Lit(repr(abs(value)), span=span)
    return n.Unary("-", literal, span=span) if value < 0 else literal


def _text(value: str, span: Span) -> n.Expr:
    parts = tuple(value.split("."))
    if all(p.isascii() and p.isidentifier() and p not in KEYWORDS for p in parts):
        return n.Name(parts, span=span)
    if '"' in value or "\n" in value:
        _refuse_value(value, span)
    if QUANTITY.fullmatch(value):
        return n.Lit(value, span=span)
    return n.Lit(f'"{value}"', span=span)


def _refuse_value(value: object, span: Span) -> NoReturn:
    kind = type(value).__name__
    title = "this value has no form in a schedule"
    label = Label(span or python_span(), f"a {kind}: {str(value)[:60]!r}")
    help_ = "numbers, names, strings, lists, `S(...)`, `R` and `P(...)` have one"
    raise Refusal.of("S304", title, label, helps=(help_,))


def call(name: str, args: Any, kwargs: Any, span: Span = NOWHERE) -> n.Call:
    """Return the call `name(*args, **named)`; `except_=` stands for a word that Python reserves."""
    nodes: list[n.Expr | n.Keyword] = [lift(value, span) for value in args]
    for key, value in kwargs.items():
        nodes.append(n.Keyword(key.rstrip("_"), lift(value, span), span=span))
    return n.Call(n.Name(tuple(name.split(".")), span=span), tuple(nodes), span=span)


def row(paths: Sequence[n.Path], call: n.Call, remark: str = "") -> n.Rule | n.Do:
    """Return the row of a call at modules, or on the whole scope without paths; its span is the
    call's.

    `remark`: its comment.
    """
    span, remarks = call.span, (f"# {remark}",) if remark else ()
    if paths:
        return n.Rule(tuple(paths), call, remarks=remarks, span=span)
    path = n.Path(tuple(n.Seg(part, span=span) for part in call.name.parts), span=span)
    return n.Do(path, call, remarks=remarks, span=span)


def mesh(
    axes: Mapping[str, object], on: str | None = None, span: Span = NOWHERE, *remarks: str
) -> n.Mesh:
    """Return the declaration of a mesh; `remarks` are the lines above it."""
    args = (n.Keyword(name, lift(size, span), span=span) for name, size in axes.items())
    return n.Mesh(tuple(args), on, remarks=remarks, span=span)


def header(class_name: str) -> n.Header:
    """Return the header of a schedule for models of a class."""
    return n.Header("1", class_name if class_name.isidentifier() else None)


def call_of(primitive: Primitive, span: Span = NOWHERE) -> n.Call:
    """Return the call that makes a bound primitive, with the arguments that differ from the
    defaults."""
    signature = signature_of(type(primitive))
    args: list[object] = []
    kwargs: dict[str, object] = {}
    in_order = True  # until a positional field is left out
    for field in dataclasses.fields(primitive):  # type: ignore[arg-type]
        value = getattr(primitive, field.name)
        if field.name == signature.many:
            args += value
        elif field.name == signature.rest:
            kwargs |= dict(value)
        elif value == field.default:
            in_order = in_order and field.kw_only is True
        elif in_order and not field.kw_only:
            args.append(value)
        else:
            kwargs[field.name] = value
    return call(type(primitive).__name__, args, kwargs, span)


QUOTED = re.compile(r"`([^`]+)`")
STEP_HEAD = re.compile(r'step ("[^"]*") relax\(([^)]*)\) \{')
LOSS = re.compile(r"add to the model file:\n +def loss\(output, batch\):\n +return (.*)")
RELAX = re.compile(r"relax\(([^)]*)\)")
OPTION = re.compile(r"--(knob|mesh) (.+)")
PYTHON_TEXT = re.compile(r"\bsch\b|^with |^(\w+)=\1$")  # text that is Python already
ARGUMENT = re.compile(r"\w+=[^=].*")
DOTS, PLACEHOLDER = (
    re.compile(r"\.\.\.?"),
    "what_you_choose",
)  # `micro=...` leaves a place to fill in
_VERIFY = '"verify"'
PLACEMENT_CALLS = ("S", "P")  # placements: called alike in Python and in a schedule


class _NoPythonForm(Exception):
    """Raised for a statement that has no one-line counterpart in Python."""


def spell_in_python(text: str) -> str:
    """Return a help text with each schedule fragment in it replaced by the equivalent Python
    call."""
    if loss := LOSS.fullmatch(text):
        return f"give one: `loss=lambda output, batch: {loss[1]}`"
    return QUOTED.sub(lambda match: f"`{_spell_code(match[1])}`", text)


def _spell_code(text: str) -> str:
    if opened := STEP_HEAD.fullmatch(text):
        return f"with sch.step({opened[1]}, {_relax_argument(opened[2])}):"
    if relaxed := RELAX.fullmatch(text):
        return f"sch.step(..., {_relax_argument(relaxed[1])})"
    if option := OPTION.fullmatch(text):
        settings = ", ".join(option[2].split(","))
        return f"sch.{'set' if option[1] == 'knob' else 'mesh'}({settings})"
    try:
        if PYTHON_TEXT.search(text):
            return text
        if ARGUMENT.fullmatch(text):
            args = [
                arg
                for row in _parse_statements(f"x({text})")
                if isinstance(row, n.Do)
                for arg in row.call.args
            ]
            return ", ".join(_format_arguments(args)).replace(PLACEHOLDER, "...")
        calls = [call for item in _parse_statements(text) for call in _python_calls(item)]
    except (Refusal, _NoPythonForm, AttributeError):
        return text
    return "; ".join(calls).replace(PLACEHOLDER, "...") or text


def _relax_argument(names: str) -> str:
    names_list = [f'"{name.strip()}"' for name in names.split(",")]
    return f"relax={names_list[0]}" if len(names_list) == 1 else f"relax=[{', '.join(names_list)}]"


def _parse_statements(text: str) -> Sequence[n.Item]:
    """Parse text as the statements of a schedule; raises Refusal for anything else."""
    quoted = re.split(r'("[^"]*")', text)
    filled = [part if part[:1] == '"' else DOTS.sub(PLACEHOLDER, part) for part in quoted]
    return parse(Source("", f"schedule 1\n{''.join(filled)}\n")).items


def _python_calls(item: n.Item) -> Iterator[str]:
    match item:
        case n.Rule(call=call):
            for path in item.paths:
                yield f'sch["{printer.path(path)}"].{_call(call)}'
        case n.Do(call=call):
            primitive = find(call.name.text)
            if primitive is None:
                raise _NoPythonForm  # a Python function of the model file
            if primitive.__name__ == "verify":  # `sch.verify(...)` would verify now
                yield f"sch.row({', '.join([_VERIFY, *_format_arguments(call.args)])})"
            else:  # a module's verb follows the module in question
                yield f"{'sch' * (primitive.takes == 'model')}.{_call(call)}"
        case n.Mesh(args, on):
            names = [*_format_arguments(args), *([f'on="{on}"'] if on else [])]
            yield f"sch.mesh({', '.join(names)})"
        case n.Expect(test) | n.Require(test):
            verb = type(item).__name__.lower()
            yield f"sch.{verb}({printer.expr(test)!r})".replace("'", '"')
        case n.Use(path, None, None):
            yield f'sch.use("{path}")'
        case _:
            raise _NoPythonForm


def _call(call: n.Call) -> str:
    return f"{call.name.text}({', '.join(_format_arguments(call.args))})"


def _format_arguments(args: Sequence[n.Node]) -> Iterator[str]:
    for arg in args:
        if isinstance(arg, n.Keyword):
            name = f"{arg.name}_" if keyword.iskeyword(arg.name) else arg.name
            yield f"{name}={_format_argument_value(arg.value)}"
        else:
            yield _format_argument_value(arg)


def _format_argument_value(node: n.Node) -> str:
    """Format an argument as Python writes it: a bare name is a string there."""
    match node:
        case n.Lit(text):
            constant = {"true": "True", "false": "False"}.get(text)
            number = re.fullmatch(r"[\d.e+-]+", text) is not None
            return constant or (text if number or text[:1] == '"' else f'"{text}"')
        case n.Name(parts):
            is_constant = parts in (("R",), (PLACEHOLDER,), ("True",), ("False",), ("None",))
            return node.text if is_constant else f'"{node.text}"'
        case n.List(items):
            return f"[{', '.join(map(_format_argument_value, items))}]"
        case n.Group(items) if len(items) > 1:
            return f"({', '.join(map(_format_argument_value, items))})"
        case n.Unary("-", operand):
            return f"-{_format_argument_value(operand)}"
        case n.Call(name) if name.text in PLACEMENT_CALLS:
            return _call(node)
    raise _NoPythonForm


HELP_SPELLERS.append(spell_in_python)
