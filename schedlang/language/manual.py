"""The page of `schedlang explain NAME` about a primitive, made from its class alone."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from typing import Any, Literal

from schedlang.ir import placement
from schedlang.ir.primitive import Primitive, registry, relation_of
from schedlang.language.kinds import MANY, REST, Axes, Axis, describe, signature_of
from schedlang.language.value import show_value

SUBJECT = {
    "module": "each selected module separately",
    "selection": "all selected modules together",
    "model": "the full model, or its `at` block: no selector",
}


def signature(primitive: type[Primitive]) -> str:
    """Return the signature as one writes it: shard(col | row | vocab, over=axis, blocks=1)."""
    parameters = (_format_parameter(primitive, f) for f in _arguments(primitive))
    return f"{primitive.__name__}({', '.join(parameters)})"


def explain(primitive: type[Primitive]) -> str:
    """Return the page: signature, documentation, arguments, example, facets and
    `describe_gives_up`."""
    parts = [signature(primitive), inspect.cleandoc(primitive.__doc__ or "")]
    arguments = argument_rows(primitive)
    if arguments:
        width = max(len(name) for name, _ in arguments)
        parts.append(
            "\n".join(f"{name:<{width}}  {description}" for name, description in arguments)
        )
    parts.append(f"example   {primitive.example}")
    facts = [f"takes     {SUBJECT[primitive.takes]}"]
    facts += [
        f"{label:<9} {_list_names(getattr(primitive, label))}" for label in ("reads", "writes")
    ]
    facts.append(f"gives up  {describe_gives_up(primitive)}")
    facts += [f"{label:<9} {description}" for label, description in _ordering(primitive)]
    return "\n\n".join([*parts, "\n".join(facts)]) + "\n"


def argument_rows(primitive: type[Primitive]) -> list[tuple[str, str]]:
    """Return the name of each argument, and a description of its values."""
    return [_argument_row(primitive, f) for f in _arguments(primitive)]


def describe_gives_up(primitive: type[Primitive]) -> str:
    """Describe in words the properties that the result of a primitive may differ in."""
    names: Any = inspect.getattr_static(primitive, "gives_up")
    return "depends on its arguments" if isinstance(names, property) else _list_names(names)


def to_json(primitive: type[Primitive]) -> dict[str, object]:
    """Return the page as plain values."""
    return {
        "name": primitive.__name__,
        "signature": signature(primitive),
        "documentation": inspect.cleandoc(primitive.__doc__ or ""),
        "arguments": dict(argument_rows(primitive)),
        "example": primitive.example,
        "takes": primitive.takes,
        "reads": sorted(primitive.reads),
        "writes": sorted(primitive.writes),
        "gives_up": describe_gives_up(primitive),
    }


def _arguments(primitive: Any) -> list[dataclasses.Field[Any]]:
    return [f for f in dataclasses.fields(primitive) if f.init]


def _list_names(names: Any) -> str:
    return ", ".join(sorted(names)) or "nothing"


def _format_default(field: dataclasses.Field[Any]) -> str | None:
    if field.default is dataclasses.MISSING:
        return None if field.default_factory is dataclasses.MISSING else ""
    return "none" if field.default is None else show_value(field.default).strip("`")


def _format_parameter(primitive: type[Primitive], field: dataclasses.Field[Any]) -> str:
    kind = signature_of(primitive).types[field.name]
    mark = getattr(kind, "__metadata__", ("",))[0]
    if mark == REST:
        return f"name={_short_type(_element_type(kind, 1))}, ..."
    if mark == MANY:
        return f"{_short_type(_element_type(kind))}, ..."
    default = _format_default(field)
    if default is None:
        first = typing.get_origin(kind) is Literal and not field.kw_only
        return _short_type(kind) if first else f"{field.name}={_short_type(kind)}"
    return f"{field.name}={default}"


def _element_type(kind: Any, index: int | None = None) -> Any:
    """Return the type of one value of a field that takes several; of a pair, of the value at
    `index`."""
    element = typing.get_args(typing.get_args(kind)[0])[0]
    return element if index is None else typing.get_args(element)[index]


def _short_type(kind: Any) -> str:
    if kind is Axis:
        return "axis"
    if kind == Axes:
        return "axes"
    if kind == placement.Placement:
        return "S(dim) | R | P(sum)"
    if typing.get_origin(kind) is Literal:
        return " | ".join(map(str, typing.get_args(kind)))
    return str(getattr(kind, "__name__", describe(kind)))


def _argument_row(primitive: type[Primitive], field: dataclasses.Field[Any]) -> tuple[str, str]:
    kind = signature_of(primitive).types[field.name]
    mark = getattr(kind, "__metadata__", ("",))[0]
    if mark == REST:
        return "name=", f"by the name of a tensor: {describe(_element_type(kind, 1))}"
    if mark == MANY:
        return field.name, f"any number: {describe(_element_type(kind))}"
    default = _format_default(field)
    default_text = (
        f"; {default or 'empty'} unless given" if default is not None else "; must be given"
    )
    return field.name, describe(kind).replace("`", "") + default_text


def _ordering(primitive: type[Primitive]) -> list[tuple[str, str]]:
    """Return the verbs that must stand above this one, and below this one, at the same module."""
    others = [other for other in registry().values() if other is not primitive]
    above = [o.__name__ for o in others if relation_of(primitive, o) == "clash"]
    below = [o.__name__ for o in others if relation_of(o, primitive) == "clash"]
    relations = [("after", above), ("before", below)]
    return [(relation, ", ".join(sorted(names))) for relation, names in relations if names]
