"""What a refused call is answered with: the whole call in our own words, if that is legal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from schedlang.binding import Argument, Binder, Surface, words_of
from schedlang.diagnostic import Diagnostic, Refusal
from schedlang.evaluate import evaluate
from schedlang.mending import Given, mended
from schedlang.nodes import Call, Expr, Keyword
from schedlang.source import Span
from schedlang.syntax import parse_expr
from schedlang.value import Names

OVER = re.compile(r"(?:over|inner)=[\[(]?([\w, ]+?)(?:[\])]|, \w+=)")  # the axes that a call names


def in_our_words(binder: Binder, arguments: Sequence[Argument]) -> list[Diagnostic]:
    """The problems of a call; of words that others use with the whole call as it is written here.

    A call that would be refused again is not offered, but the primitive's example.
    """
    surface, example = binder.surface, binder.primitive.example
    found = mended(binder.name, _given(surface, arguments), surface.keywords)
    if found is None:
        return binder.problems
    said = {text.partition("=")[0] for text in found.arguments} | set(binder.bound)
    found.arguments += _lacking(surface.required, said, example)
    wrong = None if found.instead else _refused(binder, found.call(binder.name))
    helps = found.helps(binder.name) if wrong is None else (f"for example `{example}`",)
    why: dict[Span, tuple[str, ...]] = {binder.span: ()}  # what lacks is in the whole call, too
    for place, notes in found.why.items():
        why |= dict.fromkeys((arguments[place].span, arguments[place].inner), notes)
    return [
        replace(one, notes=(*why[one.primary.span], *(wrong or ())), helps=helps)
        if one.primary.span in why
        else one
        for one in binder.problems
    ]


def _given(surface: Surface, arguments: Sequence[Argument]) -> list[Given]:
    """The arguments by name, those without one by the field that they stand for."""
    free = list(surface.positional)
    found = []
    for one in arguments:
        name = one.name or surface.many or (free.pop(0) if free else "")
        words = words_of(surface.types.get(name))
        found.append(Given(name, one.value, one.name is not None, words))
    return found


def _lacking(required: Sequence[str], said: set[str], example: str) -> list[str]:
    """What has to be said and is not, as the example says it."""
    found = [re.search(rf"\b{name}=[\w\"-]+", example) for name in required if name not in said]
    return [one[0] for one in found if one]


def _refused(binder: Binder, call: str) -> tuple[str, ...] | None:
    """Why a call would be refused, on the mesh that there is or on axes of any name; None: it is
    not.  What does not bind has its own messages: nothing is said of it here."""
    axes = {**binder.axes}
    for names in OVER.findall(call):
        axes |= {name: 2 for name in re.findall(r"\w+", names) if name not in axes}
    try:
        made = parse_expr(call, binder.span)
        assert isinstance(made, Call)
        given = [_argument(one, Names(axes=axes)) for one in made.args]
    except Refusal:
        return ()
    other = Binder(binder.primitive, binder.span, axes)
    if not other.fits(given):
        return ()
    try:
        other.made().agree(axes)
    except Refusal as refusal:
        told = refusal.diagnostic
        return (f"`{call}` would be refused: {told.title}", *told.helps)
    return None


def _argument(node: Expr | Keyword, names: Names) -> Argument:
    """An argument as it is evaluated."""
    if isinstance(node, Keyword):
        return Argument(node.name, evaluate(node.value, names), node.span, node.value.span)
    return Argument(None, evaluate(node, names), node.span, node.span)
