"""Results of `simulate` for a timeline: its times, its memory and its messages, text and JSON."""

from __future__ import annotations

from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any

from schedlang.diagnostics.tables import fitted
from schedlang.pipeline.cost import Cost
from schedlang.pipeline.timeline.memory import peak, peak_live
from schedlang.pipeline.timeline.simulation import Timing, timing
from schedlang.pipeline.timeline.table import Timeline
from schedlang.pipeline.timeline.versions import is_stale, weight_copies

WIDE = 100 + len("rank 0: ")  # columns where there is no terminal
LONGEST = 20_000  # operations that are listed in JSON


@dataclass(frozen=True)
class Simulated:
    """A timeline under costs.

    order, micro, chunks, slices   as the order was asked for
    memory                         the limit that was given, in M_B
    estimated                      what the costs were estimated from, in words
    """

    order: str
    micro: int
    chunks: int
    slices: int
    memory: float | None
    timeline: Timeline
    cost: Cost
    times: Timing
    estimated: tuple[str, ...] = ()

    @property
    def head(self) -> str:
        """The head line of the text: order, ranks, microbatches, chunks and slices."""
        line = f"{self.order}   {self.timeline.ranks} ranks, {self.micro} microbatches"
        line += f", {self.chunks} stages on each" if self.chunks > 1 else ""
        return line + (f", {self.slices} slices" if self.slices > 1 else "")

    @property
    def paper(self) -> dict[str, float] | None:
        """Interleaved 1F1B as Zero Bubble's Table 5 counts it: less p transfers (2401.10241)."""
        if self.order != "Interleaved1F1B":
            return None
        from schedlang.pipeline.schedules import Size
        from schedlang.pipeline.schedules.looped import accounted

        size = Size(self.timeline.ranks, self.micro, self.chunks, cost=self.cost)
        span = float(accounted(self.times.rank_span, size))
        return {"cost": span, "bubble": 1 - float(self.times.busy.mean()) / span}

    def to_json(self) -> dict[str, Any]:
        """Return plain values; times in the unit of the costs, memory in M_B."""
        t, times = self.timeline, self.times
        top = _plain(peak(t, self.cost))
        return {
            "order": self.order,
            "stages": t.ranks,
            "ranks": t.ranks,
            "micro": self.micro,
            "chunks": self.chunks,
            "slices": self.slices,
            "replicas": t.replicas,
            "cost": _cost(self.cost),
            "estimated": list(self.estimated),
            "rank_span": float(times.rank_span),
            "makespan": float(times.makespan),
            "bubble": float(times.span_bubble),
            "makespan_bubble": float(times.bubble),
            "busy": _plain(times.busy),
            "peak": top,
            "live": peak_live(t).tolist(),
            "weights": weight_copies(t).tolist(),
            "memory": self.memory,
            "fits": self.memory is None or max(top) <= self.memory + 1e-9,
            "communication": {
                "messages": times.messages,
                "sent": times.sent.tolist(),
                "time": _plain(times.sending),
            },
            "paper": self.paper,
            "timeline": t.text().split("\n") if len(t) <= LONGEST else None,
        }

    def text(self, width: int | None = None) -> str:
        """Return the text for people, in so many columns."""
        times, top = self.times, peak(self.timeline, self.cost)
        most = int(top.argmax())
        lines = [
            self.head,
            f"rank span {_short(times.rank_span)}   bubble {float(times.span_bubble):.2%}   "
            "(a rank's first operation to its last)",
            f"makespan  {_short(times.makespan)}   bubble {float(times.bubble):.2%}   "
            "(all ranks, a barrier at the end)",
            f"activations at most {_short(top[most])} M_B, on rank {most}   "
            f"(M_B: a microbatch on one rank's share)",
            f"messages {times.messages}, a rank sends at most {int(times.sent.max())}",
        ]
        if is_stale(self.timeline):
            copies = ", ".join(map(str, weight_copies(self.timeline)))
            lines.append(f"versions of the weights kept, stage by stage: {copies}")
        if self.paper is not None and self.cost.comm:
            found = self.paper
            lines.append(f"as Zero Bubble counts it   {found['cost']:g}, {found['bubble']:.2%}")
        if self.memory is not None and top[most] > self.memory + 1e-9:
            lines.append(f"over the limit of {self.memory:g} M_B, which this order does not obey")
        lines += [f"estimated: {line}" for line in self.estimated]
        drawn = self.timeline.text((width or WIDE) - len(f"rank {self.timeline.ranks - 1}: "))
        return fitted("\n".join(lines), width) + f"\n\n{drawn}"


def simulated(
    line: Timeline,
    cost: Cost,
    order: str,
    micro: int,
    chunks: int,
    slices: int,
    memory: float | None,
    estimated: tuple[str, ...] = (),
) -> Simulated:
    """Time a timeline."""
    times = timing(line, cost)
    return Simulated(order, micro, chunks, slices, memory, line, cost, times, estimated)


def _short(value: Any) -> str:
    return f"{float(value):.6g}"


def _plain(values: Any) -> list[float]:
    return [float(x) for x in values.tolist()]


def _cost(cost: Cost) -> dict[str, Any]:
    """Only what is said of it; the times of single stages and edges are lists."""
    found: dict[str, Any] = {}
    for field in fields(cost):
        value = getattr(cost, field.name)
        if isinstance(value, int | float | Fraction):
            if value or field.name in ("f", "i", "w", "comm", "kept"):
                found[field.name] = float(value)
        elif field.name == "between" and value is not None:
            found[field.name] = [[*edge, float(time)] for edge, time in value.items()]
        elif value is not None:
            found[field.name] = [float(x) for x in value]
    return found
