"""The pictures of a timeline that a verb was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from schedlang.cost import Cost
    from schedlang.timeline import Timing

Svg = Annotated[Path | None, typer.Option("--svg", help="Draw it into this file.")]
Page = Annotated[
    Path | None, typer.Option("--html", help="As a page on which all orders can be chosen.")
]
Trace = Annotated[
    Path | None,
    typer.Option("--trace", help="Write a trace for Perfetto or Chrome; *.gz is packed."),
]


@dataclass(frozen=True)
class Pictures:
    """Where to write which picture; None: it was not asked for."""

    svg: Path | None = None
    html: Path | None = None
    trace: Path | None = None

    def write(self, times: Timing, title: str, order: str, cost: Cost) -> None:
        """Write them; `order` is the name under which the page shows the timeline."""
        from schedlang.passes.timeline_page import Shown, timeline_page
        from schedlang.passes.trace import trace
        from schedlang.timeline.svg import drawn
        from schedlang.verbs.files import write_text

        if self.svg is not None:
            write_text(self.svg, drawn({"": times}, title=title))
        if self.trace is not None:
            write_text(self.trace, trace(times))
        if self.html is not None:
            write_text(self.html, timeline_page(Shown(order, times.timeline), cost))
