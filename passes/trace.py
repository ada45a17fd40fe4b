"""A timed timeline as a trace that Perfetto and Chrome show."""

from __future__ import annotations

import json

from schedlang.timeline import Kind, Timing

UNIT = 1000.0  # microseconds a unit of cost
WORDS = {Kind.F: "forward", Kind.B: "backward", Kind.I: "input grad", Kind.W: "weight grad"}


def trace(times: Timing) -> str:
    """Trace Event JSON: one thread per rank, one complete event per operation, 1 ms a unit."""
    t = times.timeline
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
        for rank in range(t.ranks)
    ]
    columns = (t.rank, t.kind, t.stage, t.microbatch, times.start, times.end)
    for rank, kind, stage, micro, start, end in zip(*(c.tolist() for c in columns)):
        word = WORDS.get(Kind(kind), Kind(kind).name.lower())
        events.append(
            {
                "ph": "X", "pid": 0, "tid": rank, "name": f"{Kind(kind).name}{micro}", "cat": word,
                "ts": start * UNIT, "dur": (end - start) * UNIT,
                "args": {"stage": stage, "microbatch": micro, "kind": word},
            }
        )  # fmt: skip
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"
