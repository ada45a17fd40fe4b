"""Warnings of `check`: statements without effect, and steps that are verified loosely or not."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from schedlang.diagnostics.diagnostic import Diagnostic, Label, Refusal, limit_messages
from schedlang.diagnostics.source import Span
from schedlang.ir.features import Checking
from schedlang.ir.primitive import find
from schedlang.language import nodes as n
from schedlang.language import printer
from schedlang.language.knob import Knob
from schedlang.language.nodes import walk
from schedlang.language.value import evaluate, show_value
from schedlang.passes.elaborate.declare import with_knobs
from schedlang.passes.elaborate.state import State

MAX_COMBINATIONS = 1024  # combinations of knob values that are tried for a condition
# about the rtol of torch.testing.assert_close by dtype; without a model the largest one counts
USUAL_RTOL = {"float64": 1e-7, "float32": 1.3e-6, "float16": 1e-3, "bfloat16": 2e-2}
Rows = Sequence[n.Rule | n.Do]


def lint(file: n.File, state: State | None = None) -> list[Diagnostic]:
    """Return the warnings about a file, in the order of its lines.

    `state` is the state after the file was executed; with a model it has the rows that selected
    no module.
    """
    steps = [item for item in file.items if isinstance(item, n.Step)]
    diagnostics = [*_unused(file), *_unverified(steps)]
    if state is not None:
        diagnostics += [
            *_never_true(file, state),
            *_of_one_rank(file, state),
            *_loose_tolerances(file, state),
        ]
        diagnostics += _empty_rows(file.items, state.empty_rows)
    return list(
        limit_messages(sorted(diagnostics, key=lambda d: (d.primary.span.line, d.primary.span.col)))
    )


# -- declared, and never used ----------------------------------------------------------------------


def _unused(file: n.File) -> Iterator[Diagnostic]:
    """Yield W101 to W104 for unused knobs, definitions, patterns and views.

    Definitions and patterns of a library are not reported: other files use them.
    """
    used = {part for node in walk(file) for part in _uses(node)}
    called_names = {row.call.name.text for row in _rows(file)}
    is_library = all(
        isinstance(x, n.Knob | n.Require | n.Def | n.Use | n.Pattern) for x in file.items
    )
    for item in file.items:
        if isinstance(item, n.Knob) and item.name not in used:
            help_ = f"drop it, or use it: `mesh(tp={item.name})`"
            yield _warning("W101", f"the knob `{item.name}` is never used", item, help_)
        if isinstance(item, n.Def) and not is_library and item.name not in called_names:
            help_ = f"drop it, or call it in a row: `path  {item.name}(...)`"
            yield _warning("W102", f"`{item.name}` is never called", item, help_)
        if isinstance(item, n.Pattern) and not is_library and item.name not in used:
            help_ = f"drop it, or use it: `path  fuse({item.name})`"
            yield _warning("W103", f"the pattern `{item.name}` is never used", item, help_)
        if isinstance(item, n.View) and item.name not in used:
            help_ = f"drop it, or name it in a row: `over={item.name}`"
            yield _warning("W104", f"the view `{item.name}` is never used", item, help_)


def _uses(node: n.Node) -> Iterator[str]:
    """Yield the names that a node mentions."""
    if isinstance(node, n.Name):
        yield node.parts[0]
    elif isinstance(node, n.Lit):
        yield node.text.strip('"')  # a pattern's name may be a text
    elif isinstance(node, n.View):
        yield from node.axes
    elif isinstance(node, n.Seg):
        for index in node.index:
            bounds = (index,) if isinstance(index, str) else (index.start, index.stop, index.step)
            yield from (bound for bound in bounds if bound)


def _unverified(steps: Sequence[n.Step]) -> Iterator[Diagnostic]:
    """Yield W701 for steps that have rows, but no row that verifies the step by itself."""
    for step in steps:
        rows = _rows(step)
        if rows and not any(map(_is_checking, rows)):
            title = f"the step `{step.name}` is never verified"
            yield _warning("W701", title, step, "end it with `verify(forward, backward)`")


# -- rows that do nothing --------------------------------------------------------------------------


def _never_true(file: n.File, state: State) -> Iterator[Diagnostic]:
    """Yield W105 for each `when` whose condition is false for all values of the knobs."""
    for node in walk(file):
        if isinstance(node, n.When) and _possible_values(node.test, state) == {False}:
            title = f"`{printer.expr(node.test)}` is never true"
            names = {part for inner in walk(node.test) for part in _uses(inner)}
            knobs = [knob for name, knob in state.knobs.items() if name in names and knob.options]
            label = ", ".join(f"`{k.name}` is one of {show_value(k.options)}" for k in knobs[:2])
            help_ = "drop the block, or widen the domain of a knob"
            yield _warning("W105", title, node, help_, label=label if len(label) < 80 else "")


def _possible_values(test: n.Expr, state: State) -> set[object]:
    """Return the values of a condition over all values of its knobs; {None} where unknown."""
    names = {part for node in walk(test) for part in _uses(node)}
    names |= {knob for axis, knob in state.axis_knobs.items() if axis in names}
    knobs = [knob for name, knob in state.knobs.items() if name in names]
    options = [_options(knob) for knob in knobs]
    if not all(options) or math.prod(map(len, options)) > MAX_COMBINATIONS:
        return {None}
    results: set[object] = set()
    for values in itertools.product(*options):
        setting = {knob.name: value for knob, value in zip(knobs, values)}
        try:
            results.add(evaluate(test, with_knobs(state, setting)))
        except Refusal:  # an argument of a definition, or another value for which it has no meaning
            results.add(None)
    return results


def _options(knob: Knob) -> tuple[object, ...]:
    """Return all values of a knob; options of a choice are converted to the knob's type."""
    if knob.type != "choice":
        return knob.options
    return tuple(type(knob.value).of(str(o), knob.name, knob.value.options) for o in knob.options)


def _of_one_rank(file: n.File, state: State) -> Iterator[Diagnostic]:
    """Yield W401 for rows over an axis with one rank whose knob has its default value."""
    by_axis: dict[str, list[n.Rule | n.Do]] = {}
    for row in _rows(file):
        for arg in row.call.args:
            if isinstance(arg, n.Keyword) and arg.name == "over" and isinstance(arg.value, n.Name):
                by_axis.setdefault(arg.value.text, []).append(row)
    for axis, rows in by_axis.items():
        knob = state.knobs.get(state.axis_knobs.get(axis, ""))
        if state.axes.get(axis) != 1 or knob is None or knob.options in ((1,), ()):
            continue
        if knob.name not in state.settings.knobs and axis not in state.settings.mesh:
            title = f"`{axis}` has 1 rank: this row does nothing"
            label = f"`{knob.name}` has its default value"
            count_note = f" (and {len(rows) - 1} more like it)" if len(rows) > 1 else ""
            help_ = f"set it: `--knob {knob.name}={next(o for o in knob.options if o != 1)}`"
            yield _warning("W401", title + count_note, rows[0].call, help_, label=label)


def _empty_rows(
    body: Sequence[n.Node], empty: Sequence[Span], is_optional: bool = False
) -> list[Diagnostic]:
    """Return W201 for rows that selected no module because a selector ends in `?`."""
    rows = []
    for node in body:
        match node:
            case n.Step(block=block) | n.Def(block=block):
                rows += _empty_rows(block.body, empty, is_optional)
            case n.At(paths=paths, block=block):
                rows += _empty_rows(
                    block.body, empty, is_optional or any(p.optional for p in paths)
                )
            case n.When(block=block, orelse=orelse):
                rows += _empty_rows(block.body, empty, is_optional)
                rows += _empty_rows(orelse.body if orelse else (), empty, is_optional)
            case n.Rule(call=call) | n.Do(call=call):
                optional = is_optional or (
                    isinstance(node, n.Rule) and any(p.optional for p in node.paths)
                )
                if optional and call.span in empty:
                    help_ = "drop the row; `schedlang tree FILE` shows the modules"
                    rows.append(_warning("W201", "this row selects no module", node, help_))
    return rows


# -- verified otherwise ----------------------------------------------------------------------------


def _loose_tolerances(file: n.File, state: State) -> Iterator[Diagnostic]:
    """Yield W702 for each `rtol` that is larger than usual for the model's dtype."""
    dtypes = (
        {param.dtype for param in state.facts.unique_parameters.values()}
        if state.facts
        else set(USUAL_RTOL)
    )
    usual = max((USUAL_RTOL.get(dtype, 0.0) for dtype in dtypes), default=0.0)
    for row in _rows(file):
        for arg in row.call.args if _is_checking(row) else ():
            if not isinstance(arg, n.Keyword) or arg.name != "rtol" or not usual:
                continue
            try:
                value = evaluate(arg.value, state.names)
            except Refusal:  # an argument of a definition
                continue
            if isinstance(value, float) and value > usual:
                dtype_text = next(iter(dtypes)) if len(dtypes) == 1 else "any dtype"
                title = f"a tolerance of {value:g} is looser than usual for {dtype_text}"
                help_ = "leave `rtol` out"
                yield _warning("W702", title, arg, help_, label=f"{usual:g} is usual")


def _is_checking(row: n.Rule | n.Do) -> bool:
    """Return whether the primitive of a row adds checks to a proof."""
    kind = find(row.call.name.text)
    return kind is not None and issubclass(kind, Checking)


def _rows(node: n.Node) -> Rows:
    return [inner for inner in walk(node) if isinstance(inner, n.Rule | n.Do)]


def _warning(code: str, title: str, node: n.Node, *helps: str, label: str = "") -> Diagnostic:
    line = node.span.source.line(node.span.line)
    end = node.span.end_col if node.span.end_line == node.span.line else len(line.rstrip()) + 1
    span = Span(node.span.source, node.span.line, node.span.col, node.span.line, end)
    return Diagnostic(code, title, Label(span, label), helps=helps, level="warning")
