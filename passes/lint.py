"""Warnings: what a schedule declares and does not use, and steps that are never verified."""

from __future__ import annotations

from collections.abc import Iterator

from schedlang import nodes as n
from schedlang.diagnostic import Diagnostic, Label
from schedlang.misread import walk
from schedlang.source import Span


def lint(file: n.File) -> list[Diagnostic]:
    """Warnings about a whole file, in the order of the text; they never refuse anything."""
    steps = [item for item in file.items if isinstance(item, n.Step)]
    used = {part for node in walk(file) for part in _uses(node)}
    called = {node.call.name.text for node in walk(file) if isinstance(node, n.Rule | n.Do)}
    found = []
    for item in file.items:
        if isinstance(item, n.Knob) and item.name not in used:
            found.append(_warning("W101", f"the knob `{item.name}` is never used", item))
        if isinstance(item, n.Def) and steps and item.name not in called:
            found.append(_warning("W102", f"`{item.name}` is never called", item))
    for step in steps:
        rows = [node for node in walk(step) if isinstance(node, n.Rule | n.Do)]
        if rows and all(row.call.name.text != "verify" for row in rows):
            title = f"the step `{step.name}` is never verified"
            found.append(_warning("W701", title, step, "end it with `verify(forward, backward)`"))
    return found


def _uses(node: n.Node) -> Iterator[str]:
    """The names that a node mentions."""
    if isinstance(node, n.Name):
        yield node.parts[0]
    elif isinstance(node, n.View):
        yield from node.axes
    elif isinstance(node, n.Seg):
        for index in node.index:
            bounds = (index,) if isinstance(index, str) else (index.start, index.stop, index.step)
            yield from (bound for bound in bounds if bound)


def _warning(code: str, title: str, node: n.Node, *helps: str) -> Diagnostic:
    line = node.span.source.line(node.span.line)
    end = node.span.end_col if node.span.end_line == node.span.line else len(line.rstrip()) + 1
    span = Span(node.span.source, node.span.line, node.span.col, node.span.line, end)
    return Diagnostic(code, title, Label(span), helps=helps, level="warning")
