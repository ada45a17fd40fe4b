"""What helps offer, spelled for a caller in Python: rows as calls, names as texts."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator, Sequence

from schedlang.diagnostics.diagnostic import SPELLED, Refusal
from schedlang.diagnostics.source import Source
from schedlang.ir.primitive import find
from schedlang.language import nodes as n
from schedlang.language import spelling
from schedlang.language.syntax import parse

QUOTED = re.compile(r"`([^`]+)`")
OPENED = re.compile(r'step ("[^"]*") relax\(([^)]*)\) \{')
LOSS = re.compile(r"add to the model file:\n +def loss\(output, batch\):\n +return (.*)")
RELAX = re.compile(r"relax\(([^)]*)\)")
OPTION = re.compile(r"--(knob|mesh) (.+)")
OWN = re.compile(r"\bsch\b|^with |^(\w+)=\1$")  # it is Python already
ARGUMENT = re.compile(r"\w+=[^=].*")
DOTS, HOLE = re.compile(r"\.\.\.?"), "what_you_choose"  # `micro=...` leaves a place to fill in
_VERIFY = '"verify"'
CALLED = ("S", "P")  # they are called in Python as in a schedule


class _Unsayable(Exception):
    """It has no counterpart of one line in Python."""


def spelled(text: str) -> str:
    """A help with each schedule in it as the call that says the same; the rest stays as it is."""
    if given := LOSS.fullmatch(text):
        return f"give one: `loss=lambda output, batch: {given[1]}`"
    return QUOTED.sub(lambda found: f"`{_spelled(found[1])}`", text)


def _spelled(said: str) -> str:
    if opened := OPENED.fullmatch(said):
        return f"with sch.step({opened[1]}, {_relaxed(opened[2])}):"
    if relaxed := RELAX.fullmatch(said):
        return f"sch.step(..., {_relaxed(relaxed[1])})"
    if option := OPTION.fullmatch(said):
        settings = ", ".join(option[2].split(","))
        return f"sch.{'set' if option[1] == 'knob' else 'mesh'}({settings})"
    try:
        if OWN.search(said):
            return said
        if ARGUMENT.fullmatch(said):
            given = [
                one
                for row in _items(f"x({said})")
                if isinstance(row, n.Do)
                for one in row.call.args
            ]
            return ", ".join(_arguments(given)).replace(HOLE, "...")
        made = [call for item in _items(said) for call in _statement(item)]
    except (Refusal, _Unsayable, AttributeError):
        return said
    return "; ".join(made).replace(HOLE, "...") or said


def _relaxed(names: str) -> str:
    several = [f'"{name.strip()}"' for name in names.split(",")]
    return f"relax={several[0]}" if len(several) == 1 else f"relax=[{', '.join(several)}]"


def _items(said: str) -> Sequence[n.Item]:
    """The statements of a schedule that says just this; Refusal for what is none."""
    quoted = re.split(r'("[^"]*")', said)
    filled = [part if part[:1] == '"' else DOTS.sub(HOLE, part) for part in quoted]
    return parse(Source("", f"schedule 1\n{''.join(filled)}\n")).items


def _statement(item: n.Item) -> Iterator[str]:
    match item:
        case n.Rule(call=call):
            for path in item.paths:
                yield f'sch["{spelling.path(path)}"].{_call(call)}'
        case n.Do(call=call):
            known = find(call.name.text)
            if known is None:
                raise _Unsayable  # a function of Python's, of the model file
            if known.__name__ == "verify":  # `sch.verify(...)` verifies, here and now
                yield f"sch.row({', '.join([_VERIFY, *_arguments(call.args)])})"
            else:  # a module's verb stands behind the module that is spoken of
                yield f"{'sch' * (known.takes == 'model')}.{_call(call)}"
        case n.Mesh(given, on):
            names = [*_arguments(given), *([f'on="{on}"'] if on else [])]
            yield f"sch.mesh({', '.join(names)})"
        case n.Expect(test) | n.Require(test):
            word = type(item).__name__.lower()
            yield f"sch.{word}({spelling.expr(test)!r})".replace("'", '"')
        case n.Use(path, None, None):
            yield f'sch.use("{path}")'
        case _:
            raise _Unsayable


def _call(call: n.Call) -> str:
    return f"{call.name.text}({', '.join(_arguments(call.args))})"


def _arguments(given: Sequence[n.Node]) -> Iterator[str]:
    for one in given:
        if isinstance(one, n.Keyword):
            name = f"{one.name}_" if keyword.iskeyword(one.name) else one.name
            yield f"{name}={_value(one.value)}"
        else:
            yield _value(one)


def _value(node: n.Node) -> str:
    """An argument as Python writes it: a bare name is a text there."""
    match node:
        case n.Lit(text):
            constant = {"true": "True", "false": "False"}.get(text)
            plain = text[:1] == '"' or re.fullmatch(r"[\d.e+-]+", text)
            return constant or (text if plain else f'"{text}"')
        case n.Name(parts):
            return node.text if parts in (("R",), (HOLE,)) else f'"{node.text}"'
        case n.List(items):
            return f"[{', '.join(map(_value, items))}]"
        case n.Group(items) if len(items) > 1:
            return f"({', '.join(map(_value, items))})"
        case n.Unary("-", operand):
            return f"-{_value(operand)}"
        case n.Call(name) if name.text in CALLED:
            return _call(node)
    raise _Unsayable


SPELLED.append(spelled)
