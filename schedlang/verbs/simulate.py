"""simulate: time and draw the timeline of a pipeline, under given or estimated costs."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from schedlang.verbs.exits import check_positive, show_json
from schedlang.verbs.options import AsJson, Common, verb

if TYPE_CHECKING:
    from schedlang.passes.simulate.step_time import RankRates
    from schedlang.pipeline.cost import Cost
    from schedlang.pipeline.timeline.simulation import Timing

Width = Annotated[
    int | None, typer.Option(help="Columns of the bars; default: the terminal's width, or 100.")
]
File = Annotated[Path | None, typer.Argument(help="A schedule with a pipeline.", metavar="FILE")]
Costs = Annotated[
    str | None,
    typer.Option(
        metavar="F=1,I=1,W=1,comm=0",
        help="Times of one microbatch on one rank's full part of the model; a chunk takes "
        "1/v of them. I and W are the two halves of a backward (or B=); comm is a "
        "transfer. Without this option the costs of a schedule are estimated.",
    ),
]


@dataclass(frozen=True)
class OrderOptions:
    """The options of an order; None: not given."""

    order: Annotated[
        str | None,
        typer.Option(
            help="A name (1F1B, ZB-H1, ..), a table `mine.csv`, or `search`; default: 1F1B."
        ),
    ] = None
    stages: Annotated[
        int | None,
        typer.Option("--stages", "--ranks", help="Pipeline ranks, p in papers; default: 4."),
    ] = None
    micro: Annotated[int | None, typer.Option(help="Microbatches; default: 8.")] = None
    chunks: Annotated[
        int | None, typer.Option(help="Stages on each rank, if the order does not fix them.")
    ] = None
    slices: Annotated[int | None, typer.Option(help="Slices of each sequence; default: 1.")] = None
    memory: Annotated[
        float | None,
        typer.Option(
            help="Activations that a rank may hold, in microbatches of its part of the model."
        ),
    ] = None
    every: Annotated[
        int | None, typer.Option(help="Microbatches per update, for orders with stale weights.")
    ] = None


@dataclass(frozen=True)
class Speeds:
    """The speeds of ranks and links."""

    tflops: Annotated[float, typer.Option(help="TFLOP/s of a rank, for estimated costs.")] = 100.0
    bandwidth: Annotated[float, typer.Option(help="GB/s between ranks, for estimated costs.")] = (
        50.0
    )

    def machine(self) -> RankRates:
        """Return the speeds in FLOP/s and bytes/s; refuses S109."""
        from schedlang.passes.simulate.step_time import RankRates

        for name, value in vars(self).items():
            check_positive(name, value)
        return RankRates(self.tflops * 1e12, self.bandwidth * 1e9)


@dataclass(frozen=True)
class Pictures:
    """The pictures to write, by file; None: not requested."""

    svg: Annotated[Path | None, typer.Option("--svg", help="Draw a picture into this file.")] = None
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a page on which you can choose any order.")
    ] = None
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="Write a trace for Perfetto or Chrome; *.gz is compressed."),
    ] = None
    transfers: Annotated[
        bool, typer.Option("--transfers", help="Also draw the transfers (SVG).")
    ] = False

    def write(
        self, times: Timing, title: str, order: str, cost: Cost, *, axis: str = "", unit: str = ""
    ) -> None:
        """Write the pictures; `order` is the name under which the page shows the timeline.

        `axis` is the pipeline's axis in a schedule, `unit` the unit of the costs (ms).
        """
        from schedlang.verbs.inputs import write_output
        from schedlang.viz.timeline_page import InitialTimeline, format_trace, timeline_page
        from schedlang.viz.timeline_pictures import draw_timings

        if self.svg is not None:
            label = f"{axis}=" if axis else "rank "
            text = draw_timings({"": times}, title=title, transfers=self.transfers, who=label)
            write_output(self.svg, text)
        if self.trace is not None:
            write_output(self.trace, format_trace(times))
        if self.html is not None:
            write_output(
                self.html, timeline_page(InitialTimeline(order, times.timeline, axis, unit), cost)
            )


@verb
def simulate(
    file: File = None,
    *,
    asked: OrderOptions,
    cost: Costs = None,
    speeds: Speeds,
    common: Common,
    pictures: Pictures,
    width: Width = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a pipeline: rank span, makespan, bubbles, activations, messages; draw its
    timeline.

    For a schedule, the order, ranks, microbatches and chunks come from its plan.  `--cost` is in
    milliseconds if the schedule has an `expect` for `time(step)`: exit 1 if it does not hold.
    """
    from schedlang.diagnostics.tables import terminal_columns
    from schedlang.passes.simulate.machine import cluster_of
    from schedlang.passes.simulate.step_time import place_slowdowns
    from schedlang.verbs.costs import check_expected_time, parse_costs, simulate_step
    from schedlang.verbs.inputs import check_folders, plan_schedule
    from schedlang.verbs.timelines import simulate_named, simulate_schedule

    axis = unit = ""
    check_folders(svg=pictures.svg, html=pictures.html, trace=pictures.trace)
    if file is None:
        simulated = simulate_named(asked, parse_costs(cost))
    else:
        plan = plan_schedule(file, common.model, common.knob, common.mesh)
        given_cost = None if cost is None else parse_costs(cost)
        machine = speeds.machine()
        if given_cost is None:
            machine = replace(
                machine, slowdowns=place_slowdowns(plan.plan, cluster_of(plan.tree)[0])
            )
        simulated = simulate_schedule(file, asked, plan, given_cost, machine)
        axis, unit = plan.plan.cuts[0].axis, "ms" if given_cost is None else ""
    title = f"{simulated.head_line}, bubble {float(simulated.times.bubble):.1%}"
    pictures.write(simulated.times, title, simulated.order, simulated.cost, axis=axis, unit=unit)
    if as_json:
        show_json(simulated.to_json())
    else:
        print(
            f"{simulated.text(width or terminal_columns())}\n\n{draw_bars(simulated.times, width)}"
        )
    if file is not None and (step_time := simulate_step(plan.plan, cost)) is not None:
        check_expected_time(plan.plan, step_time)


def draw_bars(times: Timing, width: int | None = None) -> str:
    """Return a bar for each rank, in colour where the terminal supports it and NO_COLOR is not
    set."""
    from schedlang.viz.timeline_pictures import draw_bars

    live = sys.stdout.isatty()
    if width is None:
        width = shutil.get_terminal_size((100, 24)).columns if live else 100
    return draw_bars(times, width, colour=live and not os.environ.get("NO_COLOR"))
