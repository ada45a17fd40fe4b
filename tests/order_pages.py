"""Write the part of docs/pipelines.md about each order: python -m tests.order_pages

Everything comes from the registry: the source, the docstrings of the generator and of the closed
forms, and a picture of a small timeline with its figures.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from schedlang.pipeline.cost import Cost
from schedlang.pipeline.schedules import ORDERS, Order, OrderError, Size, checked_size
from schedlang.pipeline.timeline.memory import peak_activations
from schedlang.pipeline.timeline.simulation import simulate_timeline
from schedlang.viz.timeline_pictures import draw_bars

PAGE = Path(__file__).parent.parent / "docs" / "pipelines.md"
BEGIN, END = "<!-- orders -->\n", "<!-- end of orders -->\n"
SIZES = ((4, 8), (4, 4), (2, 4), (4, 16), (8, 16))
WIDTH = 96
COST = Cost(1, 1, 1)


def doc_text(function: Callable[..., Any] | None, paragraphs: int = 1) -> str:
    """A function's docstring in one line, or an empty text."""
    if isinstance(function, functools.partial):
        function = function.func
    if function is None or function.__name__ == "<lambda>" or not function.__doc__:
        return ""
    text = inspect.cleandoc(function.__doc__).split("\n\n")
    return " ".join(" ".join(part.split()) for part in text[:paragraphs])


def size_of(order: Order) -> Size:
    """The first of SIZES that an order allows."""
    for ranks, micro in SIZES:
        try:
            return checked_size(order, ranks, micro, slices=2 if order.sliced else 1, cost=COST)
        except OrderError:
            continue
    raise AssertionError(f"{order.name} has none of the sizes {SIZES}")


def chapter(order: Order) -> str:
    """One order: its source, its rule, its closed forms, and its picture."""
    size = size_of(order)
    timeline = order.make(size)
    times = simulate_timeline(timeline, COST)
    top = max(float(x) for x in peak_activations(timeline, COST))
    lines = [f"### {order.name}", "", f"{order.source}."]
    if order.aliases:
        lines[-1] += f" Also called {', '.join(f'`{name}`' for name in order.aliases)}."
    lines += ["", doc_text(order.make, 2), ""]
    lines += [f"* {fact}" for fact in _facts(order)]
    parts = [f"p = {size.ranks}, m = {size.micro}"]
    parts += [f"{size.chunks} stages on each rank"] if size.chunks > 1 else []
    parts += [f"{size.slices} slices"] if size.slices > 1 else []
    figures = (
        f"bubble {float(times.span_bubble):.1%} of the longest rank's time, "
        f"{float(times.bubble):.1%} of the makespan, at most {top:.3g} M_B"
    )
    lines += [f"* {', '.join(parts)}, F = I = W: {figures}", ""]
    return "\n".join([*lines, "```text", draw_bars(times, WIDTH), "```", ""])


def _facts(order: Order) -> list[str]:
    stages = "any number" if order.chunks is None else " or ".join(map(str, order.chunks))
    lines = [f"stages on each rank: {stages}"]
    lines += [f"copies of the stages: {order.replicas}"] if order.replicas > 1 else []
    for name, function in (("idle time of a rank", order.bubble), ("activations", order.peak)):
        closed_form = doc_text(function).rstrip(".")
        lines += [f"{name}: {closed_form}"] if closed_form else []
    if order.relaxed:
        lines.append(f"only in a step with `relax({', '.join(sorted(order.relaxed))})`")
    return lines


def all_chapters() -> str:
    """The chapters of all orders, in the registry's order."""
    return "\n".join(chapter(order) for order in ORDERS)


def rewrite_page(page: str) -> str:
    """Replace the text between the marks of the page."""
    preceding, following = page.split(BEGIN)
    return preceding + BEGIN + "\n" + all_chapters() + "\n" + END + following.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(rewrite_page(PAGE.read_text()))
