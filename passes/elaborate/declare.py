"""Declarations of a schedule: functions from State to State, called by `Expander`.

* header, knob, mesh, view, require, search, use, def and pattern.
* Arguments of a call, bound to the parameters of a `def`.
* `expect`: bounds on costs of a plan, read here and checked in simulate/expectations.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from schedlang.diagnostics.diagnostic import (
    Diagnostic,
    Facts,
    Label,
    Refusal,
    facts_of_unknown,
    quote_names,
    suggest_name,
)
from schedlang.diagnostics.source import Span
from schedlang.ir.annotations import BOUNDS, Expectation
from schedlang.ir.mesh import Mesh
from schedlang.ir.primitive import find
from schedlang.language import nodes as n
from schedlang.language import patterns, printer
from schedlang.language.kinds import Axis, Mismatch, UnknownAxis, convert, describe
from schedlang.language.knob import (
    find_alternatives,
    format_settings,
    make_knob,
    refuse_unknown_settings,
)
from schedlang.language.nodes import walk
from schedlang.language.value import (
    UNKNOWN,
    AxisSize,
    Bytes,
    Names,
    Seconds,
    evaluate,
    show_value,
    unknown_words,
)
from schedlang.passes.elaborate import base_schedules
from schedlang.passes.elaborate.state import (
    Definition,
    Settings,
    State,
    initial_state,
    unknown_primitive,
)

PARAMETER_TYPES: Mapping[str, Any] = {
    "axis": Axis,
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
    "bytes": Bytes,
}


def arguments_of(
    call: n.Call, node: n.Def, outer_names: Names, inner_names: Names
) -> Mapping[str, Any]:
    """Return the value of every parameter of a `def` (S302, S304, S305).

    Arguments are evaluated in `outer_names`, the caller's names; defaults in `inner_names`, the
    definition's.
    """
    names = [param.name for param in node.params]
    free = list(names)
    values: dict[str, Any] = {}
    for arg in call.args:
        name = _parameter_of(call, arg, names, free, values)
        inner = arg.value if isinstance(arg, n.Keyword) else arg
        param = node.params[names.index(name)]
        values[name] = _convert(param, evaluate(inner, outer_names), inner, outer_names)
    for param in node.params:
        if param.name not in values and param.default is not None:
            value = evaluate(param.default, inner_names)
            values[param.name] = _convert(param, value, param.default, inner_names)
    missing = [name for name in names if name not in values]
    if missing:
        definition_label = (Label(node.span, "defined here"),) if node.span else ()
        title = f"`{call.name.text}` needs {quote_names(missing)}"
        raise Refusal.of("S305", title, Label(call.span), definition_label)
    return values


def _parameter_of(
    call: n.Call, arg: n.Node, names: list[str], free: list[str], values: Mapping[str, Any]
) -> str:
    """Return the name of the parameter that an argument is for, and remove it from `free`."""
    title = ""
    facts: Facts = ()
    helps = (f"it takes {quote_names(names)}",) if names else ("it takes none",)
    if isinstance(arg, n.Keyword):
        if arg.name in free:
            free.remove(arg.name)
            return arg.name
        title = f"`{call.name.text}` takes no argument `{arg.name}`"
        helps = (suggest_name(arg.name, names, "it takes"),) if names else helps
        facts = facts_of_unknown(arg.name, names)
        if arg.name in values:
            title, helps, facts = f"`{arg.name}` is given twice", ("drop one",), ()
    elif free:
        return free.pop(0)
    else:
        title = f"`{call.name.text}` takes no further argument"
    raise Refusal.of("S302", title, Label(arg.span), helps=helps, facts=facts)


def _convert(param: n.Param, value: Any, node: n.Node, names: Names) -> Any:
    """Return a value converted to the type of its parameter (S102, S204, S304)."""
    if param.type is None or value is UNKNOWN:
        return value
    if param.type not in PARAMETER_TYPES:
        title = f"a parameter cannot be of type `{param.type}`"
        types, label = PARAMETER_TYPES, Label(param.span)
        raise Refusal.unknown("S102", title, param.type, types, "choose one of", label)
    kind = PARAMETER_TYPES[param.type]
    try:
        converted = convert(kind, value, names.axes)
    except UnknownAxis as axis:
        _refuse_axis(str(axis), node, names)
    except Mismatch:
        title = f"`{param.name}` must be {describe(kind)}"
        label = Label(node.span, f"this is {show_value(value)}")
        raise Refusal.of("S304", title, label, facts=unknown_words(value)) from None
    if kind is Axis and not isinstance(value, AxisSize):
        return AxisSize.of(converted, names.axes[converted])
    return value if kind is Axis else converted


def _refuse_axis(name: str, node: n.Node, names: Names) -> NoReturn:
    title, label = f"the mesh has no axis `{name}`", Label(node.span)
    raise Refusal.unknown("S204", title, name, names.axes, "its axes are", label)


MAX_AXIS_SIZE = 2**20  # ranks along one axis


def refuse_at(
    code: str,
    title: str,
    span: Span,
    label: str = "",
    *helps: str,
    note: str = "",
    facts: Facts = (),
) -> NoReturn:
    """Raise a Refusal at a place."""
    notes = (note,) * bool(note)
    raise Refusal.of(code, title, Label(span, label), (), notes, helps, facts=facts)


def check_header(node: n.Header, state: State) -> State:
    """Check that the model's class is the header's class or a subclass of it (S110)."""
    if node.model and state.facts and not state.facts.sites[""].is_a(node.model):
        class_name = state.facts.class_name
        help_ = f"a schedule for this model begins with `schedule 1 for {class_name}`"
        title = f"this schedule is for the model class {node.model}"
        refuse_at("S110", title, node.span, f"the model is of class {class_name}", help_)
    return state


def declare_knob(node: n.Knob, state: State) -> State:
    """Declare a knob (S101 to S105)."""
    _check_new_name(node.name, node.span, state)
    return state.with_knob(make_knob(node, state.names, state.settings.knobs))


def _check_new_name(name: str, span: Span, state: State) -> None:
    is_taken = name in state.knobs or name in state.axes or name in state.defs
    is_taken = is_taken or name in state.patterns
    if is_taken:
        knob = state.knobs.get(name)
        first_label = (Label(knob.span, "first declared here"),) if knob else ()
        title = f"`{name}` is declared twice"
        raise Refusal.of("S101", title, Label(span), first_label, (), ("rename one",))


# ---- mesh and views -----------------------------------------------------------------------


def declare_mesh(node: n.Mesh, state: State) -> State:
    """Declare the mesh (S111): named axes, slowest first; the size of one axis may be `_`.

    The axis `_` gets the remaining ranks.
    """
    if state.mesh is not None:
        refuse_at(
            "S101", "the mesh is declared twice", node.span, "", "name all axes in one `mesh`"
        )
    if state.plan and state.plan.actions:
        refuse_at("S111", "the mesh stands above the first row", node.span)
    sizes: dict[str, int | None] = {}
    sized: dict[str, str] = {}
    for arg in node.args:
        if not isinstance(arg, n.Keyword):
            refuse_at("S111", "an axis needs a name and a size", arg.span, "", "write `mesh(tp=2)`")
        if arg.name in sizes:
            refuse_at("S101", f"the axis `{arg.name}` is declared twice", arg.span)
        sizes[arg.name] = _size(arg, state)
        if isinstance(arg.value, n.Name) and arg.value.text in state.knobs:
            sized[arg.name] = arg.value.text
        if arg.name in state.knobs:
            _check_own_knob(arg)
    if state.settings.mesh:
        _check_known_axes(node, sizes, state.settings)
    settings = state.settings
    axes = tuple(
        (a, _remaining_size(node, sizes, settings) if n is None else n) for a, n in sizes.items()
    )
    return replace(state.with_mesh(Mesh(axes, (), node.on)), axis_knobs=sized)


def with_stand_in_mesh(node: n.Mesh, state: State) -> State:
    """Return a state with a stand-in for a refused mesh: axes of size 1 with the same names.

    The state has no plan any more.
    """
    names = [arg.name for arg in node.args if isinstance(arg, n.Keyword)]
    taken = [name for name in dict.fromkeys(names) if name not in state.axes]
    axes = tuple((name, 1) for name in taken)
    return replace(state, mesh=state.mesh or Mesh(axes), plan=None)


def _size(arg: n.Keyword, state: State) -> int | None:
    """Return the size of an axis; None for `_`."""
    if arg.name in state.settings.mesh:
        size: Any = state.settings.mesh[arg.name]
    elif isinstance(arg.value, n.Name) and arg.value.text == "_":
        return None
    else:
        size = evaluate(arg.value, state.names)
    if size is UNKNOWN:
        return 1
    if isinstance(size, bool) or not isinstance(size, int):
        title = "the size of an axis must be a number"
        label = Label(arg.span, f"is {show_value(size)}")
        raise Refusal.unknown("S111", title, str(size), state.knobs, primary=label)
    if not 1 <= size <= MAX_AXIS_SIZE or isinstance(size, Bytes):
        refuse_at("S111", f"an axis must have 1 to {MAX_AXIS_SIZE} ranks", arg.span, f"is {size}")
    return int(size)


def _check_own_knob(arg: n.Keyword) -> None:
    if not isinstance(arg.value, n.Name) or arg.value.text != arg.name:
        help_ = f"give the axis the size of the knob, `{arg.name}={arg.name}`, or rename one"
        title = f"`{arg.name}` is a knob and also an axis of another size"
        refuse_at("S101", title, arg.span, "", help_)


def _check_known_axes(node: n.Mesh, sizes: Mapping[str, Any], settings: Settings) -> None:
    for name in settings.mesh:
        if name not in sizes:
            title, label = f"the mesh has no axis `{name}`", Label(node.span)
            raise Refusal.unknown("S204", title, name, sizes, "its axes are", label)


def _remaining_size(node: n.Mesh, sizes: Mapping[str, int | None], settings: Settings) -> int:
    """Return the size of the axis `_`: the number of ranks divided by the sizes of other axes.

    The number of ranks is the running job's, else that of `on NAMExN`.
    """
    blanks = [name for name, size in sizes.items() if size is None]
    if len(blanks) > 1:
        example = ", ".join(f"{k}={'_' if k == blanks[0] else v or 2}" for k, v in sizes.items())
        help_ = f"give the others a size: `mesh({example})`"
        label = f"{len(blanks)} axes are `_`"
        refuse_at("S111", "only one axis may be `_`", node.span, label, help_)
    taken = math.prod(size for size in sizes.values() if size is not None)
    machine = re.fullmatch(r".*?x(\d+)", node.on or "")
    world = settings.world or (int(machine[1]) if machine else 2 * taken)
    if world % taken:
        label = f"the other axes take {taken} of {world} ranks"
        help_ = "the product of their sizes must divide the number of ranks"
        title = f"the ranks do not divide: `{blanks[0]}` has no integer size"
        refuse_at("S111", title, node.span, label, help_)
    return world // taken


def declare_view(node: n.View, state: State) -> State:
    """Declare a view: a name for several axes that are folded into one."""
    _check_new_name(node.name, node.span, state)
    mesh = state.mesh or Mesh()
    for name in node.axes:
        if name not in mesh.sizes:
            note = f"the mesh is {mesh}"
            help_ = (
                suggest_name(name, mesh.sizes, "its axes are") if mesh.sizes else "declare `mesh`"
            )
            title, facts = f"the mesh has no axis `{name}`", facts_of_unknown(name, mesh.sizes)
            refuse_at("S204", title, node.span, "", help_, note=note, facts=facts)
    if len(set(node.axes)) < len(node.axes):
        refuse_at("S111", "a view must fold different axes", node.span)
    new_mesh = replace(mesh, views=(*mesh.views, (node.name, node.axes)))
    if node.size is not None:
        size, stated_size = new_mesh.size(node.name), evaluate(node.size, state.names)
        if stated_size is not UNKNOWN and stated_size != size:
            title = f"`{node.name}` has {size} ranks, not {show_value(stated_size)}"
            refuse_at("S111", title, node.span, f"the mesh is {mesh}")
    return state.with_mesh(new_mesh)


# ---- require ------------------------------------------------------------------------------


def check_require(node: n.Require, state: State) -> State:
    """Check a condition on knobs, mesh and model (S104).

    A condition whose value is unknown without a model counts as true.
    """
    condition = evaluate(node.test, state.names)
    if condition is UNKNOWN or condition is True:
        return state
    if condition is not False:
        label_text = f"this is {show_value(condition)}"
        title = "`require` needs a condition: true or false"
        refuse_at("S304", title, node.test.span, label_text, facts=unknown_words(condition))
    used = {part for name in walk(node.test) if isinstance(name, n.Name) for part in name.parts[:1]}
    knobs = {name: k for name, k in state.knobs.items() if name in used}
    helps = find_alternatives(
        knobs, lambda values: evaluate(node.test, with_knobs(state, values)) is True
    )
    label = ""
    if isinstance(node.test, n.Chain) and isinstance(node.test.items[0], n.Node):
        operand = node.test.items[0]
        value = evaluate(operand, state.names)
        value = int(value) if isinstance(value, AxisSize) else value
        if not isinstance(operand, n.Lit):
            label = f"{printer.expr(operand)} is {show_value(value)}"
    note = f"with {format_settings(knobs)}" if knobs else ""
    refuse_at("S104", "`require` fails", node.span, label, *helps, note=note)


def with_knobs(state: State, values: Mapping[str, Any]) -> Names:
    """Return the names of a state if the knobs in `values` had other values."""
    names = state.names
    axes = {
        axis: values.get(state.axis_knobs.get(axis, ""), size) for axis, size in names.axes.items()
    }
    return replace(names, knobs={**names.knobs, **values}, axes=axes)


# ---- search -------------------------------------------------------------------------------


def declare_search(node: n.Search, state: State) -> State:
    """Set a limit for the search for settings (S106, S109); only that search reads it."""
    name, value = node.limit.name, evaluate(node.limit.value, state.names)
    values = value if isinstance(value, tuple) else (value,)
    if any(limit is UNKNOWN for limit in values):
        return state
    sizes = tuple(int(limit) if isinstance(limit, AxisSize) else limit for limit in values)
    try:
        return replace(state, limits=state.limits.with_limit(node.how, name, sizes))
    except Refusal as refusal:
        raise refusal.at(node.limit.span) from None


# ---- definitions and libraries ------------------------------------------------------------


def declare_def(node: n.Def, state: State) -> State:
    """Declare a `def`; its body may call only definitions above it, so there is no recursion."""
    _check_new_name(node.name, node.span, state)
    if find(node.name) is not None:
        help_ = "rename the definition"
        refuse_at("S101", f"`{node.name}` is a primitive", node.span, "", help_)
    names = [param.name for param in node.params]
    for name in names:
        if names.count(name) > 1:
            refuse_at("S101", f"`{name}` is declared twice", node.span, "among the parameters")
    problems = list(_unknown_calls(node, state))
    if problems:
        raise Refusal(*problems)
    definition = Definition(node, state.defs, state.names.knobs, state.patterns)
    return replace(state, defs={**state.defs, node.name: definition})


def _unknown_calls(node: n.Def, state: State) -> Iterator[Diagnostic]:
    for inner in walk(node.block):
        if isinstance(inner, n.Rule | n.Do):
            name = inner.call.name.text
            if name not in state.defs and name not in state.refused_names and find(name) is None:
                yield unknown_primitive(inner.call.name, state)


def use_library(node: n.Use, state: State, above: tuple[Path, ...] = ()) -> State:
    """Bring in the definitions of a library (S112); `above` are the files being read."""
    path = base_schedules.path_of_use(node, above)
    try:
        file = base_schedules.tree_of_use(node, path)
    except Refusal as refusal:
        raise refusal.at(node.span) from None
    base_schedules.count_use(file.span.source.text, node.span)
    values: dict[str, Any] = {}
    for arg in node.args or ():
        if not isinstance(arg, n.Keyword):
            refuse_at("S302", "a library's knobs are set by name", arg.span, "", "`(tp=4)`")
        values[arg.name] = evaluate(arg.value, state.names)
    inner = _execute_library(file, state, values, (*above, path))
    refuse_unknown_settings(values, inner.knobs, node.span)
    prefix = f"{node.alias}." if node.alias else ""
    defs = {prefix + name: d for name, d in inner.defs.items()}
    patterns = {prefix + name: p for name, p in inner.patterns.items()}
    for name in (*defs, *patterns):
        _check_new_name(name, node.span, state)
    return replace(state, defs={**state.defs, **defs}, patterns={**state.patterns, **patterns})


def declare_pattern(node: n.Pattern, state: State) -> State:
    """Declare a pattern: a subgraph with a name (S885)."""
    _check_new_name(node.name, node.span, state)
    return replace(state, patterns={**state.patterns, node.name: patterns.pattern_of(node)})


def _execute_library(
    file: n.File, state: State, values: Mapping[str, Any], above: tuple[Path, ...]
) -> State:
    """Return the state at the end of a library: its knobs, definitions and patterns."""
    inner = replace(initial_state(None, Settings(values)), facts=state.facts)
    inner = check_header(file.header, inner)
    for item in file.items:
        match item:
            case n.Knob():
                inner = declare_knob(item, inner)
            case n.Require():
                inner = check_require(item, inner)
            case n.Def():
                inner = declare_def(item, inner)
            case n.Use():
                inner = use_library(item, inner, above)
            case n.Pattern():
                inner = declare_pattern(item, inner)
            case _:
                raise AssertionError("a base, whose items are executed one by one")
    return inner


TIME = "time"
MIRRORED_OPERATORS = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
MEASURES = {
    "peak_memory": "peak_memory < 70GiB",
    "comm_bytes": "comm_bytes(tp) < 2GiB",
    "bubble": "bubble < 0.2",
    TIME: "time(step) < 180ms",
}
BOUND_TYPES: Mapping[str, tuple[type, ...]] = {  # types of bounds, in addition to plain numbers
    "peak_memory": (Bytes,),
    "comm_bytes": (Bytes,),
    "bubble": (),
    TIME: (Seconds,),
}


def expectation_of(node: n.Expect, names: Names) -> Expectation | None:
    """Return the expectation of an `expect`; None if its bound is unknown without a model.

    Raises Refusal S861 where the statement does not compare a measure with a bound.
    """
    if not isinstance(node.test, n.Chain) or len(node.test.items) != 3:
        _refuse(node, "`expect` must compare a measure with a bound")
    left, op, right = node.test.items
    assert isinstance(op, str)
    if isinstance(left, str) or isinstance(right, str) or op not in BOUNDS:
        _refuse(node, f"a bound is one of {', '.join(BOUNDS)}")
    if _measure_of(left) is None and _measure_of(right) is not None:
        left, op, right = right, MIRRORED_OPERATORS[op], left
    name = _measure_of(left)
    if name is None:
        measure = left.text if isinstance(left, n.Name) else printer.expr(left)
        help_ = suggest_name(measure, MEASURES, "measures are")
        facts = facts_of_unknown(measure, MEASURES)
        _refuse(node, f"`{measure}` is not a measure of a plan", help_, facts=facts)
    axes = _axes_of_measure(node, name, left, names)
    bound = evaluate(right, names)
    if bound is UNKNOWN:
        return None
    _check_bound(node, name, bound, printer.expr(right))
    text = printer.expr(node.test)
    return Expectation(name, axes, op, float(bound), text, node.on, node.span)


def _measure_of(expr: n.Expr | str) -> str | None:
    """Return the name of the measure in an expression, or None."""
    text = expr.text if isinstance(expr, n.Name) else ""
    text = expr.name.text if isinstance(expr, n.Call) else text
    return text if text in MEASURES else None


def _check_bound(node: n.Expect, name: str, bound: Any, text: str) -> None:
    """Refuse (S861) a bound that is no number, or whose unit is not the measure's.

    A bound of a time must have a unit.
    """
    if isinstance(bound, bool) or not isinstance(bound, int | float):
        _refuse(node, f"the bound is {show_value(bound)}, not a number")
    wrong_unit = isinstance(bound, Bytes | Seconds) and not isinstance(bound, BOUND_TYPES[name])
    if wrong_unit or (name == TIME and not isinstance(bound, Seconds)):
        unit = {"bubble": "a share", TIME: "a time with its unit"}.get(name, "a number of bytes")
        _refuse(node, f"the bound of `{name}` must be {unit}, not `{text}`")


def _axes_of_measure(node: n.Expect, name: str, measure: n.Expr, names: Names) -> tuple[str, ...]:
    """Return the axes in the arguments of a measure; `time` must have the argument `step`."""
    args = measure.args if isinstance(measure, n.Call) else ()
    words = [arg.text if isinstance(arg, n.Name) else "" for arg in args]
    if name == TIME:
        if words != ["step"]:
            _refuse(node, "`time` needs `step`: `time(step)`")
        return ()
    if words and name != "comm_bytes":
        _refuse(node, f"`{name}` takes no arguments")
    for text in words:
        if text not in names.axes:
            title = f"`{name}` takes axes of the mesh"
            help_ = suggest_name(text, names.axes, "the mesh has")
            facts = facts_of_unknown(text, names.axes)
            _refuse(node, title, help_, facts=facts)
    return tuple(words)


def _refuse(node: n.Expect, title: str, *helps: str, facts: Facts = ()) -> NoReturn:
    examples = f"for example {', '.join(f'`expect {example}`' for example in MEASURES.values())}"
    raise Refusal.of("S861", title, Label(node.span), helps=(*helps, examples), facts=facts)
