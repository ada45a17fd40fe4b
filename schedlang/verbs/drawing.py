"""The pictures of a timeline that a verb was asked for."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from schedlang.ir.plan import Plan
    from schedlang.passes.lower.train import Measured
    from schedlang.pipeline.cost import Cost
    from schedlang.pipeline.timeline import Timing

Width = Annotated[
    int | None, typer.Option(help="Columns of the bars; as wide as the terminal, or 100.")
]

Run = Annotated[
    Path | None,
    typer.Option(
        "--timeline",
        metavar="OUT.svg|html|json",
        help="Draw the pipeline as it ran under the plan; json is for Perfetto or Chrome.",
    ),
]
WATCHED = 5  # steps at the end of a run whose operations are timed; the median one is drawn


@dataclass(frozen=True)
class Pictures:
    """The pictures to write, each with its file; None: it was not asked for."""

    svg: Annotated[Path | None, typer.Option("--svg", help="Draw it into this file.")] = None
    html: Annotated[
        Path | None, typer.Option("--html", help="As a page on which all orders can be chosen.")
    ] = None
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="Write a trace for Perfetto or Chrome; *.gz is packed."),
    ] = None
    transfers: Annotated[
        bool, typer.Option("--transfers", help="Draw the transfers, too (SVG).")
    ] = False

    def write(
        self, times: Timing, title: str, order: str, cost: Cost, *, axis: str = "", unit: str = ""
    ) -> None:
        """Write them; `order` is the name under which the page shows the timeline.

        `axis` is that of the pipeline where a schedule has one, `unit` that of the costs (ms).
        """
        from schedlang.verbs.inputs import write_asked
        from schedlang.viz.timeline_page import Shown, timeline_page, trace
        from schedlang.viz.timeline_pictures import drawn

        if self.svg is not None:
            who = f"{axis}=" if axis else "rank "
            text = drawn({"": times}, title=title, transfers=self.transfers, who=who)
            write_asked(self.svg, text)
        if self.trace is not None:
            write_asked(self.trace, trace(times))
        if self.html is not None:
            write_asked(self.html, timeline_page(Shown(order, times.timeline, axis, unit), cost))


def in_bars(times: Timing, width: int | None = None) -> str:
    """A bar for each rank, in colour where a terminal shows it (and NO_COLOR is not set)."""
    from schedlang.viz.timeline_pictures import bars

    live = sys.stdout.isatty()
    if width is None:
        width = shutil.get_terminal_size((100, 24)).columns if live else 100
    return bars(times, width, colour=live and not os.environ.get("NO_COLOR"))


def check_timeline(path: Path | None, plan: Plan) -> None:
    """Refuse a picture of a run that has no pipeline (S609), or of another form (S109)."""
    from schedlang.diagnostics.diagnostic import Diagnostic, Refusal

    if path is None:
        return
    if path.suffix not in (".svg", ".html", ".json"):
        title = f"the format of `--timeline {path.name}` is not known"
        raise Refusal(Diagnostic("S109", title, helps=("name it *.svg, *.html or *.json",)))
    if not plan.cuts:
        title = "this plan has no pipeline, so there is no timeline to draw"
        raise Refusal(Diagnostic("S609", title, helps=("leave out `--timeline`",)))


def write_measured(path: Path, found: Measured, title: str, axis: str) -> None:
    """A measured step beside its simulated one, in the form that the name asks for.

    `axis` is that of the pipeline, whose places the lanes are.
    """
    from schedlang.verbs.inputs import write_asked
    from schedlang.viz.timeline_page import measured_page, measured_svg, measured_trace

    if path.suffix == ".json":
        write_asked(path, measured_trace(found))
    else:
        make = measured_svg if path.suffix == ".svg" else measured_page
        write_asked(path, make(found, title, f"{axis}="))
