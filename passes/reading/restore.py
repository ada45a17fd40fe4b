"""A recorded plan (the JSON of `plan --out`) back into a plan of the model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schedlang.binding import Argument, bind, surface
from schedlang.diagnostic import Diagnostic, Label, Refusal
from schedlang.evaluate import evaluate
from schedlang.facets import Expectation
from schedlang.mesh import Mesh
from schedlang.passes.reading import legality
from schedlang.passes.reading.record import EXPECTED
from schedlang.passes.reading.record_form import wrong_in
from schedlang.plan import Plan
from schedlang.primitive import Primitive, load_all, registry
from schedlang.source import NOWHERE, Source, Span
from schedlang.syntax import parse_expr
from schedlang.texts import text_of
from schedlang.value import Names

if TYPE_CHECKING:
    from schedlang.model import ModelFacts


def read_record(path: Path) -> dict[str, Any]:
    """The record in a file; refuses what is none (S907)."""
    try:
        found = json.loads(text_of(path))
    except RecursionError:
        raise _unreadable(path, "its lists are nested too deep") from None
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from None
    except ValueError as error:
        raise _unreadable(path, f"it is not JSON: {error}") from None
    if not isinstance(found, dict) or found.get("plan") != 1:
        raise _unreadable(path, "it does not hold a plan of version 1")
    if not isinstance(found.get("actions"), list) or not isinstance(found.get("mesh"), dict):
        raise _unreadable(path, "it has no `mesh` and `actions`")
    if wrong := wrong_in(found):
        raise _unreadable(path, f"`{wrong[0]}` is not {wrong[1]}")
    return found


def _unreadable(path: Path, why: str) -> Refusal:
    help_ = "write one: `schedlang plan FILE --out plan.json`"
    return Refusal(Diagnostic("S907", f"`{path}` is not a plan", notes=(why,), helps=(help_,)))


def restored(record: Mapping[str, Any], facts: ModelFacts) -> Plan:
    """The plan of a record on this model; every row is checked again, as if it were written."""
    load_all()
    views = tuple((name, tuple(axes)) for name, axes in record.get("views", {}).items())
    mesh = Mesh(tuple(record["mesh"].items()), views, record.get("device"))
    plan = Plan.empty(facts, mesh)
    relaxed = tuple((step, tuple(names)) for step, names in record.get("relaxed", {}).items())
    decisions = tuple(record.get("decisions", {}).items())
    for action in record["actions"]:
        span = _span(action)
        sites = tuple(action["at"])
        gone = next((site for site in sites if site not in plan.model.sites), None)
        if gone is not None:
            title = f"the plan names a module `{gone}`, which the model does not have"
            raise Refusal(Diagnostic("S907", title, Label(span)))
        primitive = _primitive(action, mesh, span)
        try:
            legality.check(plan, primitive, sites, span)
            plan = plan.add(primitive, sites, step=action["step"], span=span)
        except Refusal as refusal:
            raise refusal.at(span) from None
    expected = tuple(_expectation(one) for one in record.get("expected", ()))
    return replace(plan, decisions=decisions, relaxed=relaxed, expected=expected)


def _expectation(one: Mapping[str, Any]) -> Expectation:
    """A recorded bound; refuses (S907) what is none."""
    try:
        given = {name: one[name] for name in EXPECTED}
        return Expectation(**given | {"axes": tuple(one["axes"])}, span=_span(one))
    except (KeyError, TypeError):
        title = f"the plan has an `expect` that is not a bound: `{one}`"
        raise Refusal(Diagnostic("S907", title)) from None


def _span(action: Mapping[str, Any]) -> Span:
    """The place that asked for the row, without its text."""
    name, line, col = action.get("from", ("", 0, 0))
    return Span(Source(name, ""), line, col, line, col) if line else NOWHERE


def _primitive(action: Mapping[str, Any], mesh: Mesh, span: Span) -> Primitive:
    kind = registry().get(action["do"])
    if kind is None:
        title = f"the plan names a primitive `{action['do']}`, which does not exist"
        raise Refusal(Diagnostic("S907", title, Label(span)))
    sizes = {name: mesh.size(name) for name in mesh.names}
    given = list(_arguments(kind, action.get("args", {}), Names(axes=sizes), span))
    return bind(kind, given, span, sizes)


def _arguments(
    kind: type[Primitive], args: Mapping[str, Any], names: Names, span: Span
) -> Iterator[Argument]:
    """The recorded arguments as those of a call."""
    form = surface(kind)
    for name, value in args.items():
        if name == form.rest and _are_pairs(value):
            pairs = [(key, item) for key, item in value]
        elif name == form.many and isinstance(value, list):
            pairs = [(None, item) for item in value]
        else:
            pairs = [(name, value)]
        for key, item in pairs:
            yield Argument(key, _value(item, names, span), span, span)


def _are_pairs(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) for pair in value
    )


def _value(value: Any, names: Names, span: Span) -> Any:
    """A recorded value as the language has it: placements and calls were kept as text."""
    if isinstance(value, list):
        return tuple(_value(item, names, span) for item in value)
    if isinstance(value, str) and (value == "R" or value.endswith(")")):
        return evaluate(parse_expr(value, span), names)
    return value
