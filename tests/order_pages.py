"""The part of docs/pipelines.md about each order: python -m tests.order_pages

Everything comes from the registry: the source, what the generator and the closed forms say of
themselves, and a picture of a small timeline with its figures.
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


def said(function: Callable[..., Any] | None, paragraphs: int = 1) -> str:
    """What a function says of itself, in one line; nothing of one without words."""
    if isinstance(function, functools.partial):
        function = function.func
    if function is None or function.__name__ == "<lambda>" or not function.__doc__:
        return ""
    text = inspect.cleandoc(function.__doc__).split("\n\n")
    return " ".join(" ".join(part.split()) for part in text[:paragraphs])


def size_of(known: Order) -> Size:
    """The first of a few sizes that an order has."""
    for ranks, micro in SIZES:
        try:
            return checked_size(known, ranks, micro, slices=2 if known.sliced else 1, cost=COST)
        except OrderError:
            continue
    raise AssertionError(f"{known.name} has none of the sizes {SIZES}")


def chapter(known: Order) -> str:
    """One order: its source, its rule, its closed forms, and its picture."""
    size = size_of(known)
    made = known.make(size)
    times = simulate_timeline(made, COST)
    top = max(float(x) for x in peak_activations(made, COST))
    lines = [f"### {known.name}", "", f"{known.source}."]
    if known.aliases:
        lines[-1] += f" Also called {', '.join(f'`{name}`' for name in known.aliases)}."
    lines += ["", said(known.make, 2), ""]
    lines += [f"* {fact}" for fact in _facts(known)]
    parts = [f"p = {size.ranks}, m = {size.micro}"]
    parts += [f"{size.chunks} stages on each rank"] if size.chunks > 1 else []
    parts += [f"{size.slices} slices"] if size.slices > 1 else []
    figures = (
        f"bubble {float(times.span_bubble):.1%} of the longest rank's time, "
        f"{float(times.bubble):.1%} of the makespan, at most {top:.3g} M_B"
    )
    lines += [f"* {', '.join(parts)}, F = I = W: {figures}", ""]
    return "\n".join([*lines, "```text", draw_bars(times, WIDTH), "```", ""])


def _facts(known: Order) -> list[str]:
    stages = "any number" if known.chunks is None else " or ".join(map(str, known.chunks))
    facts = [f"stages on each rank: {stages}"]
    facts += [f"copies of the stages: {known.replicas}"] if known.replicas > 1 else []
    for name, function in (("idle time of a rank", known.bubble), ("activations", known.peak)):
        words = said(function).rstrip(".")
        facts += [f"{name}: {words}"] if words else []
    if known.relaxed:
        facts.append(f"only in a step with `relax({', '.join(sorted(known.relaxed))})`")
    return facts


def text() -> str:
    """All orders, as they stand in the registry."""
    return "\n".join(chapter(known) for known in ORDERS)


def rewritten(page: str) -> str:
    """The page with what the registry says between its marks."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + "\n" + text() + "\n" + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text()))
