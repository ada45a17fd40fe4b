"""simulate: time and draw the timeline of a pipeline, under given or estimated costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from schedlang.verbs.drawing import Page, Pictures, Svg, Trace, Transfers, Width, in_bars
from schedlang.verbs.outcome import AsJson, Knobs, MeshSizes, Model, show_json, verb

if TYPE_CHECKING:
    from schedlang.passes.costs.estimated import Machine

File = Annotated[Path | None, typer.Argument(help="A schedule with a pipeline.", metavar="FILE")]
OrderName = Annotated[
    str | None,
    typer.Option(help="A name (1F1B, ZB-H1, ..), a table `mine.csv`, or `search`; 1F1B."),
]
Stages = Annotated[
    int | None, typer.Option("--stages", "--ranks", help="Pipeline ranks, the p of papers; 4.")
]
Micro = Annotated[int | None, typer.Option(help="Microbatches; 8.")]
Chunks = Annotated[
    int | None, typer.Option(help="Stages on each rank, where the order leaves it open.")
]
Slices = Annotated[int | None, typer.Option(help="Slices of each sequence; 1.")]
Memory = Annotated[
    float | None,
    typer.Option(help="Activations a rank may hold, in microbatches of one rank's share."),
]
Every = Annotated[
    int | None, typer.Option(help="Microbatches of an update, for orders with stale weights.")
]
Costs = Annotated[
    str | None,
    typer.Option(
        metavar="F=1,I=1,W=1,comm=0",
        help="Times of one microbatch on one rank's whole share of the model; a chunk takes 1/v of "
        "them. I and W are the halves of a backward (or B=); comm is a transfer. Without it a "
        "schedule's costs are estimated.",
    ),
]
Tflops = Annotated[float, typer.Option(help="TFLOP/s of a rank, where costs are estimated.")]
Bandwidth = Annotated[float, typer.Option(help="GB/s between ranks, where costs are estimated.")]


@verb
def simulate(
    file: File = None,
    order: OrderName = None,
    stages: Stages = None,
    micro: Micro = None,
    chunks: Chunks = None,
    slices: Slices = None,
    memory: Memory = None,
    every: Every = None,
    cost: Costs = None,
    tflops: Tflops = 100.0,
    bandwidth: Bandwidth = 50.0,
    model: Model = None,
    knob: Knobs = None,
    mesh: MeshSizes = None,
    svg: Svg = None,
    html: Page = None,
    trace: Trace = None,
    transfers: Transfers = False,
    width: Width = None,
    as_json: AsJson = False,
) -> None:
    """Time a pipeline's timeline: rank span, makespan, bubbles, activations, messages; draw it.

    A schedule's order, ranks, microbatches and chunks are those of its plan.  `--cost` counts
    milliseconds where the schedule expects something of `time(step)`: exit 1 if it does not hold.
    """
    from schedlang.verbs.costs import costs
    from schedlang.verbs.expected import demand_time, step_of
    from schedlang.verbs.files import planned
    from schedlang.verbs.lines import Asked, named, of_schedule

    asked = Asked(order, stages, micro, chunks, slices, memory, every)
    if file is None:
        found = named(asked, costs(cost))
    else:
        plan = planned(file, model, knob, mesh)
        given = None if cost is None else costs(cost)
        found = of_schedule(file, asked, plan, given, _machine(tflops, bandwidth))
    title = f"{found.head}, bubble {float(found.times.bubble):.1%}"
    Pictures(svg, html, trace, transfers).write(found.times, title, found.order, found.cost)
    if as_json:
        show_json(found.to_json())
    else:
        print(f"{found.text()}\n\n{in_bars(found.times, width)}")
    if file is not None and (took := step_of(plan.plan, cost)) is not None:
        demand_time(plan.plan, took)


def _machine(tflops: float, bandwidth: float) -> Machine:
    """What ranks and links do in a second; refuses what is no speed."""
    from schedlang.diagnostic import Diagnostic, Refusal
    from schedlang.passes.costs.estimated import Machine

    for name, value in (("tflops", tflops), ("bandwidth", bandwidth)):
        if not 0 < value < float("inf"):
            title = f"`--{name} {value:g}` is no speed"
            raise Refusal(Diagnostic("S109", title, helps=("it is above zero",)))
    return Machine(tflops * 1e12, bandwidth * 1e9)
