"""simulate: time and draw the timeline of a pipeline, under given or estimated costs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from schedlang.verbs.drawing import Pictures, Width, in_bars
from schedlang.verbs.ending import show_json
from schedlang.verbs.lines import Asked
from schedlang.verbs.outcome import AsJson, Common, verb

if TYPE_CHECKING:
    from schedlang.passes.simulate.step_time import Machine

File = Annotated[Path | None, typer.Argument(help="A schedule with a pipeline.", metavar="FILE")]
Costs = Annotated[
    str | None,
    typer.Option(
        metavar="F=1,I=1,W=1,comm=0",
        help="Times of one microbatch on one rank's whole share of the model; a chunk takes 1/v of "
        "them. I and W are the halves of a backward (or B=); comm is a transfer. Without it a "
        "schedule's costs are estimated.",
    ),
]


@dataclass(frozen=True)
class Speeds:
    """The speeds of ranks and links."""

    tflops: Annotated[float, typer.Option(help="TFLOP/s of a rank, where costs are estimated.")] = (
        100.0
    )
    bandwidth: Annotated[
        float, typer.Option(help="GB/s between ranks, where costs are estimated.")
    ] = 50.0

    def machine(self) -> Machine:
        """In units; refuses what is not a speed (S109)."""
        from schedlang.diagnostics.diagnostic import Diagnostic, Refusal
        from schedlang.passes.simulate.step_time import Machine

        for name, value in (("tflops", self.tflops), ("bandwidth", self.bandwidth)):
            if not 0 < value < float("inf"):
                title = f"`--{name}` must be finite and above 0, not {value:g}"
                raise Refusal(Diagnostic("S109", title, helps=(f"for example `--{name} 100`",)))
        return Machine(self.tflops * 1e12, self.bandwidth * 1e9)


@verb
def simulate(
    file: File = None,
    *,
    asked: Asked,
    cost: Costs = None,
    speeds: Speeds,
    common: Common,
    pictures: Pictures,
    width: Width = None,
    as_json: AsJson = False,
) -> None:
    """Time a pipeline's timeline: rank span, makespan, bubbles, activations, messages; draw it.

    A schedule's order, ranks, microbatches and chunks are those of its plan.  `--cost` counts
    milliseconds where the schedule expects something of `time(step)`: exit 1 if it does not hold.
    """
    from schedlang.diagnostics.tables import columns
    from schedlang.verbs.costs import costs
    from schedlang.verbs.expected import demand_time, step_of
    from schedlang.verbs.inputs import check_folders, planned
    from schedlang.verbs.lines import named, of_schedule

    axis = unit = ""
    check_folders(svg=pictures.svg, html=pictures.html, trace=pictures.trace)
    if file is None:
        found = named(asked, costs(cost))
    else:
        plan = planned(file, common.model, common.knob, common.mesh)
        given = None if cost is None else costs(cost)
        found = of_schedule(file, asked, plan, given, speeds.machine())
        axis, unit = plan.plan.cuts[0].axis, "ms" if given is None else ""
    title = f"{found.head}, bubble {float(found.times.bubble):.1%}"
    pictures.write(found.times, title, found.order, found.cost, axis=axis, unit=unit)
    if as_json:
        show_json(found.to_json())
    else:
        print(f"{found.text(width or columns())}\n\n{in_bars(found.times, width)}")
    if file is not None and (took := step_of(plan.plan, cost)) is not None:
        demand_time(plan.plan, took)
