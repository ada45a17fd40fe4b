"""`expect`: bounds on what a plan costs, read while it is made; simulate/expected.py holds them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from schedlang.diagnostics.diagnostic import Diagnostic, Facts, Label, Refusal, guess, unknown
from schedlang.ir.facets import BOUNDS, Expectation
from schedlang.language import nodes as n
from schedlang.language import spelling
from schedlang.language.evaluate import evaluate
from schedlang.language.value import UNKNOWN, Bytes, Names, Seconds, shown

if TYPE_CHECKING:
    from schedlang.ir.facets import Expectation

TIME = "time"
MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
MEASURES = {
    "peak_memory": "peak_memory < 70GiB",
    "comm_bytes": "comm_bytes(tp) < 2GiB",
    "bubble": "bubble < 0.2",
    TIME: "time(step) < 180ms",
}
UNITS: Mapping[str, tuple[type, ...]] = {  # what bounds may be, beside plain numbers
    "peak_memory": (Bytes,),
    "comm_bytes": (Bytes,),
    "bubble": (),
    TIME: (Seconds,),
}


def read(node: n.Expect, names: Names) -> Expectation | None:
    """What a statement expects; None where its bound needs a model that is not there.

    Raises Refusal S861 for anything but a measure compared with a bound.
    """
    from schedlang.ir.facets import Expectation

    if not isinstance(node.test, n.Chain) or len(node.test.items) != 3:
        _refuse(node, "`expect` must compare a measure with a bound")
    left, op, right = node.test.items
    assert isinstance(op, str)
    if isinstance(left, str) or isinstance(right, str) or op not in BOUNDS:
        _refuse(node, f"a bound is one of {', '.join(BOUNDS)}")
    if _measure(left) is None and _measure(right) is not None:
        left, op, right = right, MIRRORED[op], left
    name = _measure(left)
    if name is None:
        word = left.text if isinstance(left, n.Name) else spelling.expr(left)
        help_, facts = guess(word, MEASURES, "measures are"), unknown(word, MEASURES)
        _refuse(node, f"`{word}` is not a measure of a plan", help_, facts=facts)
    axes = _arguments(node, name, left, names)
    bound = evaluate(right, names)
    if bound is UNKNOWN:
        return None
    _check_bound(node, name, bound, spelling.expr(right))
    said = spelling.expr(node.test)
    return Expectation(name, axes, op, float(bound), said, node.on, node.span)


def _measure(expr: n.Expr | str) -> str | None:
    """The name of the measure that an expression is, if it is one."""
    text = expr.text if isinstance(expr, n.Name) else ""
    text = expr.name.text if isinstance(expr, n.Call) else text
    return text if text in MEASURES else None


def _check_bound(node: n.Expect, name: str, bound: Any, said: str) -> None:
    """A bound is a number of the measure's own unit; a time says which."""
    if isinstance(bound, bool) or not isinstance(bound, int | float):
        _refuse(node, f"the bound is {shown(bound)}, not a number")
    other = isinstance(bound, Bytes | Seconds) and not isinstance(bound, UNITS[name])
    if other or (name == TIME and not isinstance(bound, Seconds)):
        what = {"bubble": "a share", TIME: "a time with its unit"}.get(name, "a number of bytes")
        _refuse(node, f"the bound of `{name}` must be {what}, not `{said}`")


def _arguments(node: n.Expect, name: str, measure: n.Expr, names: Names) -> tuple[str, ...]:
    """The axes of a measure that has some; a time is that of a step."""
    given = measure.args if isinstance(measure, n.Call) else ()
    found = [arg.text if isinstance(arg, n.Name) else "" for arg in given]
    if name == TIME:
        if found != ["step"]:
            _refuse(node, "`time` needs `step`: `time(step)`")
        return ()
    if found and name != "comm_bytes":
        _refuse(node, f"`{name}` takes no arguments")
    for text in found:
        if text not in names.axes:
            title = f"`{name}` takes axes of the mesh"
            help_, facts = guess(text, names.axes, "the mesh has"), unknown(text, names.axes)
            _refuse(node, title, help_, facts=facts)
    return tuple(found)


def _refuse(node: n.Expect, title: str, *helps: str, facts: Facts = ()) -> NoReturn:
    legal = f"for example {', '.join(f'`expect {one}`' for one in MEASURES.values())}"
    raise Refusal(Diagnostic("S861", title, Label(node.span), helps=(*helps, legal), facts=facts))
