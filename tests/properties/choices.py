"""All choices that arguments of verbs offer, and the choices of a given schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any, Literal, get_args, get_origin

from schedlang.diagnostics.source import Source
from schedlang.ir.primitive import Primitive, load_all, registry
from schedlang.language import nodes as n
from schedlang.language.kinds import signature_of
from schedlang.language.nodes import walk
from schedlang.language.syntax import parse

Row = n.Rule | n.Do  # with a path, and about the model


def all_choices() -> set[str]:
    """Return all choices: names of verbs; of each argument its literal values (`offload to=disk`),
    or that it is set at all (`zero prefetch`)."""
    load_all()
    return {text for name, verb in registry().items() for text in (name, *_verb_choices(verb))}


def _verb_choices(verb: type[Primitive]) -> Iterator[str]:
    for name, kind in signature_of(verb).types.items():
        values = list(_literal_values(kind))
        yield from (f"{verb.__name__} {name}={value}" for value in values)
        if not values or _allows_number(kind):
            yield f"{verb.__name__} {name}"


def _literal_values(kind: Any) -> Iterator[str]:
    """Yield the literal values that an argument of this type allows."""
    for argument_type in get_args(kind):
        if get_origin(kind) is Literal:
            yield str(argument_type)
        else:
            yield from _literal_values(argument_type)


def _allows_number(kind: Any) -> bool:
    """Return whether an argument of this type allows a number."""
    return kind in (int, float) or any(
        _allows_number(argument_type) for argument_type in get_args(kind)
    )


def count_choices(text: str) -> Counter[str]:
    """Count the choices of a schedule; an omitted argument chooses its default."""
    load_all()
    rows = [node for node in walk(parse(Source("drawn.sched", text))) if isinstance(node, Row)]
    return Counter(choice for row in rows for choice in _call_choices(row.call))


def _call_choices(call: n.Call) -> set[str]:
    verb = registry()[call.name.text]
    positional = iter(signature_of(verb).positional)
    arguments: dict[str, list[str]] = {}
    for argument in call.args:
        if isinstance(argument, n.Keyword):
            name, value = argument.name, argument.value
        else:
            name, value = signature_of(verb).many or next(positional), argument
        free = name not in signature_of(verb).types  # shard(weight=S(0))
        arguments.setdefault(str(signature_of(verb).rest) if free else name, []).extend(
            _names_in(value)
        )
    return {verb.__name__, *_argument_choices(verb, arguments)}


def _names_in(value: n.Expr) -> list[str]:
    """Return the names in an argument."""
    return [node.text for node in walk(value) if isinstance(node, n.Name)]


def _argument_choices(verb: type[Primitive], arguments: dict[str, list[str]]) -> Iterator[str]:
    defaults = {f.name: f.default for f in fields(verb) if f.default is not MISSING}
    for name, kind in signature_of(verb).types.items():
        values = set(_literal_values(kind))
        names = arguments.get(name, [str(defaults.get(name))])
        yield from (f"{verb.__name__} {name}={name_}" for name_ in names if name_ in values)
        if name in arguments and not values.intersection(names):
            yield f"{verb.__name__} {name}"
