"""Which rows act on a module or a parameter, where they are written, and by which selectors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from schedlang import nodes as n
from schedlang import spelling
from schedlang.diagnostic import Diagnostic, Refusal, guess
from schedlang.passes.reading.bases import spliced
from schedlang.source import Span

if TYPE_CHECKING:
    from schedlang.plan import Action, Plan


def why(plan: Plan, file: n.File, fqn: str) -> str:
    """The rows at a module, or at a parameter's module; refuses S209 a name that is neither."""
    facts = plan.model
    site = facts.owner(fqn).fqn if fqn in facts.parameters else fqn
    if site not in facts.sites:
        known = [*facts.sites, *facts.parameters]
        near = guess(fqn, known, "there are")
        title = f"the model has no module or parameter `{fqn}`"
        raise Refusal(Diagnostic("S209", title, helps=(near,)))
    head = fqn or "the model"
    if fqn in facts.parameters:
        fact = facts.parameters[fqn]
        head += f"   {fact.dtype}{plan.layout(fqn).show()}"
    acting = (a for a in plan.rows_at(site) if a.primitive.writes)  # a marker acts on nothing
    rows = [row_text(action, file) for action in acting]
    return "\n".join([head, *(rows or ["  no row acts on it"])])


def row_text(action: Action, file: n.File) -> str:
    """One row: its place, its text, its step, and the selectors around it."""
    span, items = action.span, spliced(file).items
    text = str(action.primitive)
    place = str(span) if span else ""
    if span:
        row = span.source.line(span.line)
        end = span.end_col - 1 if span.end_line == span.line else len(row)
        text = row[span.col - 1 : end] or text
    step = f'step "{action.step}"' if action.step else "outside of steps"
    trail = next(_trails(items, span, ()), ()) if span else ()
    by = " then ".join(f"`{path}`" for path in trail)
    return f"  {place}   {text}   {step}" + (f", selected by {by}" if by else "")


def _trails(node: object, span: Span, above: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The selectors that stand around and before the call at `span`."""
    if isinstance(node, tuple):
        for item in node:
            yield from _trails(item, span, above)
    elif isinstance(node, n.Rule):
        if node.call.span == span:
            yield (*above, spelling.paths(node.paths))
    elif isinstance(node, n.Do):
        if node.call.span == span:
            yield above
    elif isinstance(node, n.At):
        paths = spelling.paths(node.paths)
        yield from _trails(node.block.body, span, (*above, paths))
    elif isinstance(node, n.When):
        orelse = node.orelse.body if node.orelse else ()
        yield from _trails((*node.block.body, *orelse), span, above)
    elif isinstance(node, n.Step | n.Def):
        yield from _trails(node.block.body, span, above)
