"""Completion: what may stand at a cursor, module paths of the model among it."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.editors.outline import Outline
from schedlang.editors.place import PATH, Declared, Place, declared, place
from schedlang.editors.rules import verbs
from schedlang.ir.primitive import load_all, registry
from schedlang.language import manual
from schedlang.language.binding import surface
from schedlang.language.kinds import Axes, Axis
from schedlang.language.syntax import DECLARATIONS, STATEMENTS

TOP = ("schedule", *DECLARATIONS, *STATEMENTS)


@dataclass(frozen=True)
class Offer:
    """Something that may be written: its text, what it is (module, verb, argument, value, name,
    keyword), a line about it and a page."""

    text: str
    kind: str
    detail: str = ""
    page: str = ""


def offers(text: str, offset: int, outline: Outline | None = None) -> list[Offer]:
    """Return the completions at `offset`; modules where the model is known."""
    load_all()
    here, names = place(text, offset), declared(text)
    if here.call:
        found = [*_arguments(here, names)]
    elif re.fullmatch(r"schedule\s+\d+\s+for\s+\w*", here.statement):
        found = [Offer(outline.nodes[""]["class"], "name", "the model")] if outline else []
    elif here.selected:
        found = [*_verbs(names)]
    elif here.path is not None:
        found = [*_modules(here, outline)]
        if here.path == here.statement and "." not in here.path:
            found += [*_verbs(names), *(Offer(w, "keyword") for w in _keywords(here))]
    else:
        found = [*_names(names, ("knob", "axis", "view"))]
    return list({offer.text: offer for offer in found}.values())


def _keywords(here: Place) -> tuple[str, ...]:
    return STATEMENTS if here.scopes else TOP


def _verbs(names: list[Declared]) -> Iterator[Offer]:
    for name in verbs():
        kind = registry()[name]
        yield Offer(name, "verb", manual.signature(kind), manual.explain(kind))
    yield from _names(names, ("def",))


def _names(names: list[Declared], kinds: tuple[str, ...]) -> Iterator[Offer]:
    for one in names:
        if one.kind in kinds:
            yield Offer(one.name, "verb" if one.kind == "def" else "name", one.line)


def _arguments(here: Place, names: list[Declared]) -> Iterator[Offer]:
    """Values of the argument that is being written, and names of others."""
    kind = registry().get(here.call)
    if kind is None:
        yield from _names(names, ("knob", "axis", "view", "pattern"))
        return
    known = surface(kind)
    if here.argument:
        yield from _values(known.types.get(here.argument), names)
        return
    for name in known.positional:
        yield from _values(known.types[name], names)
    for name in known.keywords:
        if f"{name}=" not in here.statement:
            yield Offer(f"{name}=", "argument", dict(manual.rows(kind))[name])


def _values(kind: Any, names: list[Declared]) -> Iterator[Offer]:
    """Yield completions for an argument of this type."""
    if kind is Axis or kind == Axes:
        yield from _names(names, ("axis", "view"))
        return
    if typing.get_origin(kind) is Literal:
        yield from (Offer(str(one), "value") for one in typing.get_args(kind))
    elif kind is bool:
        yield from (Offer(one, "value") for one in ("true", "false"))
    elif kind is str:
        yield from _names(names, ("pattern",))
    else:
        for inner in typing.get_args(kind):
            yield from _values(inner, names) if inner is not type(None) else ()
    yield from _names(names, ("knob",))


def _modules(here: Place, outline: Outline | None) -> Iterator[Offer]:
    """The children of what is written so far; numbered ones as `*`."""
    if outline is None or here.path is None:
        return
    parent = here.path.rpartition(".")[0]
    roots = roots_of(here, outline)
    try:
        modules = outline.select(parent, roots) if parent else roots
    except Refusal:
        return
    for module in modules:
        children = outline.children(module)
        if any(child.isdigit() for child in children):
            yield Offer("*", "module", f"all {len(children)} of them")
        for child in children:
            fqn = f"{module}.{child}" if module else child
            yield Offer(child, "module", outline.said(fqn))


def roots_of(here: Place, outline: Outline) -> tuple[str, ...]:
    """The modules from which selectors at a place start; none inside a `def`."""
    roots: tuple[str, ...] = ("",)
    for head in here.scopes:
        if head.startswith("def"):
            return ()
        found = re.search(rf"\bat\s+((?:{PATH}\s*,\s*)*{PATH})", head)
        if found:
            paths = [path for path in re.split(r"\s*,\s*(?![^{]*\})", found[1]) if path]
            try:
                roots = tuple(m for path in paths for m in outline.select(path, roots))
            except Refusal:
                return ()
    return roots
