"""The text of a printed plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from schedlang.amounts import number, size
from schedlang.memory import CLASSES
from schedlang.passes.costs.account import ACTIVATIONS
from schedlang.passes.reading.fold import pattern
from schedlang.report_text import equal
from schedlang.tables import joined, table, widths, wrapped
from schedlang.value import shown

if TYPE_CHECKING:
    from schedlang.passes.costs.memory import RankClass
    from schedlang.passes.costs.sent import Collective
    from schedlang.passes.showing.show import Effect, Line, View
    from schedlang.plan import Plan

WIDTH = 100
MOST_CLASSES = 16
Row = tuple[str, ...]


def text(view: View, *, each: bool = False, width: int | None = None) -> str:
    """The plan as the terminal shows it; `each` shows all kinds of ranks, however many.

    Tables that are wider than `width` are laid out in more lines; None: they may be any width.
    """
    lines = [*wrapped(_head(view), width), ""]
    cells = [(step, [_cells(line) for line in step.lines]) for step in view.steps]
    lay = _layout([line for _, rows in cells for line in rows], width)
    for step, rows in cells:
        relaxed = f"  relax({', '.join(step.relaxed)})" if step.relaxed else ""
        lines.append((f'step "{step.name}"' if step.name else "outside of steps") + relaxed)
        lines += [text for line in rows for text in lay(line)]
        lines.append("")
    return "\n".join([*lines, *_ranks(view, each, width), *_fused(view, width),
                      *_traffic(view, width), *_timeline(view, width or WIDTH),
                      *_foot(view, width)])  # fmt: skip


def _layout(lines: Sequence[list[Row]], width: int | None) -> Callable[[list[Row]], list[str]]:
    """How lines of rows are set: all in columns, else collectives below, else arguments below."""
    wide = widths([row for line in lines for row in line])
    if width is None or sum(w + 2 for w in wide if w) <= width:
        return lambda line: [joined(row, wide) for row in line]
    own = widths([_own(line) for line in lines])
    sent = widths([row[5:8] for line in lines for row in line])
    narrow = sum(w + 2 for w in own if w) > width
    if narrow:
        own = widths([_own(line)[:3] for line in lines])

    def lay(line: list[Row]) -> list[str]:
        first = _own(line)
        if narrow:
            head, rest = joined(first[:3], own), "  ".join(cell for cell in first[3:] if cell)
            fits = len(head) + len(rest) + 2 <= width
            said = [f"{head}  {rest}".rstrip()] if fits else [head, *wrapped(rest, width, " " * 5)]
        else:
            said = [joined(first, own)]
        return said + [" " * 5 + joined(row[5:8], sent) for row in line if row[5]]

    return lay


def _own(line: list[Row]) -> Row:
    """A row without what it sends."""
    return (*line[0][:5], line[0][8])


def _head(view: View) -> str:
    plan = view.plan
    knobs = "   ".join(f"{name} = {shown(value)}" for name, value in plan.decisions)
    mesh = f"mesh {plan.mesh}" + (f" on {plan.mesh.device}" if plan.mesh.device else "")
    counts = f"{_count(view.rows, 'row')}, {_count(view.changes, 'change')}"
    checks = f", {_count(view.checks, 'check')}" if view.checks else ""
    parts = (view.title or plan.model.class_name, knobs, mesh, counts + checks)
    return "   ".join(part for part in parts if part)


def _count(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"


# -- rows --------------------------------------------------------------------------------------


def _cells(line: Line) -> list[Row]:
    """The first row with the line's own words, then one for each further sort of collective."""
    times = f"x{len(line.sites)}" if len(line.sites) > 1 else ""
    place = f":{line.place[1]}" if line.place[1] else ""
    effects = [_effect(effect) for effect in line.effects] or [("", "", "")]
    site = "" if line.pattern == "the model" and line.sign == "?" else line.pattern
    own: Row = (line.sign, site, line.verb, line.said, times)
    rows = [(*own, *effects[0], place)]
    return rows + [("", "", "", "", "", *effect, "") for effect in effects[1:]]


def _effect(effect: Effect) -> Row:
    each = size(effect.bytes // effect.count)
    return f"+ {effect.kind} {'x'.join(effect.axes)}", effect.what, f"{effect.count} x {each}"


# -- totals ------------------------------------------------------------------------------------


def _table(rows: Sequence[Row], width: int | None, keys: int = 2) -> Iterator[str]:
    yield from table(rows, width, keys)
    yield ""


def _fused(view: View, width: int | None) -> Iterator[str]:
    """Kernels and bytes of fused modules, as they are and as they will be."""
    if not view.account.gains:
        return
    rows: list[Row] = [("kernels of one", "", "forward", "backward", "bytes moved")]
    for one in view.account.gains:
        before, after = one.gain.before, one.gain.after
        where = pattern(one.sites, view.plan.model.sites)
        rows.append((where, one.what, f"{before.forward} -> {after.forward}",
                     f"{before.backward} -> {after.backward}",
                     f"{size(before.bytes)} -> {size(after.bytes)}"))  # fmt: skip
    yield from _table(rows, width)


def _ranks(view: View, each: bool, width: int | None) -> Iterator[str]:
    account = view.account
    whole = number(sum(fact.numel for fact in view.plan.model.unique.values()))
    if account.classes is None:
        yield f"per rank   not counted (the model has {whole} parameters)"
        return
    away = [
        tier for tier in ("cpu", "disk", "peer") if any(getattr(c, tier) for c in account.classes)
    ]
    head: Row = (
        "per rank", "", f"parameters (of {whole})", "gradients", "optimizer",
        "temporary, during a step",
        *("for a peer" if tier == "peer" else f"on {tier}" for tier in away), "activations",
    )  # fmt: skip
    classes = account.classes if each else account.classes[:MOST_CLASSES]
    rows = [head, *(_rank(view, one, away) for one in classes)]
    if len(classes) < len(account.classes):
        more = len(account.classes) - len(classes)
        blank = ("",) * (len(head) - 2)
        rows.append((f"and {more} more", *blank, "(--each)"))
    yield from _table(rows, width)
    yield from _peaks(view, each, width)


def _peaks(view: View, each: bool, width: int | None) -> Iterator[str]:
    """Where each kind of rank holds most, and what for."""
    memory = view.account.memory
    if memory is None:
        return
    rows: list[Row] = [("peak", "", "at", "sum", *CLASSES)]
    for one in memory if each else memory[:MOST_CLASSES]:
        where = _where(view, one.place) or f"rank {one.first}"
        cells = (size(count) if count else "-" for count in one.classes.values())
        rows.append((where, _count(one.ranks, "rank"), one.top.what, size(one.peak), *cells))
    yield from _table(rows, width)


def _rank(view: View, one: RankClass, away: Sequence[str]) -> Row:
    where = _where(view, one.place)
    same = [c for c in view.account.classes or () if c.place == one.place]
    if len(same) > 1 or not where:
        where += f" rank {one.first}" + (", .." if one.ranks > 1 else "")
    return (
        where.strip(), _count(one.ranks, "rank"),
        f"{number(one.elements)}, {size(one.parameters)}", size(one.gradients),
        size(one.optimizer), f"+ {size(one.working)}" if one.working else "-",
        *(size(getattr(one, tier)) for tier in away), _activations(view, one),
    )  # fmt: skip


def _activations(view: View, one: RankClass) -> str:
    """What forwards leave for backwards on these ranks, at most."""
    found = [m for m in view.account.memory or () if m.first == one.first]
    return size(found[0].activations) if found else ACTIVATIONS


def _where(view: View, place: int | None) -> str:
    return "" if place is None else f"{view.plan.cuts[0].axis}={place}"


def _traffic(view: View, width: int | None) -> Iterator[str]:
    """Per place of the pipeline: times and bytes of each kind over each axis."""
    account = view.account
    if not account.collectives:
        if account.collectives is not None:
            yield "collectives of one step   none\n"
        return
    world = tuple(axis for axis, count in view.plan.mesh.axes if count > 1)
    kinds = list(dict.fromkeys((one.axes, one.kind) for one in account.collectives))
    words = ["world" if axes == world and len(axes) > 1 else "x".join(axes) for axes, _ in kinds]
    rows: list[Row] = [
        ("collectives", *(f"{word} {kind}" for word, (_, kind) in zip(words, kinds)), "all")
    ]
    places = list(dict.fromkeys(one.place for one in account.classes or ()))
    for place in sorted(places, key=lambda p: p or 0):
        mine = account.at(place)
        cells = [_sum([one for one in mine if (one.axes, one.kind) == kind]) for kind in kinds]
        rows.append((_where(view, place) or "each rank", *cells, _sum(mine)))
    yield from _table(rows, width, keys=1)


def _sum(found: Sequence[Collective]) -> str:
    count, total = sum(one.count for one in found), sum(one.total for one in found)
    return f"{count}, {size(total)}" if count else "-"


def _timeline(view: View, width: int) -> Iterator[str]:
    account, order = view.account, view.plan.order
    if account.timeline is None or order is None:
        return
    bubble = f"bubble {account.bubble:.1%} at unit cost (forward 1, backward 2)"
    micro = f"{order.micro} microbatch{'es' * (order.micro > 1)}"
    chunks = f", {order.chunks} stages on each rank" if order.chunks > 1 else ""
    yield f"timeline   {order.name}, {micro}{chunks}, {bubble}"
    for line in account.timeline.text(width - 12).split("\n"):
        yield "  " + line.replace("rank ", f"{view.plan.cuts[0].axis}=", 1)
    yield ""


def _foot(view: View, width: int | None) -> Iterator[str]:
    yield f"result  {result(view.plan)}"
    for note in view.account.notes:
        yield from wrapped(f"note    {note}", width, more=" " * 8)


def result(plan: Plan) -> str:
    """How far the result may be from the original's, in words."""
    gives_up = sorted(plan.gives_up)
    if gives_up in ([], ["rounding"]):
        return f"equal to the original {equal('algebraic' if gives_up else 'exact')}"
    return f"may differ from the original in {', '.join(gives_up)}"
