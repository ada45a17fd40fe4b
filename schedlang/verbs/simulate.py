"""simulate: time and draw the timeline of a pipeline, under given costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from schedlang.verbs.drawing import Page, Pictures, Svg, Trace
from schedlang.verbs.outcome import AsJson, Knobs, MeshSizes, Model, show_json, verb

if TYPE_CHECKING:
    from schedlang.timeline import Kind, Timeline


@verb
def simulate(
    file: Annotated[
        Path | None, typer.Argument(help="A schedule with a pipeline.", metavar="FILE")
    ] = None,
    order: Annotated[str, typer.Option(help="Without a file: the order.")] = "1F1B",
    ranks: Annotated[int, typer.Option(help="Pipeline ranks.")] = 4,
    micro: Annotated[int, typer.Option(help="Microbatches.")] = 8,
    chunks: Annotated[int, typer.Option(help="Stages on each rank.")] = 1,
    f: Annotated[float, typer.Option("--f", help="Cost of a forward.")] = 1.0,
    b: Annotated[float, typer.Option("--b", help="Cost of a backward.")] = 2.0,
    comm: Annotated[float, typer.Option("--comm", help="Cost of a transfer.")] = 0.0,
    model: Model = None,
    knob: Knobs = None,
    mesh: MeshSizes = None,
    svg: Svg = None,
    html: Page = None,
    trace: Trace = None,
    as_json: AsJson = False,
) -> None:
    """Time a pipeline's timeline: makespan, bubble, live activations; draw it.

    A schedule's order, ranks, microbatches and chunks are those of its plan; costs are as given.
    """
    from schedlang.cost import Cost
    from schedlang.orders import find
    from schedlang.timeline import peak_live, timing

    cost = _costs(f, b, comm)
    if file is not None:
        order, ranks, micro, chunks = _of_schedule(file, model, knob, mesh)
    line = _line(order, ranks, micro, chunks)
    times = timing(line, cost, comm)
    head = f"{order}   {ranks} ranks, {micro} microbatches, {chunks} stages on each"
    title = f"{head}, bubble {times.bubble:.1%}"
    Pictures(svg, html, trace).write(times, title, find(order).name, Cost(f, b / 2, b / 2, comm))
    live = peak_live(line).tolist()
    if as_json:
        show_json(
            {
                "order": order, "ranks": ranks, "micro": micro, "chunks": chunks,
                "cost": {"f": f, "b": b, "comm": comm}, "makespan": times.makespan,
                "bubble": times.bubble, "busy": times.busy.tolist(), "live": live,
                "timeline": line.text().split("\n"),
            }
        )  # fmt: skip
        return
    print(f"{head}\nmakespan {times.makespan:g}   bubble {times.bubble:.1%}   "
          f"live activations at most {max(live)}\n")  # fmt: skip
    print(line.text(100))


def _costs(f: float, b: float, comm: float) -> dict[Kind, float]:
    """What each kind of operation takes; the halves of a backward take half of it."""
    from schedlang.diagnostic import Diagnostic, Refusal
    from schedlang.timeline import Kind

    if min(f, b, comm) < 0 or f + b == 0:
        helps = ("costs are times: none below zero, not both zero",)
        raise Refusal(Diagnostic("S304", "these costs are no times", helps=helps))
    return {Kind.F: f, Kind.B: b, Kind.I: b / 2, Kind.W: b / 2}


def _line(order: str, ranks: int, micro: int, chunks: int) -> Timeline:
    """The timeline of an order, or a refusal that says what the order needs."""
    from schedlang.diagnostic import Diagnostic, Refusal
    from schedlang.orders import OrderError
    from schedlang.orders import order as ordered

    try:
        return ordered(order, ranks, micro, chunks)
    except OrderError as error:
        raise Refusal(Diagnostic("S608", error.reason, helps=(error.legal,))) from None


def _of_schedule(
    file: Path, model: str | None, knob: list[str] | None, mesh: str | None
) -> tuple[str, int, int, int]:
    """Order, ranks, microbatches and chunks of a schedule's plan."""
    from schedlang.diagnostic import Diagnostic, Refusal
    from schedlang.verbs.files import planned

    plan = planned(file, model, knob, mesh).plan
    if plan.order is None or not plan.cuts:
        title = f"`{file.name}` has no pipeline to simulate"
        helps = ("give it `pipeline_split` and `pipeline`, or name an order: `--order 1F1B`",)
        raise Refusal(Diagnostic("S609", title, helps=helps))
    ranks = plan.mesh.size(plan.cuts[0].axis)
    return plan.order.name, ranks, plan.order.micro, plan.order.chunks
