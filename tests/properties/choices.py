"""What the arguments of verbs leave to choose, and which of it a schedule chooses."""

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


def choices() -> set[str]:
    """Of each verb its name; of each argument every word that it knows (`offload to=disk`), or that
    it is given at all (`zero prefetch`)."""
    load_all()
    return {text for name, verb in registry().items() for text in (name, *_of(verb))}


def _of(verb: type[Primitive]) -> Iterator[str]:
    for name, kind in signature_of(verb).types.items():
        words = list(_words(kind))
        yield from (f"{verb.__name__} {name}={word}" for word in words)
        if not words or _numbers(kind):
            yield f"{verb.__name__} {name}"


def _words(kind: Any) -> Iterator[str]:
    """The words that an argument of this type may be."""
    for one in get_args(kind):
        if get_origin(kind) is Literal:
            yield str(one)
        else:
            yield from _words(one)


def _numbers(kind: Any) -> bool:
    """Whether a number may stand where a word may."""
    return kind in (int, float) or any(_numbers(one) for one in get_args(kind))


def counted(text: str) -> Counter[str]:
    """How often a schedule chooses what; an argument that is left out chooses its default."""
    load_all()
    rows = [one for one in walk(parse(Source("drawn.sched", text))) if isinstance(one, Row)]
    return Counter(choice for row in rows for choice in _chosen(row.call))


def _chosen(call: n.Call) -> set[str]:
    verb = registry()[call.name.text]
    places = iter(signature_of(verb).positional)
    given: dict[str, list[str]] = {}
    for argument in call.args:
        if isinstance(argument, n.Keyword):
            name, value = argument.name, argument.value
        else:
            name, value = signature_of(verb).many or next(places), argument
        free = name not in signature_of(verb).types  # shard(weight=S(0))
        given.setdefault(str(signature_of(verb).rest) if free else name, []).extend(_texts(value))
    return {verb.__name__, *_named(verb, given)}


def _texts(value: n.Expr) -> list[str]:
    """The names in an argument: of an option, or of several."""
    return [node.text for node in walk(value) if isinstance(node, n.Name)]


def _named(verb: type[Primitive], given: dict[str, list[str]]) -> Iterator[str]:
    defaults = {f.name: f.default for f in fields(verb) if f.default is not MISSING}
    for name, kind in signature_of(verb).types.items():
        words = set(_words(kind))
        said = given.get(name, [str(defaults.get(name))])
        yield from (f"{verb.__name__} {name}={word}" for word in said if word in words)
        if name in given and not words.intersection(said):
            yield f"{verb.__name__} {name}"
