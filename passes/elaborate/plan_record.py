"""Plans as JSON (`plan --out`): writing a plan, checking a record's form, restoring the plan."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from schedlang.diagnostics.diagnostic import Label, Refusal
from schedlang.diagnostics.source import NOWHERE, Source, Span, read_utf8
from schedlang.ir.annotations import Expectation
from schedlang.ir.mesh import Mesh
from schedlang.ir.model import ModelFacts
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import Primitive, load_all, registry
from schedlang.language.kinds import Argument, bind, signature_of
from schedlang.language.syntax import parse_expr
from schedlang.language.value import Names, evaluate
from schedlang.passes.elaborate import legality

Malformed = Iterator[tuple[str, str]]  # (a place in the record, the expected content)
_LARGEST = 2**63  # bound of integers
_DEEPEST = 50  # bound of nested lists


def _malformed_places(record: Mapping[str, Any]) -> Malformed:
    yield from _check_values("", record, 0)
    yield from _check_mesh(record)
    yield from _check_texts("schedule_file schedule_text model_file device", record)
    decisions, relaxed = record.get("decisions", {}), record.get("relaxed", {})
    if not isinstance(decisions, dict):
        yield "decisions", "knobs and their values"
    if not isinstance(relaxed, dict) or not all(map(_is_list_of_texts, relaxed.values())):
        yield "relaxed", "steps, and the names that each gives up"
    actions, expected = record.get("actions"), record.get("expected", [])
    if not isinstance(actions, list):
        yield "actions", "a list of rows"
        return
    for index, action in enumerate(actions):
        yield from _check_action(f"actions[{index}]", action)
    if not isinstance(expected, list):
        yield "expected", "a list of bounds"
        return
    for index, bound in enumerate(expected):
        path = f"expected[{index}]"
        if not isinstance(bound, dict):
            yield path, "a bound"
            continue
        yield from _check_place(path, bound)
        if not _is_list_of_texts(bound.get("axes")):
            yield f"{path}.axes", "names of axes"


def _check_mesh(record: Mapping[str, Any]) -> Malformed:
    axes, views = record.get("mesh"), record.get("views", {})
    if not isinstance(axes, dict) or not all(type(n) is int and n >= 1 for n in axes.values()):
        yield "mesh", "axes and their sizes, each 1 or more"
        return
    if not isinstance(views, dict) or not all(map(_is_list_of_texts, views.values())):
        yield "views", "names, each with the axes that it folds"
        return
    for name, folded_axes in views.items():
        if name in axes or not folded_axes or not set(folded_axes) <= set(axes):
            yield f"views.{name}", "a name of its own for axes of the mesh"


def _check_action(path: str, action: object) -> Malformed:
    if not isinstance(action, dict):
        yield path, "a row"
        return
    if not isinstance(action.get("step"), str | None) or "step" not in action:
        yield f"{path}.step", "the name of a step"
    if not isinstance(action.get("do"), str):
        yield f"{path}.do", "the name of a primitive"
    if not action.get("at") or not _is_list_of_texts(action["at"]):
        yield f"{path}.at", "names of modules, one or more"
    if not isinstance(action.get("args", {}), dict):
        yield f"{path}.args", "arguments by name"
    yield from _check_place(path, action)


def _check_place(path: str, holder: Mapping[str, Any]) -> Malformed:
    """Check `from`: the file, line and column of a row."""
    origin = holder.get("from", ["", 0, 0])
    is_valid = isinstance(origin, list) and list(map(type, origin)) == [str, int, int]
    if not is_valid or min(origin[1:]) < 0:
        yield f"{path}.from", "a file, a line and a column"


def _check_texts(names: str, record: Mapping[str, Any]) -> Malformed:
    for name in names.split():
        if not isinstance(record.get(name), str | None):
            yield name, "a text"


def _check_values(path: str, value: object, depth: int) -> Malformed:
    """Check all values for too large numbers and too deep lists."""
    if depth > _DEEPEST:
        yield path, "fewer lists in lists"
    elif isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
        yield path, "a smaller number"
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _check_values(f"{path}.{name}" if path else name, item, depth + 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _check_values(f"{path}[{index}]", item, depth + 1)


def _is_list_of_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


EXPECTATION_FIELDS = ("measure", "axes", "op", "bound", "said", "on")


def plan_to_record(plan: Plan) -> dict[str, object]:
    """Return a plan as JSON values: knob decisions, mesh, `expect`s, and all rows.

    A row has its sites, arguments and place.
    """
    return {
        "schedule": 1,
        "decisions": {name: to_plain(value) for name, value in plan.decisions},
        "mesh": dict(plan.mesh.sizes),
        "views": {name: list(axes) for name, axes in plan.mesh.views},
        "device": plan.mesh.device,
        "expected": [
            {
                **{name: to_plain(getattr(expectation, name)) for name in EXPECTATION_FIELDS},
                "from": _line_and_column(expectation.span),
            }
            for expectation in plan.expected
        ],
        "relaxed": {step: list(names) for step, names in plan.relaxed},
        "actions": [
            {
                "id": action.row,
                "step": action.step,
                "at": list(action.sites),
                "do": action.name,
                "args": plain_arguments(action.primitive),
                "from": _line_and_column(action.span),
            }
            for action in plan.actions
        ],
    }


def _line_and_column(span: Any) -> list[object]:
    return [span.source.name, span.line, span.col]


def plain_arguments(primitive: Any) -> dict[str, object]:
    """Return the arguments that differ from their defaults, as JSON values."""
    field_values = ((f, getattr(primitive, f.name)) for f in dataclasses.fields(primitive))
    return {f.name: to_plain(value) for f, value in field_values if value != f.default}


def to_plain(value: object) -> object:
    """Return a value as a JSON value; placements and calls become text."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, int):
        return int(value)
    return float(value) if isinstance(value, float) else str(value)


def read_record(path: Path) -> dict[str, Any]:
    """Read the record in a file; refuse (S907) a file that holds no plan."""
    try:
        record = json.loads(read_utf8(path))
    except RecursionError:
        raise _not_a_plan(path, "its lists are nested too deep") from None
    except OSError as error:
        raise _not_a_plan(path, error.strerror or str(error)) from None
    except ValueError as error:
        raise _not_a_plan(path, f"it is not JSON: {error}") from None
    if not isinstance(record, dict) or record.get("plan") != 1:
        raise _not_a_plan(path, "it does not hold a plan of version 1")
    if not isinstance(record.get("actions"), list) or not isinstance(record.get("mesh"), dict):
        raise _not_a_plan(path, "it has no `mesh` and `actions`")
    if malformed := next(_malformed_places(record), None):
        raise _not_a_plan(path, f"`{malformed[0]}` is not {malformed[1]}")
    return record


def _not_a_plan(path: Path, reason: str) -> Refusal:
    help_ = "write one: `schedlang plan FILE --out plan.json`"
    return Refusal.of("S907", f"`{path}` is not a plan", notes=(reason,), helps=(help_,))


def plan_from_record(record: Mapping[str, Any], facts: ModelFacts) -> Plan:
    """Return the plan of a record on a model; each row is checked as if it came from a schedule."""
    load_all()
    views = tuple((name, tuple(axes)) for name, axes in record.get("views", {}).items())
    mesh = Mesh(tuple(record["mesh"].items()), views, record.get("device"))
    plan = Plan.empty(facts, mesh)
    relaxed = tuple((step, tuple(names)) for step, names in record.get("relaxed", {}).items())
    decisions = tuple(record.get("decisions", {}).items())
    for action in record["actions"]:
        span = _span_of(action)
        sites = tuple(action["at"])
        missing = next((site for site in sites if site not in plan.model.sites), None)
        if missing is not None:
            title = f"the plan names a module `{missing}`, which the model does not have"
            raise Refusal.of("S907", title, Label(span))
        primitive = _primitive_of(action, mesh, span)
        try:
            legality.check_row(plan, primitive, sites, span)
            plan = plan.add(primitive, sites, step=action["step"], span=span)
        except Refusal as refusal:
            raise refusal.at(span) from None
    expected = tuple(_expectation_of(bound) for bound in record.get("expected", ()))
    return replace(plan, decisions=decisions, relaxed=relaxed, expected=expected)


def _expectation_of(record: Mapping[str, Any]) -> Expectation:
    """Return a recorded `expect`; refuse (S907) a malformed one."""
    try:
        values = {name: record[name] for name in EXPECTATION_FIELDS}
        return Expectation(**values | {"axes": tuple(record["axes"])}, span=_span_of(record))
    except (KeyError, TypeError):
        title = f"the plan has an `expect` that is not a bound: `{record}`"
        raise Refusal.of("S907", title) from None


def _span_of(action: Mapping[str, Any]) -> Span:
    """Return the span of a recorded row, in a source without text."""
    name, line, col = action.get("from", ("", 0, 0))
    return Span(Source(name, ""), line, col, line, col) if line else NOWHERE


def _primitive_of(action: Mapping[str, Any], mesh: Mesh, span: Span) -> Primitive:
    kind = registry().get(action["do"])
    if kind is None:
        title = f"the plan names a primitive `{action['do']}`, which does not exist"
        raise Refusal.of("S907", title, Label(span))
    sizes = {name: mesh.size(name) for name in mesh.names}
    arguments = list(_arguments_of(kind, action.get("args", {}), Names(axes=sizes), span))
    return bind(kind, arguments, span, sizes)


def _arguments_of(
    kind: type[Primitive], args: Mapping[str, Any], names: Names, span: Span
) -> Iterator[Argument]:
    """Yield recorded arguments as arguments of a call."""
    signature = signature_of(kind)
    for name, value in args.items():
        if name == signature.rest and _is_list_of_pairs(value):
            pairs = [(key, item) for key, item in value]
        elif name == signature.many and isinstance(value, list):
            pairs = [(None, item) for item in value]
        else:
            pairs = [(name, value)]
        for key, item in pairs:
            yield Argument(key, _value_of(item, names, span), span, span)


def _is_list_of_pairs(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) for pair in value
    )


def _value_of(value: Any, names: Names, span: Span) -> Any:
    """Return the language's value of a recorded value: placements and calls are parsed again."""
    if isinstance(value, list):
        return tuple(_value_of(item, names, span) for item in value)
    if isinstance(value, str) and (value == "R" or value.endswith(")")):
        return evaluate(parse_expr(value, span), names)
    return value
