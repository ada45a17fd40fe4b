"""Differences of two plans, with their costs, as text, as Markdown for a pull request, and as a
page."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from schedlang.diagnostics.diagnostic import quote_names
from schedlang.ir.primitive import Primitive
from schedlang.language.value import show_value
from schedlang.passes.elaborate.rows import fold_names
from schedlang.passes.elaborate.state import arguments_text
from schedlang.viz.elements import html_page

if TYPE_CHECKING:
    from schedlang.ir.plan import Action, Plan
    from schedlang.passes.simulate.account import CostChange

# -- two plans, compared action by action ----------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """One row that is added (+), removed (-) or changed (~)."""

    sign: str
    step: str
    sites: tuple[str, ...]
    name: str
    said: str

    @property
    def where(self) -> str:
        """The modules, folded, and their number."""
        count = f" x{len(self.sites)}" if len(self.sites) > 1 else ""
        return fold_names(self.sites) + count

    def __str__(self) -> str:
        count = f"  x{len(self.sites)}" if len(self.sites) > 1 else ""
        sites = fold_names(self.sites)
        return f"  {self.sign} {sites:<28} {self.name:<14} {self.said}{count}".rstrip()


@dataclass(frozen=True)
class Difference:
    """All changes from one plan to another; empty if they do the same."""

    changes: tuple[Change, ...]
    facts: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.changes or self.facts)

    def __str__(self) -> str:
        lines: list[str] = []
        step: str | None = None
        for change in self.changes:
            if change.step != step:
                lines.append(f'step "{change.step}"' if change.step else "outside of steps")
                step = change.step
            lines.append(str(change))
        return "\n".join([*lines, *self.facts]) or "no difference"

    def to_json(self) -> dict[str, object]:
        """Return plain values."""
        rows = [dataclasses.asdict(change) for change in self.changes]
        return {"changes": rows, "facts": list(self.facts)}


def compare(old: Plan, new: Plan) -> Difference:
    """Compare two plans: rows by step and verb, then mesh, knobs and grade."""
    before, after = list(old.actions), list(new.actions)
    for action in old.actions:
        unchanged = next((other for other in after if _row_key(other) == _row_key(action)), None)
        if unchanged is not None:
            before.remove(action)
            after.remove(unchanged)
    changes: list[Change] = []
    for action in before:
        match = next((other for other in after if _place_key(other) == _place_key(action)), None)
        if match is None:
            changes.append(_make_change("-", action, arguments_text(action.primitive)))
            continue
        after.remove(match)
        changes.append(_make_change("~", match, ", ".join(_changed_arguments(action, match))))
    changes += [_make_change("+", action, arguments_text(action.primitive)) for action in after]
    order = {name: index for index, name in enumerate(dict.fromkeys(_steps(old, new)))}
    changes.sort(key=lambda change: order[change.step])
    return Difference(tuple(changes), tuple(_changed_facts(old, new)))


def _steps(old: Plan, new: Plan) -> Iterator[str]:
    for plan in (old, new):
        yield from (action.step for action in plan.actions)


def _row_key(action: Action) -> object:
    return action.step, action.primitive, action.sites


def _place_key(action: Action) -> object:
    return action.step, action.name, action.sites


def _make_change(sign: str, action: Action, text: str) -> Change:
    return Change(sign, action.step, action.sites, action.name, text)


def _arguments_of(primitive: Primitive) -> dict[str, object]:
    fields = dataclasses.fields(primitive)  # type: ignore[arg-type]
    return {field.name: getattr(primitive, field.name) for field in fields}


def _changed_arguments(old: Action, new: Action) -> Iterator[str]:
    """Yield the changed arguments of a row: `save: [linear] -> []`."""
    before, after = _arguments_of(old.primitive), _arguments_of(new.primitive)
    for name, value in after.items():
        if before[name] != value:
            yield f"{name}: {show_value(before[name])} -> {show_value(value)}"


def _changed_facts(old: Plan, new: Plan) -> Iterator[str]:
    if old.mesh != new.mesh:
        yield f"mesh {old.mesh} -> {new.mesh}"
    old_values = dict(old.decisions)
    for name, value in new.decisions:
        if name in old_values and old_values[name] != value:
            yield f"{name} {show_value(old_values[name])} -> {show_value(value)}"
    grades = [quote_names(sorted(plan.gives_up)) or "nothing" for plan in (old, new)]
    if grades[0] != grades[1]:
        yield f"gives up {grades[0]} -> {grades[1]}"


# -- as Markdown for a pull request, and as a page -------------------------------------------------


Names = tuple[str, str]
WORDS = {"+": "new", "-": "gone", "~": "changed"}
STYLE = (
    "table{border-collapse:collapse;margin:1em 0}"
    "td,th{padding:3px 14px 3px 0;text-align:left;border-bottom:1px solid #d1d9e0;"
    "font-variant-numeric:tabular-nums}code{font:12px ui-monospace,Menlo,Consolas,monospace;"
    "overflow-wrap:anywhere}"
    ".n{text-align:right;white-space:nowrap}.s{color:#59636e}.b{font-weight:600}"
    # Okabe and Ito's blue and vermilion; signs and words say the same
    ".new{color:#0072b2}.gone{color:#b34700}"
    "@media(prefers-color-scheme:dark){td,th{border-color:#3d444d}.s{color:#9198a1}"
    ".new{color:#56b4e9}.gone{color:#e69f00}}"
)


def format_markdown(names: Names, difference: Difference, costs: Sequence[CostChange]) -> str:
    """Format the difference as Markdown tables: changed costs, then action by action."""
    lines = [f"### `{names[0]}` → `{names[1]}`", ""]
    if not difference:
        return "\n".join([*lines, "No difference: both do the same, and cost the same."])
    changed = [cost for cost in costs if cost.old != cost.new]
    lines += ["| per rank and step | before | after | change |", "|---|---:|---:|---:|"]
    lines += [
        f"| {item.name} | {item.format(item.old)} | {item.format(item.new)} | {item.change} |"
        for item in changed
    ] or ["| all figures | as before | as before | |"]
    if difference.changes:
        lines += ["", "| | step | where | verb | what |", "|---|---|---|---|---|"]
        lines += [
            f"| **{item.sign}** {WORDS[item.sign]} | {_escape_cell(item.step)} "
            f"| `{_escape_cell(item.where)}` "
            f"| `{item.name}` | {_code_cell(item.said)} |"
            for item in difference.changes
        ]
    lines += ["", *(f"* {fact}" for fact in difference.facts)] if difference.facts else []
    unchanged = [item.name for item in costs if item.old == item.new]
    lines += ["", f"Unchanged: {', '.join(unchanged)}."] if unchanged and changed else []
    return "\n".join(lines)


def _code_cell(text: str) -> str:
    return f"`{_escape_cell(text)}`" if text else ""


def _escape_cell(text: str) -> str:
    """Return a text escaped for a table cell."""
    return text.replace("|", "\\|").replace("\n", " ")


def diff_page(names: Names, difference: Difference, costs: Sequence[CostChange]) -> str:
    """Format the difference as one self-contained page."""
    title = f"{names[0]} → {names[1]}"
    body = [f"<h1>{html.escape(title)}</h1>"]
    if difference:
        body += [*_cost_table(costs), *_change_table(difference.changes)]
        body += [f"<p>{html.escape(fact)}</p>" for fact in difference.facts]
    else:
        body.append("<p>No difference: both do the same, and cost the same.</p>")
    return html_page(title, STYLE, "\n".join(body) + "\n", 960)


def _cost_table(costs: Iterable[CostChange]) -> Iterator[str]:
    yield (
        '<table><tr><th>per rank and step</th><th class="n">before</th><th class="n">after</th>'
        '<th class="n">change</th></tr>'
    )
    for cost in costs:
        kind = "s" if cost.old == cost.new else "b"
        cells = (cost.format(cost.old), cost.format(cost.new), cost.change or "as before")
        numbers = "".join(f'<td class="n">{html.escape(text)}</td>' for text in cells)
        yield f'<tr class="{kind}"><td>{html.escape(cost.name)}</td>{numbers}</tr>'
    yield "</table>"


def _change_table(changes: Iterable[Change]) -> Iterator[str]:
    yield "<table><tr><th></th><th>step</th><th>where</th><th>verb</th><th>what</th></tr>"
    for change in changes:
        kind = WORDS[change.sign]
        cells = (change.where, change.name, change.said)
        codes = "".join(f"<td><code>{html.escape(text)}</code></td>" for text in cells)
        sign = f'<td class="{kind}">{html.escape(change.sign)} {kind}</td>'
        yield f"<tr>{sign}<td>{html.escape(change.step)}</td>{codes}</tr>"
    yield "</table>"
