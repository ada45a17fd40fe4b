"""Modules that are alike: a number for each class of equal modules of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from schedlang.model import ModelFacts


def classes(facts: ModelFacts, attributes: tuple[str, ...] = ()) -> Mapping[str, int]:
    """Module -> the number of its class.

    Alike are modules of one Python class whose `attributes`, own parameters and buffers are equal
    but for their values, and whose children have the same names and are alike.  What shares a
    tensor with another name, and what holds it, is alike to nothing; so is a module whose forward
    was replaced on the object itself.
    """
    key = ("alike", attributes)
    if key not in facts.cache:
        facts.cache[key] = _found(facts, attributes)
    return cast(Mapping[str, int], facts.cache[key])


def _found(facts: ModelFacts, attributes: tuple[str, ...]) -> Mapping[str, int]:
    """Numbers given from the leaves up: that of a module is made of those of its children."""
    shared = {name for same in (*facts.ties, *facts.shared_buffers) for name in same}
    single = {holder for name in shared for holder in holders(name)}
    found: dict[str, int] = {}
    numbers: dict[object, int] = {}
    looked: dict[tuple[str, ...], list[str]] = {}  # what a module has -> the attributes among it
    for fqn, site in reversed(tuple(facts.sites.items())):  # children stand below what holds them
        module = facts.module(fqn)
        own, prefix = vars(module), f"{fqn}." if fqn else ""
        said: object = fqn
        if fqn not in single and "forward" not in own:
            held = [(child, found[prefix + child]) for child in site.children]
            tensors = [(n, f.shape, f.dtype, f.requires_grad) for n, f in site.parameters.items()]
            buffers = [(n, own["_buffers"][n]) for n in site.buffers]
            shapes = [(n, tuple(buffer.shape), buffer.dtype) for n, buffer in buffers]
            has = tuple(own)
            if has not in looked:
                looked[has] = [n for n in attributes if n in own]
            values = [(n, _value(own[n])) for n in looked[has]]
            said = type(module), tuple(values), *held, *tensors, *shapes
        found[fqn] = numbers.setdefault(said, len(numbers))
    return found


def _value(value: object) -> object:
    """What two attributes must have in common to be equal: plain ones their value."""
    plain = value is None or isinstance(value, (bool, int, float, str))
    return (type(value), value) if plain else id(value)


def holders(fqn: str) -> Iterator[str]:
    """What holds a module (or a parameter), from the inside out; the model itself is last."""
    while fqn:
        fqn = fqn.rpartition(".")[0]
        yield fqn


@lru_cache(maxsize=4)  # one row asks several times
def above(modules: tuple[str, ...]) -> frozenset[str]:
    """All that holds one of some modules."""
    found: set[str] = set()
    level = {fqn.rpartition(".")[0] for fqn in modules if fqn}
    while level:
        found |= level
        level = {fqn.rpartition(".")[0] for fqn in level if fqn} - found
    return frozenset(found)
