"""The types that a primitive's fields may have, and how one value becomes one of them."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NewType, TypeVar, Union

from schedlang.diagnostics.diagnostic import quoted
from schedlang.ir import placement
from schedlang.language.value import UNKNOWN, AxisSize, Bytes, Seconds, Symbol, Symbolic

T = TypeVar("T")

REST, MANY = "free keywords", "any number"
# A mesh axis or a view; and several of them, of which one may stand without brackets.
Axis = NewType("Axis", str)
Axes = tuple[Axis, ...]
# All keyword arguments that are no fields, as (name, value) pairs: shard(weight=S(out), bias=R).
Rest = Annotated[tuple[tuple[str, T], ...], REST]
# All positional arguments: verify(forward, backward).
Many = Annotated[tuple[T, ...], MANY]


class Mismatch(Exception):
    """A value that is not of the type asked for: what was expected, and the choices if listed.

    `culprit` is the one value of a list that does not fit, in a tuple of one.
    """

    def __init__(
        self, expected: str, choices: Sequence[str] = (), culprit: tuple[Any, ...] = ()
    ) -> None:
        super().__init__(expected)
        self.expected: str = expected
        self.choices: tuple[str, ...] = tuple(choices)
        self.culprit: tuple[Any, ...] = culprit


class NoAxis(Exception):
    """A name that is no axis of the mesh."""


def convert(kind: Any, value: Any, axes: Mapping[str, int]) -> Any:
    """The value as one of `kind`; raises Mismatch or NoAxis."""
    if value is UNKNOWN:
        return UNKNOWN
    if kind is Axis:
        return _axis(value, axes)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return convert(args[0], value, axes)
    if origin is Literal:
        return _one_of(args, value)
    if origin in (Union, types.UnionType):
        return _any_of(args, value, axes)
    if origin is tuple:
        return _tuple(args, value, axes)
    return _plain(kind, value)


def _axis(value: Any, axes: Mapping[str, int]) -> str:
    if isinstance(value, AxisSize):
        return value.name
    if not isinstance(value, str):
        raise Mismatch(describe(Axis))
    if value not in axes:
        raise NoAxis(str(value))
    return str(value)


def _one_of(choices: tuple[Any, ...], value: Any) -> Any:
    word: Any = value.name if isinstance(value, AxisSize) and value.name in choices else value
    for choice in choices:
        if choice == word and isinstance(choice, bool) == isinstance(word, bool):
            return choice
    raise Mismatch(f"one of {quoted(map(str, choices), 12)}", [str(c) for c in choices])


def _any_of(kinds: tuple[Any, ...], value: Any, axes: Mapping[str, int]) -> Any:
    expected: list[str] = []
    choices: list[str] = []
    for kind in kinds:
        if kind is type(None):
            if value is None or value == Symbol("none"):
                return None
            continue
        try:
            return convert(kind, value, axes)
        except NoAxis:
            if len(kinds) == 1 or type(None) in kinds:
                raise
            expected.append(describe(kind))
        except Mismatch as wrong:
            expected.append(wrong.expected)
            choices += wrong.choices
    raise Mismatch(" or ".join(dict.fromkeys(expected)), choices)


def _tuple(args: tuple[Any, ...], value: Any, axes: Mapping[str, int]) -> tuple[Any, ...]:
    if args[0] is Axis and not isinstance(value, tuple):
        value = (value,)
    if not isinstance(value, tuple):
        raise Mismatch(describe(tuple[args]))  # type: ignore[valid-type]
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_element(args[0], item, axes) for item in value)
    if len(value) != len(args):
        raise Mismatch(describe(tuple[args]))  # type: ignore[valid-type]
    return tuple(convert(kind, item, axes) for kind, item in zip(args, value))


def _element(kind: Any, item: Any, axes: Mapping[str, int]) -> Any:
    try:
        return convert(kind, item, axes)
    except Mismatch as wrong:
        raise Mismatch(wrong.expected, wrong.choices, (item,)) from None


def _plain(kind: Any, value: Any) -> Any:
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


WORDS: Mapping[Any, str] = {
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
    Symbolic: "a call",
    type(None): "`none`",
}


PLURALS: Mapping[Any, str] = {int: "integers", float: "numbers", str: "names", Axis: "axes"}


def describe(kind: Any) -> str:
    """Describe in words the values that a type admits."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind in WORDS:
        return WORDS[kind]
    if origin is Annotated:
        return describe(args[0])
    if origin is Literal:
        return f"one of {quoted(map(str, args), 12)}"
    if origin in (Union, types.UnionType):
        return " or ".join(describe(one) for one in args if one is not type(None))
    if origin is tuple:
        each = PLURALS.get(args[0]) if args else None
        return f"a list of {each}" if each else f"a list, each {describe(args[0])}"
    return str(getattr(kind, "__name__", kind))
