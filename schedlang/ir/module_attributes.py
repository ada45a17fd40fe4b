"""Plain attributes of modules, by which modules of equal class and shapes may still differ.

Two layers of one class and of equal shapes may compute differently, because of a number, a word or
a flag. Attributes that only number the layers, or rise from layer to layer, are not counted. Used
to find equal layers when a model is reduced or planned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from schedlang.ir.model import ModelFacts

PLAIN = (bool, int, float, complex, str, bytes, type(None))
NAMED = (FunctionType, BuiltinFunctionType, type)  # an activation function, or a class
MIN_RAMP = 3  # minimal length of a ramp: two numbers always are one
Value = tuple[type, Any]
PlainAttributes = Mapping[str, object]  # attributes by name


def module_kind(facts: ModelFacts, fqn: str) -> object:
    """Return a key that is equal for modules of one model that are equal, contents included."""
    attributes = attributes_by_module(facts)
    names = modules_below(facts, fqn)
    return tuple(
        (n[len(fqn) :], facts.sites[n].kind, frozenset(attributes[n].items())) for n in names
    )


def modules_below(facts: ModelFacts, fqn: str) -> Iterator[str]:
    """Yield a module and all modules inside of it."""
    yield fqn
    for child in facts.children(fqn):
        yield from modules_below(facts, f"{fqn}.{child}" if fqn else child)


def differing_attributes(facts: ModelFacts, roots: Sequence[str]) -> frozenset[tuple[str, str]]:
    """Return the attributes that differ between layers: the module's path in its layer, and the
    name."""
    attributes, seen_values = attributes_by_module(facts), dict[tuple[str, str], set[object]]()
    for root in roots:
        for fqn in modules_below(facts, root):
            for name, value in attributes[fqn].items():
                seen_values.setdefault((fqn[len(root) :], name), set()).add(value)
    return frozenset(key for key, values in seen_values.items() if len(values) > 1)


def attributes_by_module(facts: ModelFacts) -> Mapping[str, PlainAttributes]:
    """Return, for each module, its attributes that are plain values, except those that number
    layers."""
    if "told" not in facts.cache:
        groups: dict[tuple[str, ...], dict[tuple[int, ...], str]] = {}
        for fqn in facts.sites:
            parts = fqn.split(".")
            numbers = tuple(int(part) for part in parts if part.isdecimal())
            pattern = tuple("*" if part.isdecimal() else part for part in parts)
            groups.setdefault(pattern, {})[numbers] = fqn
        facts.cache["told"] = {
            fqn: attributes
            for group in groups.values()
            for fqn, attributes in _group_attributes(facts, group)
        }
    return cast(Mapping[str, PlainAttributes], facts.cache["told"])


def _group_attributes(
    facts: ModelFacts, group: Mapping[tuple[int, ...], str]
) -> Iterator[tuple[str, PlainAttributes]]:
    """Yield the modules at the same place of their layers, with the plain attributes of each."""
    by_key = {key: dict(plain_attributes(vars(facts.module(fqn)))) for key, fqn in group.items()}
    counts = set()
    for name in {name for values in by_key.values() for name in values}:
        values = {key: values[name] for key, values in by_key.items() if name in values}
        if len(set(values.values())) > 1 and _numbers_layers(values):
            counts.add(name)
    for key, fqn in group.items():
        yield fqn, {name: value for name, value in by_key[key].items() if name not in counts}


def plain_attributes(attributes: Mapping[str, object]) -> Iterator[tuple[str, Value]]:
    """Yield attributes that are plain values, or lists and tuples of plain values, each with its
    type."""
    for name, value in attributes.items():
        if isinstance(value, list | tuple):
            if all(isinstance(item, PLAIN) for item in value):
                yield name, (type(value), tuple((type(item), item) for item in value))
        elif isinstance(value, NAMED):  # by name: a function made anew for each layer is equal
            yield name, (type(value), f"{value.__module__}.{value.__qualname__}")
        elif isinstance(value, PLAIN) or type(value).__name__ == "dtype":
            yield name, (type(value), value)


def _numbers_layers(values: Mapping[tuple[int, ...], Value]) -> bool:
    """Return whether values only number layers.

    Integers that are evenly spaced along one list of layers, floats that rise or fall along it, or
    words with digits that are all different.
    """
    kinds = {kind for kind, _ in values.values()}
    if kinds == {str}:
        texts = [text for _, text in values.values()]
        return len(set(texts)) == len(texts) and all(any(map(str.isdigit, w)) for w in texts)
    places = range(len(next(iter(values))))
    return kinds in ({int}, {float}) and any(_rises_along(values, index) for index in places)


def _rises_along(values: Mapping[tuple[int, ...], Value], index: int) -> bool:
    """Return whether numbers rise along the lists that one number of a module's name counts."""
    lines: dict[tuple[int, ...], list[tuple[int, Any]]] = {}
    for key, (_, value) in values.items():
        lines.setdefault((*key[:index], *key[index + 1 :]), []).append((key[index], value))
    ramps = [sorted(line) for line in lines.values() if len(line) > 1]
    return bool(ramps) and all(map(_is_ramp, ramps))


def _is_ramp(line: Sequence[tuple[int, Any]]) -> bool:
    """Return whether numbers rise, or fall, from layer to layer."""
    steps = [(high - low) / (after - before) for (before, low), (after, high) in pairwise(line)]
    if type(line[0][1]) is int:
        return len(set(steps)) == 1 and steps[0] != 0 and (len(line) >= MIN_RAMP or steps[0] == 1)
    return len(line) >= MIN_RAMP and (min(steps) > 0 or max(steps) < 0)
