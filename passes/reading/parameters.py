"""Arguments of a call to the parameters of a `def`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from schedlang import nodes as n
from schedlang.diagnostic import Diagnostic, Label, Refusal, guess, quoted
from schedlang.evaluate import evaluate
from schedlang.kinds import Axis, Mismatch, NoAxis, convert, describe
from schedlang.value import UNKNOWN, AxisSize, Bytes, Names, shown

TYPES: Mapping[str, Any] = {
    "axis": Axis,
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
    "bytes": Bytes,
}


def arguments_of(call: n.Call, node: n.Def, outer: Names, own: Names) -> Mapping[str, Any]:
    """The value of every parameter (S302, S304, S305); defaults are evaluated in `own`."""
    names = [param.name for param in node.params]
    free = list(names)
    found: dict[str, Any] = {}
    for arg in call.args:
        name = _target(call, arg, names, free, found)
        inner = arg.value if isinstance(arg, n.Keyword) else arg
        param = node.params[names.index(name)]
        found[name] = _typed(param, evaluate(inner, outer), inner, outer)
    for param in node.params:
        if param.name not in found and param.default is not None:
            value = evaluate(param.default, own)
            found[param.name] = _typed(param, value, param.default, own)
    lacking = [name for name in names if name not in found]
    if lacking:
        also = (Label(node.span, "defined here"),) if node.span else ()
        title = f"`{call.name.text}` needs {quoted(lacking)}"
        raise Refusal(Diagnostic("S305", title, Label(call.span), also))
    return found


def _target(
    call: n.Call, arg: n.Node, names: list[str], free: list[str], found: Mapping[str, Any]
) -> str:
    """The parameter that an argument is for."""
    title = ""
    helps = (f"it takes {quoted(names)}",) if names else ("it takes none",)
    if isinstance(arg, n.Keyword):
        if arg.name in free:
            free.remove(arg.name)
            return arg.name
        title = f"`{call.name.text}` takes no argument `{arg.name}`"
        helps = (guess(arg.name, names, "it takes"),) if names else helps
        if arg.name in found:
            title, helps = f"`{arg.name}` is given twice", ("drop one",)
    elif free:
        return free.pop(0)
    else:
        title = f"`{call.name.text}` takes no further argument"
    raise Refusal(Diagnostic("S302", title, Label(arg.span), helps=helps))


def _typed(param: n.Param, value: Any, node: n.Node, names: Names) -> Any:
    """The value, if it is of the parameter's type."""
    if param.type is None or value is UNKNOWN:
        return value
    if param.type not in TYPES:
        title = f"a parameter cannot be of type `{param.type}`"
        help_ = guess(param.type, TYPES, "choose one of")
        raise Refusal(Diagnostic("S102", title, Label(param.span), helps=(help_,)))
    kind = TYPES[param.type]
    try:
        made = convert(kind, value, names.axes)
    except NoAxis as unknown:
        _no_axis(str(unknown), node, names)
    except Mismatch:
        title = f"`{param.name}` must be {describe(kind)}"
        raise Refusal(
            Diagnostic("S304", title, Label(node.span, f"this is {shown(value)}"))
        ) from None
    if kind is Axis and not isinstance(value, AxisSize):
        return AxisSize.of(made, names.axes[made])
    return value if kind is Axis else made


def _no_axis(name: str, node: n.Node, names: Names) -> NoReturn:
    helps = (guess(name, names.axes, "its axes are"),) if names.axes else ()
    title = f"the mesh has no axis `{name}`"
    raise Refusal(Diagnostic("S204", title, Label(node.span), helps=helps))
