"""The types of a primitive's arguments, and the binding of a call's arguments to them.

A mistake is refused with the argument's place, and with legal values where they can be listed.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NewType, TypeVar, Union
from weakref import WeakKeyDictionary

from schedlang.diagnostics.diagnostic import (
    Diagnostic,
    Facts,
    Label,
    Refusal,
    facts_of_unknown,
    find_closest,
    quote_names,
    suggest_name,
)
from schedlang.diagnostics.source import Span
from schedlang.ir import placement
from schedlang.ir.primitive import Primitive
from schedlang.language.value import (
    UNKNOWN,
    AxisSize,
    Bytes,
    Seconds,
    Symbol,
    SymbolicCall,
    show_value,
    unknown_words,
)

T = TypeVar("T")

REST, MANY = "free keywords", "any number"
# A mesh axis or a view; and several of them, a single one may stand without brackets.
Axis = NewType("Axis", str)
Axes = tuple[Axis, ...]
# All keyword arguments that are not fields, as (name, value) pairs: shard(weight=S(out), bias=R).
Rest = Annotated[tuple[tuple[str, T], ...], REST]
# All positional arguments: verify(forward, backward).
Many = Annotated[tuple[T, ...], MANY]


class Mismatch(Exception):
    """A value that does not have the demanded type: the expected type in words, and the choices if
    any.

    `culprit`: the one element of a list that does not fit, in a tuple of one.
    """

    def __init__(
        self, expected: str, choices: Sequence[str] = (), culprit: tuple[Any, ...] = ()
    ) -> None:
        super().__init__(expected)
        self.expected: str = expected
        self.choices: tuple[str, ...] = tuple(choices)
        self.culprit: tuple[Any, ...] = culprit


class UnknownAxis(Exception):
    """A name that is not an axis of the mesh."""


def convert(kind: Any, value: Any, axes: Mapping[str, int]) -> Any:
    """Convert a value to the type `kind`; raise Mismatch or NoAxis."""
    if value is UNKNOWN:
        return UNKNOWN
    if kind is Axis:
        name = value.name if isinstance(value, AxisSize) else value
        if not isinstance(name, str):
            raise Mismatch(describe(Axis))
        if name not in axes and name is value:
            raise UnknownAxis(name)
        return str(name)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return convert(args[0], value, axes)
    if origin is Literal:
        literal = value.name if isinstance(value, AxisSize) and value.name in args else value
        for choice in args:
            if choice == literal and isinstance(choice, bool) == isinstance(literal, bool):
                return choice
        raise Mismatch(f"one of {quote_names(map(str, args), 12)}", [str(c) for c in args])
    if origin in (Union, types.UnionType):
        return _convert_union(args, value, axes)
    if origin is tuple:
        return _convert_tuple(args, value, axes)
    return _convert_plain(kind, value)


def _convert_union(kinds: tuple[Any, ...], value: Any, axes: Mapping[str, int]) -> Any:
    expected: list[str] = []
    choices: list[str] = []
    for kind in kinds:
        if kind is type(None):
            if value is None or value == Symbol("none"):
                return None
            continue
        try:
            return convert(kind, value, axes)
        except UnknownAxis:
            if len(kinds) == 1 or type(None) in kinds:
                raise
            expected.append(describe(kind))
        except Mismatch as mismatch:
            expected.append(mismatch.expected)
            choices += mismatch.choices
    raise Mismatch(" or ".join(dict.fromkeys(expected)), choices)


def _convert_tuple(args: tuple[Any, ...], value: Any, axes: Mapping[str, int]) -> tuple[Any, ...]:
    if args[0] is Axis and not isinstance(value, tuple):
        value = (value,)
    if not isinstance(value, tuple):
        raise Mismatch(describe(tuple[args]))  # type: ignore[valid-type]
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_convert_element(args[0], item, axes) for item in value)
    if len(value) != len(args):
        raise Mismatch(describe(tuple[args]))  # type: ignore[valid-type]
    return tuple(convert(kind, item, axes) for kind, item in zip(args, value))


def _convert_element(kind: Any, item: Any, axes: Mapping[str, int]) -> Any:
    try:
        return convert(kind, item, axes)
    except Mismatch as mismatch:
        raise Mismatch(mismatch.expected, mismatch.choices, (item,)) from None


def _convert_plain(kind: Any, value: Any) -> Any:
    if kind is str and isinstance(value, AxisSize):
        return value.name
    if kind is str and isinstance(value, str):
        return str(value)
    if isinstance(value, bool) or kind is bool:
        if kind is bool and isinstance(value, bool):
            return value
        raise Mismatch(describe(kind))
    if kind is int and isinstance(value, int):
        return int(value)
    if kind is float and isinstance(value, int | float):
        return float(value)
    if isinstance(kind, type) and isinstance(value, kind) and kind not in (str, int, float):
        return value
    raise Mismatch(describe(kind))


TYPE_NAMES: Mapping[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "`true` or `false`",
    str: "a name or a string",
    Axis: "an axis of the mesh",
    placement.S: "`S(dim)`",
    placement.Replicate: "`R`",
    placement.P: "`P(sum)`",
    Bytes: "a size such as `25MiB`",
    Seconds: "a time such as `10ms`",
    SymbolicCall: "a call",
    type(None): "`none`",
}


PLURALS: Mapping[Any, str] = {int: "integers", float: "numbers", str: "names", Axis: "axes"}


def describe(kind: Any) -> str:
    """Describe in words the values that a type admits."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind in TYPE_NAMES:
        return TYPE_NAMES[kind]
    if origin is Annotated:
        return describe(args[0])
    if origin is Literal:
        return f"one of {quote_names(map(str, args), 12)}"
    if origin in (Union, types.UnionType):
        return " or ".join(describe(arg) for arg in args if arg is not type(None))
    if origin is tuple:
        plural = PLURALS.get(args[0]) if args else None
        return f"a list of {plural}" if plural else f"a list, each {describe(args[0])}"
    return str(getattr(kind, "__name__", kind))


@dataclass(frozen=True)
class Argument:
    """One argument of a call: its name (None: positional), value and place.

    `word`: the bare name that the value was written as, or "".
    """

    name: str | None
    value: Any
    span: Span
    value_span: Span  # the place of the value alone
    word: str = ""


@dataclass(frozen=True)
class CallSignature:
    """The arguments that a primitive accepts, read from its annotations.

    `keywords` may stand before `=`; `rest` collects all other keywords, `many` all positional
    arguments.
    """

    types: Mapping[str, Any]
    keywords: tuple[str, ...]
    positional: tuple[str, ...]
    required: tuple[str, ...]
    rest: str | None = None
    many: str | None = None


_SURFACES: WeakKeyDictionary[type[Any], CallSignature] = WeakKeyDictionary()


def signature_of(primitive: type[Any]) -> CallSignature:
    """Return the arguments of a primitive; cached, as reading annotations takes longer than
    binding."""
    if primitive in _SURFACES:
        return _SURFACES[primitive]
    hints = typing.get_type_hints(primitive, include_extras=True)
    init_fields = [f for f in dataclasses.fields(primitive) if f.init]
    kinds = {f.name: hints[f.name] for f in init_fields}
    marks = {name: getattr(kind, "__metadata__", ("",))[0] for name, kind in kinds.items()}
    special = [name for name, mark in marks.items() if mark in (REST, MANY)]
    missing = dataclasses.MISSING
    _SURFACES[primitive] = CallSignature(
        kinds,
        tuple(name for name in kinds if name not in special),
        tuple(f.name for f in init_fields if not f.kw_only and f.name not in special),
        tuple(
            f.name
            for f in init_fields
            if f.default is missing and f.default_factory is missing and f.name not in special
        ),
        next((name for name in special if marks[name] == REST), None),
        next((name for name in special if marks[name] == MANY), None),
    )
    return _SURFACES[primitive]


def bind(
    primitive: type[Primitive], arguments: Sequence[Argument], span: Span, axes: Mapping[str, int]
) -> Primitive:
    """Return the primitive with its arguments bound.

    Refuses S302 (no such argument), S303 (unknown symbol), S304 (another type), S305 (missing) and
    S204 (no such axis): all independent mistakes of the call at once.
    """
    binder = Binder(primitive, signature_of(primitive), span, axes)
    if not binder.bind_arguments(arguments):
        from schedlang.language.suggest import suggest_call

        raise Refusal(*suggest_call(binder, arguments))
    return binder.build()


@dataclass(eq=False)
class Binder:
    """Binds the arguments of one call, and collects the problems."""

    primitive: type[Primitive]
    surface: CallSignature
    span: Span
    axes: Mapping[str, int]
    problems: list[Diagnostic] = field(default_factory=list)
    bound: dict[str, Any] = field(default_factory=dict)
    rest: list[tuple[str, Any]] = field(default_factory=list)
    many: list[Any] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The primitive's name in the language."""
        return self.primitive.__name__

    def build(self) -> Primitive:
        """Return the primitive with the arguments that were bound without a problem."""
        if self.surface.rest:
            self.bound[self.surface.rest] = tuple(self.rest)
        if self.surface.many and self.many:
            self.bound[self.surface.many] = tuple(self.many)
        return self.primitive(**self.bound)

    def bind_arguments(self, arguments: Sequence[Argument]) -> bool:
        """Bind the arguments; return whether there was no problem."""
        unbound = list(self.surface.positional)
        for argument in arguments:
            name = argument.name
            if name is not None and name not in self.surface.keywords:
                self._bind_keyword(name, argument)
            elif name is None and self.surface.many:
                self._bind_several(self.many, self.surface.many, argument)
            elif name is None and not unbound:
                self._report_surplus(argument)
            elif (field := name or unbound.pop(0)) in self.bound:
                self._report_duplicate(field, argument)
            else:
                self.bound[field] = None  # tried, whatever comes of it
                for value in self._convert(field, self.surface.types[field], argument):
                    self.bound[field] = value
        missing = [name for name in self.surface.required if name not in self.bound]
        if missing:
            self._report_missing(missing)
        return not self.problems

    def _add_problem(
        self, code: str, title: str, label: Label, *helps: str, note: str = "", facts: Facts = ()
    ) -> None:
        notes = (note,) * bool(note)
        self.problems.append(Diagnostic(code, title, label, (), notes, helps, facts=facts))

    def _bind_keyword(self, name: str, argument: Argument) -> None:
        """Bind a keyword that is not a field."""
        if self.surface.rest and not self._is_misspelt_field(name, argument):
            self._bind_rest(name, argument)
        else:
            keywords = self.surface.keywords
            help_ = suggest_name(name, keywords, "it takes") if keywords else "it takes none"
            title = f"`{self.name}` takes no argument `{name}`"
            facts = facts_of_unknown(name, keywords)
            self._add_problem("S302", title, Label(argument.span), help_, facts=facts)

    def _is_misspelt_field(self, name: str, argument: Argument) -> bool:
        """Return whether a free keyword is so close to a field, by name or value, that the field
        was meant."""
        closest = find_closest(name, self.surface.keywords)
        if closest is None or (len(name) > 3 and closest[:3] == name[:3]):
            return closest is not None
        assert self.surface.rest
        free = self._accepts(self._element_type(self.surface.rest), argument)
        return not free and self._accepts(self.surface.types[closest], argument)

    def _accepts(self, kind: Any, argument: Argument) -> bool:
        try:
            convert(kind, argument.value, self.axes)
        except (UnknownAxis, Mismatch):
            return False
        return True

    def _element_type(self, field: str) -> Any:
        """Return the type of one value of a field that takes several."""
        pair = typing.get_args(typing.get_args(self.surface.types[field])[0])[0]
        return typing.get_args(pair)[1] if field == self.surface.rest else pair

    def _bind_rest(self, name: str, argument: Argument) -> None:
        values: list[Any] = []
        if any(name == bound_name for bound_name, _ in self.rest):
            self._report_duplicate(name, argument)
        assert self.surface.rest
        self._bind_several(values, self.surface.rest, argument)
        self.rest += [(name, value) for value in values]

    def _bind_several(self, into: list[Any], field: str, argument: Argument) -> None:
        """Bind one value of a field that takes several."""
        label = argument.name if field == self.surface.rest else field
        into += self._convert(label or field, self._element_type(field), argument)

    def _report_duplicate(self, name: str, argument: Argument) -> None:
        self._add_problem("S302", f"`{name}` is given twice", Label(argument.span), "drop one")

    def _report_surplus(self, argument: Argument) -> None:
        positional = self.surface.positional
        title = f"`{self.name}` takes no further positional argument"
        order = (f"it takes {quote_names(positional)} in this order",) if positional else ()
        suggested = [
            n for n in self.surface.keywords if argument.word in words_of(self.surface.types[n])
        ]
        hints = tuple(f"did you mean `{name}={argument.word}`?" for name in suggested)
        facts: Facts = ()
        if suggested:
            facts = (("unknown", argument.word), ("meant", f"{suggested[0]}={argument.word}"))
        self._add_problem("S302", title, Label(argument.span), *(hints or order), facts=facts)

    def _report_missing(self, missing: Sequence[str]) -> None:
        title = f"`{self.name}` needs {quote_names(missing)}"
        self._add_problem(
            "S305", title, Label(self.span), f"for example `{self.primitive.example}`"
        )

    def _convert(self, field: str, kind: Any, argument: Argument) -> list[Any]:
        """Return the converted value in a list, or [] after adding a problem."""
        try:
            return [convert(kind, argument.value, self.axes)]
        except UnknownAxis as axis:
            self._report_unknown_axis(str(axis), argument)
        except Mismatch as mismatch:
            value = mismatch.culprit[0] if mismatch.culprit else argument.value
            if mismatch.expected == describe(Axis) and argument.word:
                self._report_unknown_axis(argument.word, argument)
                return []
            symbol = isinstance(value, Symbol | AxisSize) or type(value) is str
            if mismatch.choices and symbol:
                name = value.name if isinstance(value, AxisSize) else str(value)
                title = f"`{self.name}` has no {field} `{name}`"
                help_ = _suggest_choice(name, mismatch.choices)
                facts = facts_of_unknown(name, mismatch.choices)
                self._add_problem("S303", title, Label(argument.value_span), help_, facts=facts)
            else:
                prefix = "each value in " if mismatch.culprit else ""
                title = f"{prefix}`{field}` of `{self.name}` must be {mismatch.expected}"
                shape = f"for example `{self.primitive.example}`"
                label = Label(argument.value_span, _describe_value(argument, value))
                self._add_problem("S304", title, label, shape, facts=unknown_words(value))
        return []

    def _report_unknown_axis(self, name: str, argument: Argument) -> None:
        mesh = ", ".join(f"{axis}={size}" for axis, size in self.axes.items())
        closest = find_closest(name, self.axes)
        is_single = argument.name and not isinstance(argument.value, tuple)
        prefix = f"{argument.name}=" if is_single else ""
        helps = (f"did you mean `{prefix}{closest}`?",) if closest else ()
        # a long mesh is not repeated
        if not closest and len(self.axes) < 6 and name.isidentifier():
            helps = (f"declare it: `mesh({', '.join(filter(None, (mesh, f'{name}=2')))})`",)
        elif not closest and self.axes and not name.isidentifier():
            helps = (f"name an axis: `{', '.join(self.axes)}`",)
        note = f"the mesh is {mesh}" if self.axes else "no mesh is declared above"
        title = f"the mesh has no axis `{name}`"
        facts = facts_of_unknown(name, self.axes)
        self._add_problem("S204", title, Label(argument.span), *helps, note=note, facts=facts)


def _describe_value(argument: Argument, value: object) -> str:
    """Return a phrase with an argument's value, and the name that the value came from."""
    is_word = argument.word and not isinstance(value, str | AxisSize)
    return (
        f"`{argument.word}` is {show_value(value)}" if is_word else f"this is {show_value(value)}"
    )


def _suggest_choice(word: str, choices: Sequence[str]) -> str:
    closest = find_closest(word, choices)
    listed = f"choose one of {quote_names(choices, 12)}"
    return f"did you mean `{closest}`? {listed}" if closest and len(choices) > 4 else listed


def words_of(kind: Any) -> tuple[str, ...]:
    """Return the words that an argument of this type may be."""
    inside = typing.get_args(kind)
    words = tuple(arg for arg in inside if isinstance(arg, str))
    return words + tuple(word for arg in inside for word in words_of(arg))
