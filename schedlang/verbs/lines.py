"""The timeline that `simulate` is asked for: of a named order, of a table, or of a schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal, closest, unknown
from schedlang.diagnostics.source import text_of
from schedlang.pipeline.cost import Cost
from schedlang.verbs.ending import bad_option

if TYPE_CHECKING:
    from schedlang.pipeline.schedules import Order
    from schedlang.pipeline.timeline.table import Timeline
    from schedlang.verbs.simulated import Simulated

TABLE = ".csv"


@dataclass(frozen=True)
class Asked:
    """The options of an order; None where they were not given."""

    order: Annotated[
        str | None,
        typer.Option(help="A name (1F1B, ZB-H1, ..), a table `mine.csv`, or `search`; 1F1B."),
    ] = None
    stages: Annotated[
        int | None, typer.Option("--stages", "--ranks", help="Pipeline ranks, the p of papers; 4.")
    ] = None
    micro: Annotated[int | None, typer.Option(help="Microbatches; 8.")] = None
    chunks: Annotated[
        int | None, typer.Option(help="Stages on each rank, where the order leaves it open.")
    ] = None
    slices: Annotated[int | None, typer.Option(help="Slices of each sequence; 1.")] = None
    memory: Annotated[
        float | None,
        typer.Option(help="Activations a rank may hold, in microbatches of one rank's share."),
    ] = None
    every: Annotated[
        int | None, typer.Option(help="Microbatches of an update, for orders with stale weights.")
    ] = None


def named(asked: Asked, cost: Cost) -> Simulated:
    """An order of the registry or a table, or a refusal that says what it needs."""
    from schedlang.pipeline.schedules import chunks_of, order
    from schedlang.verbs.simulated import simulated

    name = asked.order or "1F1B"
    if name.lower().endswith(TABLE):
        return _table(name, asked, cost)
    known = _known(name)
    ranks, micro, slices = (
        default if value is None else value
        for value, default in ((asked.stages, 4), (asked.micro, 8), (asked.slices, 1))
    )
    chunks = chunks_of(name) if asked.chunks is None else asked.chunks
    if known.kept is not None and cost.kept == 1 and asked.memory is None:
        cost = replace(cost, kept=known.kept)
    line = legal(
        lambda: order(
            name,
            ranks,
            micro,
            chunks,
            slices=slices,
            cost=cost,
            memory=asked.memory,
            every=asked.every,
        )
    )
    return simulated(line, cost, known.name, micro, chunks, slices, asked.memory)


def _known(order: str) -> Order:
    """The order of a name, or a refusal that guesses which was meant."""
    from schedlang.pipeline.schedules import ORDERS, OrderError, find

    try:
        return find(order)
    except OrderError as error:
        known = [name for one in ORDERS for name in (one.name, *one.aliases)]
        near, facts = closest(order, known), unknown(order, known)
        helps = (*((f"did you mean `{near}`?",) if near is not None else ()), error.legal)
        raise Refusal(Diagnostic("S608", error.reason, helps=helps, facts=facts)) from None


def _table(path: str, asked: Asked, cost: Cost) -> Simulated:
    """A table of an order; it says its sizes itself."""
    from schedlang.pipeline.schedules import read_table
    from schedlang.verbs.simulated import simulated

    _not_beside(asked, ("chunks", "slices", "every"), "the table")
    try:
        text = text_of(path)
    except (OSError, UnicodeDecodeError) as error:
        title = f"cannot read the table `{path}`: {getattr(error, 'strerror', 'it is no text')}"
        helps = ("give a file, or an order: `--order 1F1B`",)
        raise Refusal(Diagnostic("S303", title, helps=helps)) from None
    line = legal(lambda: read_table(text, asked.stages, asked.micro))
    chunks = -(-line.stages // line.ranks)
    return simulated(line, cost, path, line.microbatches, chunks, line.slices, asked.memory)


def of_schedule(file: Path, asked: Asked, found: Any, cost: Cost | None, machine: Any) -> Simulated:
    """The order of a schedule's plan (`found`: Planned); without `cost` with estimated costs."""
    from schedlang.passes.simulate.step_time import Estimate, estimated
    from schedlang.verbs.simulated import simulated

    _not_beside(asked, tuple(vars(asked)), "the plan of the schedule")
    plan = found.plan
    order = plan.order
    if order is None or not plan.cuts:
        title = f"`{file.name}` has no pipeline to simulate"
        helps = ("add `pipeline_split` and `pipeline`, or give an order: `--order 1F1B`",)
        raise Refusal(Diagnostic("S609", title, helps=helps))
    if cost is None:
        batch = found.model.batch(0) if found.model.has_batch else None
        made = estimated(plan, batch, found.model.loss, machine)
    else:
        made = Estimate(legal(lambda: order.timeline(plan.mesh.size(plan.cuts[0].axis))), cost, ())
    return simulated(
        made.timeline,
        made.cost,
        order.name,
        order.micro,
        order.chunks,
        order.slices,
        order.memory,
        made.notes,
    )


def _not_beside(asked: Asked, names: tuple[str, ...], who: str) -> None:
    """Refuse options that set what a file sets itself (S109)."""
    given: Mapping[str, object] = vars(asked)
    if twice := [name for name in names if given[name] is not None]:
        words = ", ".join(f"`--{name}`" for name in twice)
        title = f"{who} already sets {words}"
        bad_option(title, "leave the option out, or leave out the file")


def legal(make: Callable[[], Timeline]) -> Timeline:
    """Make a timeline; refuse sizes that its order does not have, and name some that it has
    (S608)."""
    from schedlang.pipeline.schedules import OrderError

    try:
        return make()
    except OrderError as error:
        raise Refusal(Diagnostic("S608", error.reason, helps=(error.legal,))) from None
