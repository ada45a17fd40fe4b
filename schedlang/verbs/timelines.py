"""The timelines that `simulate` shows: of a named order, a table or a schedule, with their
figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import Refusal, facts_of_unknown, find_closest
from schedlang.diagnostics.source import read_utf8
from schedlang.diagnostics.tables import wrap_lines
from schedlang.pipeline.cost import Cost
from schedlang.pipeline.schedules import (
    ORDERS,
    Order,
    OrderError,
    Size,
    default_chunks,
    find_order,
    make_order,
    read_table,
)
from schedlang.pipeline.schedules.looped import paper_span
from schedlang.pipeline.timeline.memory import peak_activations, peak_live
from schedlang.pipeline.timeline.simulation import Timing, simulate_timeline
from schedlang.pipeline.timeline.table import Timeline
from schedlang.pipeline.timeline.versions import weight_copies
from schedlang.verbs.exits import bad_option

if TYPE_CHECKING:
    from schedlang.verbs.simulate import OrderOptions


WIDE = 100 + len("rank 0: ")  # columns without a terminal
LONGEST = 20_000  # operations listed in JSON at most


@dataclass(frozen=True)
class SimulatedTimeline:
    """A timeline under costs.

    order, micro, chunks, slices   as given for the order
    memory                         the given limit, in M_B
    estimated                      how the costs were estimated, in words
    """

    order: str
    micro: int
    chunks: int
    slices: int
    memory: float | None
    timeline: Timeline
    cost: Cost
    estimated: tuple[str, ...] = ()

    @cached_property
    def times(self) -> Timing:
        """Start and end of each operation."""
        return simulate_timeline(self.timeline, self.cost)

    @property
    def head_line(self) -> str:
        """The head line of the text: order, ranks, microbatches, chunks and slices."""
        line = f"{self.order}   {self.timeline.ranks} ranks, {self.micro} microbatches"
        line += f", {self.chunks} stages on each" if self.chunks > 1 else ""
        return line + (f", {self.slices} slices" if self.slices > 1 else "")

    @property
    def zero_bubble_figures(self) -> dict[str, float] | None:
        """Interleaved 1F1B as Zero Bubble's Table 5 counts it: less p transfers (arXiv
        2401.10241)."""
        if self.order != "Interleaved1F1B":
            return None
        size = Size(self.timeline.ranks, self.micro, self.chunks, cost=self.cost)
        span = float(paper_span(self.times.rank_span, size))
        return {"cost": span, "bubble": 1 - float(self.times.busy.mean()) / span}

    def to_json(self) -> dict[str, Any]:
        """Return plain values; times in the unit of the costs, memory in M_B."""
        timeline, times = self.timeline, self.times
        top = _floats(peak_activations(timeline, self.cost))
        return {
            "order": self.order,
            "stages": timeline.ranks,
            "ranks": timeline.ranks,
            "micro": self.micro,
            "chunks": self.chunks,
            "slices": self.slices,
            "replicas": timeline.replicas,
            "cost": _cost_json(self.cost),
            "estimated": list(self.estimated),
            "rank_span": float(times.rank_span),
            "makespan": float(times.makespan),
            "bubble": float(times.span_bubble),
            "makespan_bubble": float(times.bubble),
            "busy": _floats(times.busy),
            "peak": top,
            "live": peak_live(timeline).tolist(),
            "weights": weight_copies(timeline).tolist(),
            "memory": self.memory,
            "fits": self.memory is None or max(top) <= self.memory + 1e-9,
            "communication": {
                "messages": times.messages,
                "sent": times.sent.tolist(),
                "time": _floats(times.sending),
            },
            "paper": self.zero_bubble_figures,
            "timeline": timeline.text().split("\n") if len(timeline) <= LONGEST else None,
        }

    def text(self, width: int | None = None) -> str:
        """Return the report as text, in `width` columns."""
        times, top = self.times, peak_activations(self.timeline, self.cost)
        peak_rank = int(top.argmax())
        lines = [
            self.head_line,
            f"rank span {_short(times.rank_span)}   bubble {float(times.span_bubble):.2%}   "
            "(a rank's first operation to its last)",
            f"makespan  {_short(times.makespan)}   bubble {float(times.bubble):.2%}   "
            "(all ranks, a barrier at the end)",
            f"activations at most {_short(top[peak_rank])} M_B, on rank {peak_rank}   "
            f"(M_B: a microbatch on one rank's share)",
            f"messages {times.messages}, a rank sends at most {int(times.sent.max())}",
        ]
        if self.timeline.stale:
            copies = ", ".join(map(str, weight_copies(self.timeline)))
            lines.append(f"versions of the weights kept, stage by stage: {copies}")
        if self.zero_bubble_figures is not None and self.cost.comm:
            figures = self.zero_bubble_figures
            lines.append(f"as Zero Bubble counts it   {figures['cost']:g}, {figures['bubble']:.2%}")
        if self.memory is not None and top[peak_rank] > self.memory + 1e-9:
            lines.append(f"over the limit of {self.memory:g} M_B, which this order does not obey")
        lines += [f"estimated: {line}" for line in self.estimated]
        diagram = self.timeline.text((width or WIDE) - len(f"rank {self.timeline.ranks - 1}: "))
        return wrap_lines("\n".join(lines), width) + f"\n\n{diagram}"


def _short(value: Any) -> str:
    return f"{float(value):.6g}"


def _floats(values: Any) -> list[float]:
    return [float(x) for x in values.tolist()]


def _cost_json(cost: Cost) -> dict[str, Any]:
    """Return the given costs alone; the times of single stages and edges are lists."""
    values: dict[str, Any] = {}
    for field in fields(cost):
        value = getattr(cost, field.name)
        if isinstance(value, int | float | Fraction):
            if value or field.name in ("f", "i", "w", "comm", "kept"):
                values[field.name] = float(value)
        elif field.name == "between" and value is not None:
            values[field.name] = [[*edge, float(time)] for edge, time in value.items()]
        elif value is not None:
            values[field.name] = [float(x) for x in value]
    return values


TABLE = ".csv"


def simulate_named(options: OrderOptions, cost: Cost) -> SimulatedTimeline:
    """Simulate an order of the registry or a table; refuses illegal sizes."""
    name = options.order or "1F1B"
    if name.lower().endswith(TABLE):
        return _simulate_table(name, options, cost)
    order = _find_order(name)
    ranks, micro, slices = (
        default if value is None else value
        for value, default in ((options.stages, 4), (options.micro, 8), (options.slices, 1))
    )
    chunks = default_chunks(name) if options.chunks is None else options.chunks
    if order.kept is not None and cost.kept == 1 and options.memory is None:
        cost = replace(cost, kept=order.kept)
    rest: dict[str, Any] = {
        "slices": slices,
        "cost": cost,
        "memory": options.memory,
        "every": options.every,
    }
    line = make_timeline(lambda: make_order(name, ranks, micro, chunks, **rest))
    return SimulatedTimeline(order.name, micro, chunks, slices, options.memory, line, cost)


def _find_order(order: str) -> Order:
    """Return the order of a name; refuses S608 with the closest name."""
    try:
        return find_order(order)
    except OrderError as error:
        names = [name for entry in ORDERS for name in (entry.name, *entry.aliases)]
        closest, facts = find_closest(order, names), facts_of_unknown(order, names)
        helps = (*((f"did you mean `{closest}`?",) if closest is not None else ()), error.legal)
        raise Refusal.of("S608", error.reason, helps=helps, facts=facts) from None


def _simulate_table(path: str, options: OrderOptions, cost: Cost) -> SimulatedTimeline:
    """Simulate a table of an order, which contains its sizes."""
    _refuse_beside(options, ("chunks", "slices", "every"), "the table")
    try:
        text = read_utf8(path)
    except (OSError, UnicodeDecodeError) as error:
        title = f"cannot read the table `{path}`: {getattr(error, 'strerror', 'it is no text')}"
        helps = ("give a file, or an order: `--order 1F1B`",)
        raise Refusal.of("S303", title, helps=helps) from None
    line = make_timeline(lambda: read_table(text, options.stages, options.micro))
    chunks = -(-line.stages // line.ranks)
    return SimulatedTimeline(
        path, line.microbatches, chunks, line.slices, options.memory, line, cost
    )


def simulate_schedule(
    file: Path, options: OrderOptions, planned: Any, cost: Cost | None, machine: Any
) -> SimulatedTimeline:
    """Simulate the order of a schedule's plan (`planned`: Planned); without `cost`, costs are
    estimated."""
    from schedlang.passes.simulate.step_time import PipelineEstimate, estimate_pipeline

    _refuse_beside(options, tuple(vars(options)), "the plan of the schedule")
    plan = planned.plan
    order = plan.order
    if order is None or not plan.cuts:
        title = f"`{file.name}` has no pipeline to simulate"
        helps = ("add `pipeline_split` and `pipeline`, or give an order: `--order 1F1B`",)
        raise Refusal.of("S609", title, helps=helps)
    if cost is None:
        batch = planned.model.batch(0) if planned.model.has_batch else None
        estimate = estimate_pipeline(plan, batch, planned.model.loss, machine)
    else:
        estimate = PipelineEstimate(
            make_timeline(lambda: order.timeline(plan.mesh.size(plan.cuts[0].axis))), cost, ()
        )
    sizes = order.name, order.micro, order.chunks, order.slices, order.memory
    return SimulatedTimeline(*sizes, estimate.timeline, estimate.cost, estimate.notes)


def _refuse_beside(options: OrderOptions, names: tuple[str, ...], source: str) -> None:
    """Refuse (S109) options that a file sets itself."""
    values: Mapping[str, object] = vars(options)
    if twice := [name for name in names if values[name] is not None]:
        flags = ", ".join(f"`--{name}`" for name in twice)
        title = f"{source} already sets {flags}"
        bad_option(title, "leave the option out, or leave out the file")


def make_timeline(make: Callable[[], Timeline]) -> Timeline:
    """Make a timeline; refuse (S608) sizes that its order cannot have, and name legal ones."""
    try:
        return make()
    except OrderError as error:
        raise Refusal.of("S608", error.reason, helps=(error.legal,)) from None
