"""Timed timelines as a trace that Perfetto and Chrome show."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import numpy as np

from schedlang.pipeline.timeline import Kind, Timing
from schedlang.pipeline.timeline.pictures import levels, word
from schedlang.pipeline.timeline.simulation import COPIES
from schedlang.pipeline.timeline.table import dependencies

UNIT = 1000.0  # microseconds a unit of cost


def trace(times: Timing | Mapping[str, Timing], unit: float = UNIT, *, flows: bool = True) -> str:
    """Trace Event JSON, `unit` microseconds a unit of cost; several timings as named processes.

    A thread for each rank, and one for its copies; a complete event for each operation, an instant
    one where it takes no time; arrows for the transfers between ranks (`flows`).
    """
    layers = {"pipeline": times} if isinstance(times, Timing) else times
    events: list[str] = []
    for process, (name, one) in enumerate(layers.items()):
        events += _names(process, name, one)
        events += _operations(process, one, unit)
        if flows:
            events += _flows(process, one, unit)
    return '{"traceEvents": [\n' + ",\n".join(events) + '\n], "displayTimeUnit": "ms"}\n'


def _names(process: int, name: str, times: Timing) -> Iterator[str]:
    t = times.timeline
    yield _meta("process_name", process, 0, {"name": name})
    yield _meta("process_sort_index", process, 0, {"sort_index": process})
    copied = np.unique(t.rank[np.isin(t.kind, COPIES)]).tolist()
    threads = [(rank, 2 * rank, f"rank {rank}") for rank in range(t.ranks)]
    threads += [(rank, 2 * rank + 1, f"rank {rank}, copies") for rank in copied]
    for _, number, said in sorted(threads):
        yield _meta("thread_name", process, number, {"name": said})
        yield _meta("thread_sort_index", process, number, {"sort_index": number})


def _meta(what: str, process: int, thread: int, args: Mapping[str, object]) -> str:
    return json.dumps({"ph": "M", "name": what, "pid": process, "tid": thread, "args": args})


def _operations(process: int, times: Timing, unit: float) -> Iterator[str]:
    t = times.timeline
    threads = 2 * t.rank + np.isin(t.kind, COPIES)
    chunk, most = levels(t), t.stages > t.ranks
    columns = (
        threads,
        t.kind,
        t.stage,
        t.microbatch,
        t.replica,
        t.slice,
        t.version,
        chunk,
        times.start * unit,
        (times.end - times.start) * unit,
    )
    words = {int(kind): (kind.name, word(kind)) for kind in Kind}
    several, sliced = t.replicas > 1, t.slices > 1
    for thread, kind, stage, micro, replica, part, version, level, start, took in zip(
        *(column.tolist() for column in columns)
    ):
        name, said = words[kind]
        args = f'"stage": {stage}, "microbatch": {micro}, "kind": "{said}"'
        args += f', "replica": {replica}' if several else ""
        args += f', "slice": {part}' if sliced else ""
        args += f', "version": {version}' if version else ""
        args += f', "place on its rank": {level}' if most else ""
        title = f"{name}{micro}.{part}" if sliced else f"{name}{micro}"
        shape = f'"ph": "X", "dur": {took:.6g}' if took > 0 else '"ph": "i", "s": "t"'
        yield (
            f'{{{shape}, "pid": {process}, "tid": {thread}, "ts": {start:.9g}, '
            f'"name": "{title}", "cat": "{said}", "args": {{{args}}}}}'
        )


def _flows(process: int, times: Timing, unit: float) -> Iterator[str]:
    """Arrows from just before the end of what makes to just after the start of what uses."""
    t = times.timeline
    made, used = dependencies(t)
    apart = t.rank[made] != t.rank[used]
    made, used = made[apart], used[apart]
    took = times.end - times.start
    leaves = (times.end[made] - took[made] / 1000) * unit
    comes = (times.start[used] + took[used] / 1000) * unit
    columns = (2 * t.rank[made], leaves, 2 * t.rank[used], comes, t.kind[made] == Kind.F)
    for number, (source, start, target, end, forward) in enumerate(
        zip(*(column.tolist() for column in columns))
    ):
        what = "activations" if forward else "gradients"
        same = f'"name": "{what}", "cat": "{what}", "id": "{process}.{number}", "pid": {process}'
        yield f'{{"ph": "s", "tid": {source}, "ts": {start:.9g}, {same}}}'
        yield f'{{"ph": "f", "bp": "e", "tid": {target}, "ts": {end:.9g}, {same}}}'
