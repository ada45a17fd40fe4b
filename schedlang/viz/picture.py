"""The picture of a plan as SVG or a page, and the printing of plans from Python."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from schedlang.diagnostics.tables import format_bytes, format_count, terminal_columns
from schedlang.ir.plan import PLAN_PRINTERS, Plan
from schedlang.passes.elaborate.state import arguments_text, short_dtype
from schedlang.passes.simulate.memory import RankClass
from schedlang.viz import cost_pictures
from schedlang.viz.elements import draw_box, draw_legend_entry, draw_text, html_page, svg_document
from schedlang.viz.show import View, describe_result, format_view, make_view
from schedlang.viz.tree import Node, tree

# -- the picture -----------------------------------------------------------------------------------


WIDTH, ROW, MARGIN = 1120, 22, 24
COLUMNS = {"name": 70, "class": 330, "layout": 490, "does": 700}
MOST_OPS = 1000  # with more operations the timeline shows only its first ranks
MOST_ROWS, MOST_BARS = 60, 8
# Okabe and Ito's light colours first; every colour also has its number on it
STAGES = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#f0e442", "#a6761d", "#9ecae1")
BARS = (("parameters", "#0072b2"), ("gradients", "#e69f00"), ("optimizer", "#009e73"))
STYLE = (
    ".p text{font:12px system-ui,sans-serif;fill:#1f2328}.p .h{font-size:20px;font-weight:600}"
    ".p .m{font-family:ui-monospace,Menlo,Consolas,monospace}.p .k{font-size:11px}"
    ".p .s{fill:#59636e}.p .e{text-anchor:end}.p .b{font-weight:600}"
    ".p .a{fill:#0550ae;font-weight:600}.p .n{fill:#111;font-size:10px;text-anchor:middle}"
    ".p .g{stroke:#d1d9e0}.p .bg{fill:#fff}.p .z{fill:#f6f8fa}.p .t{font-weight:600}"
    ".p .f{fill:none;stroke:#8c959f}.p .op{fill:#111}"
    "@media(prefers-color-scheme:dark){.p text{fill:#e6edf3}.p .s{fill:#9198a1}"
    ".p .a{fill:#79c0ff}.p .n,.p .op{fill:#111}.p .g{stroke:#3d444d}.p .bg{fill:#0d1117}"
    ".p .z{fill:#161b22}}"
)


@dataclass(frozen=True)
class Mark:
    """The effect of the plan at one module; modules with equal marks may be folded."""

    stages: tuple[int, ...]
    layouts: tuple[str, ...]
    does: tuple[str, ...]
    sends: tuple[str, ...]


def draw_plan(view: View) -> str:
    """Draw the plan as SVG text."""
    y = 44
    parts: list[str] = []
    for draw in (_head, _tree, _memory, _over_time, cost_pictures.draw_traffic, _timeline):
        drawing, height = draw(view, y)
        parts += drawing
        y += height
    label = f"plan of {view.title or view.plan.model.class_name}"
    return svg_document("p", WIDTH, y, label, STYLE + cost_pictures.STYLE, parts, corner=8)


def plan_page(view: View) -> str:
    """Return the picture as a page, with the plan's text below it."""
    style = (
        ".wide{overflow:auto}.wide svg{width:100%;min-width:1010px;height:auto}"
        "pre{overflow:auto;font-size:12px}"
    )
    picture = f'<div class="wide">{draw_plan(view)}</div>'
    text = html.escape(format_view(view))
    details = f"<details><summary>as text</summary><pre>{text}</pre></details>\n"
    return html_page(view.title or view.plan.model.class_name, style, picture + details, WIDTH)


Drawn = tuple[list[str], int]


def _head(view: View, y: int) -> Drawn:
    plan = view.plan
    mesh = f"{plan.mesh.world} ranks: {plan.mesh}" if plan.mesh.axes else "one rank"
    subtitle = (
        f"{plan.model.class_name}, {format_count(_numel(view))} parameters   ·   {mesh}   ·   "
    )
    subtitle += describe_result(plan)
    return [draw_text(MARGIN, y, view.title, "h"), draw_text(MARGIN, y + 24, subtitle, "s")], 48


def _numel(view: View) -> int:
    return sum(fact.numel for fact in view.plan.model.unique_parameters.values())


# -- the tree ----------------------------------------------------------------------------------


def _tree(view: View, y: int) -> Drawn:
    marks = _MarkFinder(view)
    rows = list(_visible_rows(tree(view.plan.model, note=marks.at), 0, set()))
    shown = rows[:MOST_ROWS]
    parts = [
        draw_text(x, y + 14, heading, "s")
        for heading, x in (
            ("stage", MARGIN),
            ("module", COLUMNS["name"]),
            ("class", COLUMNS["class"]),
            ("parameters", COLUMNS["layout"]),
            ("done there", COLUMNS["does"]),
        )
        if heading != "stage" or view.account.stages
    ]
    top = y + ROW
    for index, (depth, node, remark) in enumerate(shown):
        parts += _draw_row(node, depth, remark, top + index * ROW, shade=index % 2 == 0)
    if len(rows) > len(shown):
        text = f"and {len(rows) - len(shown)} more modules"
        parts.append(draw_text(COLUMNS["name"], top + len(shown) * ROW + 15, text, "s"))
    return parts, (len(shown) + 3) * ROW


class _MarkFinder:
    """Finds what the plan does at each module."""

    def __init__(self, view: View) -> None:
        self.view, self.plan = view, view.plan
        self.sends: dict[str, list[str]] = {}
        for comm in view.account.collectives or ():
            if comm.fqn and not comm.what.endswith("again") and comm.phase != "step":
                inside = comm.what not in ("parameters", "grads")
                text = (
                    f"{comm.kind} {'x'.join(comm.axes)} {comm.what}"
                    if inside and comm.kind != "send"
                    else ""
                )
                sends = self.sends.setdefault(comm.fqn, [])
                if text and text not in sends:
                    sends.append(text)

    def at(self, fqn: str) -> Mark:
        """Return the mark of a module."""
        units = self.view.account.stages
        inside = {s for u, s in units.items() if fqn == u or fqn.startswith(f"{u}.")}
        inner = {s for u, s in units.items() if not fqn or u.startswith(f"{fqn}.")}
        facts = self.plan.model.sites[fqn].parameters
        layouts = tuple(
            f"{short_dtype(fact.dtype)}{self.plan.effective_layout(fact.name).show()}"
            for fact in facts.values()
        )
        rows = [a for a in self.plan.actions if fqn in a.sites and a.has_effect]
        does = tuple(f"{a.name} {arguments_text(a.primitive)}".strip() for a in rows)
        return Mark(tuple(sorted(inside or inner)), layouts, does, tuple(self.sends.get(fqn, ())))


Placed = tuple[int, Node, str]


def _visible_rows(node: Node, depth: int, seen: set[object]) -> Iterator[Placed]:
    """Yield the modules with a row of the picture.

    A block equal to an earlier one, except for its stage, is not expanded again.
    """
    kind = node.class_name, tuple((child.name, _content_key(child)) for child in node.children)
    number = node.name.rpartition(".")[2].rpartition("..")[2].isdigit()
    repeated = bool(node.children) and number and kind in seen
    yield depth, node, "as above" if repeated else ""
    seen.add(kind)
    if repeated:
        return
    for child in node.children:
        if child.numel or _has_effects(child):
            yield from _visible_rows(child, depth + 1, seen)


def _has_effects(node: Node) -> bool:
    mark = node.note
    assert isinstance(mark, Mark)
    return bool(mark.does or mark.sends) or any(_has_effects(child) for child in node.children)


def _content_key(node: Node) -> object:
    """Return a key of the plan's effects below a module, without stages."""
    mark = node.note
    assert isinstance(mark, Mark)
    children = tuple((child.name, _content_key(child)) for child in node.children)
    return node.class_name, mark.layouts, mark.sends, children if children else mark.does


def _draw_row(node: Node, depth: int, remark: str, y: int, *, shade: bool) -> Iterator[str]:
    mark = node.note
    assert isinstance(mark, Mark)
    if shade:
        yield draw_box(MARGIN, y, WIDTH - 2 * MARGIN, ROW, "z")
    yield from _draw_stage(mark.stages, y)
    base = y + 15
    name = node.name if depth else node.class_name
    yield draw_text(COLUMNS["name"] + depth * 16, base, name, "m")
    times = f" ×{node.count}" if node.count > 1 else ""
    yield draw_text(COLUMNS["class"], base, (node.class_name if depth else "") + times, "s")
    if mark.layouts:
        yield _draw_layout(COLUMNS["layout"], base, mark.layouts[0])
    tied = [f"= {tensor.tied.rpartition('.')[0]}" for tensor in node.tensors if tensor.tied]
    yield from _draw_effects(mark.does, [*tied, *mark.sends, *([remark] if remark else [])], base)


def _draw_effects(does: Sequence[str], effects: Sequence[str], y: int) -> Iterator[str]:
    """Draw rows of the schedule in frames, then what follows from them."""
    x = float(COLUMNS["does"])
    for text in does:
        width = 6.65 * len(text) + 14
        frame = draw_box(f"{x:.0f}", y - 13, f"{width:.0f}", 18, "f", 'rx="9"')
        yield frame + draw_text(x + 7, y, text, "m k")
        x += width + 6
    text = " · ".join(effects)
    room = max(0, int((WIDTH - MARGIN - x) / 6.2))
    if text and len(text) <= room:
        yield draw_text(x, y, text, "s")
    elif text:
        tooltip = f"<title>{html.escape(text)}</title>"
        yield f"<g>{tooltip}{draw_text(x, y, text[: max(0, room - 1)] + '…', 's')}</g>"


def _draw_stage(stages: Sequence[int], y: int) -> Iterator[str]:
    """Draw the stage of a module as a coloured number; several stages as a range without colour."""
    if len(stages) > 1:
        yield draw_text(MARGIN + 4, y + 15, f"{stages[0]}–{stages[-1]}", "s")
    for stage in stages[:1] if len(stages) == 1 else ():
        fill = STAGES[stage % len(STAGES)]
        chip = draw_box(MARGIN + 4, y + 3, 22, 16, look=f'rx="4" fill="{fill}"')
        yield f'{chip}<text class="n" x="{MARGIN + 15}" y="{y + 15}">{stage}</text>'


def _draw_layout(x: int, y: int, layout: str) -> str:
    """Draw a layout, with the axes that split it highlighted."""
    cells = []
    for index, part in enumerate(layout.split("@")):
        if index:
            axis = part[: next((k for k, char in enumerate(part) if char in ",]"), len(part))]
            cells.append(f'<tspan class="a">@{html.escape(axis)}</tspan>')
            part = part[len(axis) :]
        cells.append(html.escape(part))
    return f'<text x="{x}" y="{y}" class="m">{"".join(cells)}</text>'


# -- memory and timeline -----------------------------------------------------------------------


def _memory(view: View, y: int) -> Drawn:
    """Draw the bytes per rank as bars: parameters, gradients, optimizer state."""
    classes = view.account.classes
    if not classes:
        return [], 0
    parts = [draw_text(MARGIN, y, "bytes per rank", "t")]
    x = 150.0
    for name, fill in BARS:
        parts.append(draw_legend_entry(x, y, f'fill="{fill}"', name))
        x += 110
    if not view.account.memory:
        parts.append(draw_text(x, y, "activations not estimated", "s"))
    largest = max(kind.state for kind in classes) or 1
    for index, kind in enumerate(classes[:MOST_BARS]):
        parts += _draw_bar(view, kind, y + 14 + index * 20, 560 / largest)
    rest = len(classes) - MOST_BARS
    if rest > 0:
        parts.append(
            draw_text(MARGIN, y + 28 + MOST_BARS * 20, f"and {rest} more kinds of ranks", "s")
        )
    return parts, 60 + min(len(classes), MOST_BARS) * 20 + 20 * (rest > 0)


def _over_time(view: View, y: int) -> Drawn:
    """Draw the memory over the step, if it was estimated."""
    if not view.account.memory:
        return [], 0
    return cost_pictures.draw_memory(
        view.account.memory, view.plan.cuts[0].axis if view.plan.cuts else "", y
    )


def _draw_bar(view: View, kind: RankClass, y: int, scale: float) -> Iterator[str]:
    label = (
        f"{view.plan.cuts[0].axis}={kind.place}" if kind.place is not None else f"{kind.first}, .."
    )
    ranks = f"{kind.ranks} rank{'s' * (kind.ranks > 1)}"
    yield draw_text(MARGIN, y + 13, label, "m")
    yield draw_text(MARGIN + 54, y + 13, ranks, "s")
    x = 150.0
    for name, fill in BARS:
        count: int = getattr(kind, name)
        width = max(count * scale, 0.5)
        yield draw_box(
            x, y + 1, width, 16, look=f'fill="{fill}"', title=f"{name}: {format_bytes(count)}"
        )
        x += count * scale
    yield draw_text(x + 8, y + 13, format_bytes(kind.state))


def _timeline(view: View, y: int) -> Drawn:
    from schedlang.pipeline.timeline.simulation import simulate_timeline
    from schedlang.pipeline.timeline.table import UNIT_TIMES
    from schedlang.viz.timeline_pictures import draw_timings, picture_height

    timeline, order = view.account.timeline, view.plan.order
    if timeline is None or order is None:
        return [], 8
    ranks = max(1, min(timeline.ranks, MOST_OPS * timeline.ranks // max(1, len(timeline))))
    label = f"{order.axis}=" if order.axis else "rank "
    title = f"{order.name}, {order.micro} microbatches, bubble {view.account.bubble:.1%}"
    if ranks < timeline.ranks:
        title += f" (the first {ranks} of {timeline.ranks} ranks)"
    widest, origin = WIDTH - 2 * MARGIN - 80, (MARGIN - 4, y - 16)
    times = {"": simulate_timeline(timeline, UNIT_TIMES, 0.0)}
    drawing = draw_timings(
        times, title=title, widest=widest, ranks=ranks, unit=48.0, who=label, at=origin
    )
    return [drawing.strip()], picture_height(ranks) + 8


# -- printing from Python --------------------------------------------------------------------------


class _Printer:
    def text(self, plan: Plan) -> str:
        """Return the text of the verb `plan`, without activations, which need a batch."""
        return format_view(_view(plan), width=terminal_columns())

    def picture(self, plan: Plan) -> str:
        """Return the picture of `plan --svg`."""
        return draw_plan(_view(plan))


def _view(plan: Plan) -> View:
    from schedlang.passes.simulate.account import account

    return make_view(plan, account(plan, None))


PLAN_PRINTERS.append(_Printer())
