"""simulate: time and draw the timeline of a pipeline, under given or estimated costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from schedlang.verbs.drawing import Page, Pictures, Svg, Trace, Transfers, Width, in_bars
from schedlang.verbs.outcome import AsJson, Knobs, MeshSizes, Model, show_json, verb

if TYPE_CHECKING:
    from schedlang.cost import Cost
    from schedlang.timeline import Timeline
    from schedlang.verbs.simulated import Simulated


@verb
def simulate(
    file: Annotated[
        Path | None, typer.Argument(help="A schedule with a pipeline.", metavar="FILE")
    ] = None,
    order: Annotated[
        str | None,
        typer.Option(help="A name (1F1B, ZB-H1, ..), a table `mine.csv`, or `search`; 1F1B."),
    ] = None,
    stages: Annotated[
        int | None, typer.Option("--stages", "--ranks", help="Pipeline ranks, the p of papers; 4.")
    ] = None,
    micro: Annotated[int | None, typer.Option(help="Microbatches; 8.")] = None,
    chunks: Annotated[
        int | None, typer.Option(help="Stages on each rank, where the order leaves it open.")
    ] = None,
    slices: Annotated[int | None, typer.Option(help="Slices of each sequence; 1.")] = None,
    memory: Annotated[
        float | None,
        typer.Option(help="Activations a rank may hold, in microbatches of one rank's share."),
    ] = None,
    every: Annotated[
        int | None,
        typer.Option(help="Microbatches of an update, for orders with stale weights."),
    ] = None,
    cost: Annotated[
        str | None,
        typer.Option(
            metavar="F=1,I=1,W=1,comm=0",
            help="Times of one microbatch on one rank's whole share of the model; a chunk takes "
            "1/v of them. I and W are the halves of a backward (or B=); comm is a transfer.",
        ),
    ] = None,
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

    A schedule's order, ranks, microbatches and chunks are those of its plan.
    """
    from schedlang.verbs.costs import costs

    if file is None:
        found = _named(
            order or "1F1B", _or(stages, 4), _or(micro, 8), chunks, _or(slices, 1), memory,
            costs(cost), every,
        )  # fmt: skip
    else:
        given = {"order": order, "stages": stages, "micro": micro, "chunks": chunks,
                 "slices": slices, "memory": memory, "every": every}  # fmt: skip
        _only_file(given)
        found = _of_schedule(file, model, knob, mesh, costs(cost))
    title = f"{found.head}, bubble {float(found.times.bubble):.1%}"
    Pictures(svg, html, trace, transfers).write(found.times, title, found.order, found.cost)
    if as_json:
        show_json(found.to_json())
    else:
        print(f"{found.text()}\n\n{in_bars(found.times, width)}")


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _named(
    order: str, ranks: int, micro: int, chunks: int | None, slices: int, memory: float | None,
    cost: Cost, every: int | None = None,
) -> Simulated:  # fmt: skip
    """An order of the registry, or a refusal that says what it needs."""
    from schedlang.diagnostic import Diagnostic, Refusal, closest
    from schedlang.orders import ORDERS, OrderError, chunks_of, find
    from schedlang.orders import order as ordered
    from schedlang.verbs.simulated import simulated

    try:
        known = find(order)
    except OrderError as error:
        near = closest(order, [name for one in ORDERS for name in (one.name, *one.aliases)])
        helps = (f"did you mean `{near}`?",) if near is not None else ()
        raise Refusal(Diagnostic("S608", error.reason, helps=(*helps, error.legal))) from None
    if known.kept is not None and cost.kept == 1 and memory is None:
        cost = replace(cost, kept=known.kept)
    line = _legal(
        lambda: ordered(
            order, ranks, micro, chunks, slices=slices, cost=cost, memory=memory, every=every
        )
    )
    each = chunks_of(order) if chunks is None else chunks
    return simulated(line, cost, known.name, micro, each, slices, memory)


def _legal(make: Callable[[], Timeline]) -> Timeline:
    """What an order makes, or a refusal with sizes that it has."""
    from schedlang.diagnostic import Diagnostic, Refusal
    from schedlang.orders import OrderError

    try:
        return make()
    except OrderError as error:
        raise Refusal(Diagnostic("S608", error.reason, helps=(error.legal,))) from None


def _only_file(given: Mapping[str, object]) -> None:
    """What a schedule says itself cannot be said beside it."""
    from schedlang.diagnostic import Diagnostic, Refusal

    if twice := [name for name, value in given.items() if value is not None]:
        words = ", ".join(f"`--{name}`" for name in twice)
        title = f"the plan of the schedule says this already: {words}"
        helps = ("leave it out, or leave out the schedule",)
        raise Refusal(Diagnostic("S109", title, helps=helps))


def _of_schedule(
    file: Path, model: str | None, knob: list[str] | None, mesh: str | None, cost: Cost
) -> Simulated:
    """The order of a schedule's plan."""
    from schedlang.diagnostic import Diagnostic, Refusal
    from schedlang.verbs.files import planned
    from schedlang.verbs.simulated import simulated

    plan = planned(file, model, knob, mesh).plan
    asked = plan.order
    if asked is None or not plan.cuts:
        title = f"`{file.name}` has no pipeline to simulate"
        helps = ("give it `pipeline_split` and `pipeline`, or name an order: `--order 1F1B`",)
        raise Refusal(Diagnostic("S609", title, helps=helps))
    ranks = plan.mesh.size(plan.cuts[0].axis)
    line = _legal(lambda: asked.timeline(ranks))
    return simulated(line, cost, asked.name, asked.micro, asked.chunks, asked.slices, asked.memory)
