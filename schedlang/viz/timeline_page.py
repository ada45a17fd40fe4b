"""Timelines as an interactive page or a trace: planned, or measured beside the simulated one."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from html import escape
from importlib import resources
from itertools import product
from typing import Any

import numpy as np

from schedlang.passes.lower.train import MeasuredStep
from schedlang.pipeline.cost import DEFAULT_COST, Cost
from schedlang.pipeline.schedules import ORDERS, Order, OrderError, make_order
from schedlang.pipeline.timeline.memory import peak_activations
from schedlang.pipeline.timeline.simulation import COPY_KINDS, Timing, relative_weights
from schedlang.pipeline.timeline.table import (
    Kind,
    Timeline,
    barrier_waits,
    chain_edges,
    dependencies,
)
from schedlang.viz.elements import html_page
from schedlang.viz.timeline_pictures import FAINTEST, STYLE, draw_timings, levels, look_of

# -- as a trace that Perfetto and Chrome show ------------------------------------------------------


UNIT = 1000.0  # microseconds a unit of cost


def format_trace(
    times: Timing | Mapping[str, Timing], unit: float = UNIT, *, flows: bool = True
) -> str:
    """Format timings as Trace Event JSON, `unit` microseconds per unit of cost.

    Several timings become named processes. A thread for each rank, and one for its copies; a
    complete event for each operation, an instant event for one without duration; arrows for the
    transfers between ranks (`flows`).
    """
    layers = {"pipeline": times} if isinstance(times, Timing) else times
    events: list[str] = []
    for process, (name, timing) in enumerate(layers.items()):
        events += _name_events(process, name, timing)
        events += _operation_events(process, timing, unit)
        if flows:
            events += _flow_events(process, timing, unit)
    return '{"traceEvents": [\n' + ",\n".join(events) + '\n], "displayTimeUnit": "ms"}\n'


def _name_events(process: int, name: str, times: Timing) -> Iterator[str]:
    t = times.timeline
    yield _meta_event("process_name", process, 0, {"name": name})
    yield _meta_event("process_sort_index", process, 0, {"sort_index": process})
    copied = np.unique(t.rank[np.isin(t.kind, COPY_KINDS)]).tolist()
    threads = [(rank, 2 * rank, f"rank {rank}") for rank in range(t.ranks)]
    threads += [(rank, 2 * rank + 1, f"rank {rank}, copies") for rank in copied]
    for _, number, label in sorted(threads):
        yield _meta_event("thread_name", process, number, {"name": label})
        yield _meta_event("thread_sort_index", process, number, {"sort_index": number})


def _meta_event(name: str, process: int, thread: int, args: Mapping[str, object]) -> str:
    return json.dumps({"ph": "M", "name": name, "pid": process, "tid": thread, "args": args})


def _operation_events(process: int, times: Timing, unit: float) -> Iterator[str]:
    t = times.timeline
    threads = 2 * t.rank + np.isin(t.kind, COPY_KINDS)
    chunk, several_stages = levels(t), t.stages > t.ranks
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
    names = {int(kind): (kind.name, look_of(kind).word) for kind in Kind}
    has_replicas, sliced = t.replicas > 1, t.slices > 1
    for thread, kind, stage, micro, replica, part, version, level, start, duration in zip(
        *(column.tolist() for column in columns)
    ):
        name, kind_word = names[kind]
        args = f'"stage": {stage}, "microbatch": {micro}, "kind": "{kind_word}"'
        args += f', "replica": {replica}' if has_replicas else ""
        args += f', "slice": {part}' if sliced else ""
        args += f', "version": {version}' if version else ""
        args += f', "place on its rank": {level}' if several_stages else ""
        label = f"{name}{micro}.{part}" if sliced else f"{name}{micro}"
        shape = f'"ph": "X", "dur": {duration:.6g}' if duration > 0 else '"ph": "i", "s": "t"'
        yield (
            f'{{{shape}, "pid": {process}, "tid": {thread}, "ts": {start:.9g}, '
            f'"name": "{label}", "cat": "{kind_word}", "args": {{{args}}}}}'
        )


def _flow_events(process: int, times: Timing, unit: float) -> Iterator[str]:
    """Yield arrows from just before the end of the producer to just after the start of the
    consumer."""
    t = times.timeline
    src, dst = dependencies(t)
    crossing = t.rank[src] != t.rank[dst]
    src, dst = src[crossing], dst[crossing]
    length = times.end - times.start
    leaves = (times.end[src] - length[src] / 1000) * unit
    arrives = (times.start[dst] + length[dst] / 1000) * unit
    columns = (2 * t.rank[src], leaves, 2 * t.rank[dst], arrives, t.kind[src] == Kind.F)
    for number, (source, start, target, end, forward) in enumerate(
        zip(*(column.tolist() for column in columns))
    ):
        content = "activations" if forward else "gradients"
        shared = (
            f'"name": "{content}", "cat": "{content}", "id": "{process}.{number}", "pid": {process}'
        )
        yield f'{{"ph": "s", "tid": {source}, "ts": {start:.9g}, {shared}}}'
        yield f'{{"ph": "f", "bp": "e", "tid": {target}, "ts": {end:.9g}, {shared}}}'


# -- orders, sizes and costs that are chosen in the browser ----------------------------------------


RANKS, MICRO, CHUNKS, SLICES = (2, 4, 8), (4, 8, 16), (2, 4), (2, 4)
RATIOS = ("kept", "shares", "held", "slices", "inputs", "between")  # of a cost: not times
SHEET = (
    "form{display:flex;flex-wrap:wrap;gap:.6em 1.2em}"
    "input[type=number]{width:5em}#frame,.wide{overflow:auto}#frame{margin:1em 0}"
    "#frame svg{width:100%;min-width:600px}"
    "td,th{padding:1px 12px 1px 0;text-align:left;white-space:nowrap;"
    "font-variant-numeric:tabular-nums}"
    "#peaks div{height:10px;background:#0072b2}#others tr{cursor:pointer}.now{font-weight:700}"
    ".key span{display:inline-block;width:12px;height:12px;margin:0 4px 0 12px}"
    "@media(prefers-color-scheme:dark){#peaks div{background:#56b4e9}}"
)


@dataclass(frozen=True)
class InitialTimeline:
    """A timeline that a page opens with, and its order or file.

    axis  of the mesh, whose places the lanes are; "" for an order alone
    unit  of the costs: "ms", or "" without a unit
    """

    order: str
    timeline: Timeline
    axis: str = ""
    unit: str = ""


def timeline_page(initial: InitialTimeline | None = None, cost: Cost = DEFAULT_COST) -> str:
    """Return the page: every order at some sizes, and `initial`, the initial one, at its own sizes.

    Timelines are those of the registry, packed; the page's script only times and draws them. Orders
    that depend on costs are made for `cost`.
    """
    cost, unit = readable_cost(cost, initial.unit if initial is not None else "")
    sizes = (initial.timeline.ranks, initial.timeline.microbatches) if initial is not None else None
    entries = list(_make_entries(cost, sizes))
    first = {"order": "1F1B", "ranks": 4, "micro": 8, "variant": ""}
    if initial is not None:
        t = initial.timeline
        variant = _describe_variant(initial.order, max(1, t.stages // t.ranks), t.slices)
        custom = _make_entry(initial.order, t.microbatches, variant, t)
        custom["timeline"] |= _weight_lists(t, cost)
        first = {key: custom[key] for key in first}
        entries = [custom, *(e for e in entries if any(e[key] != first[key] for key in first))]
        entries.sort(
            key=lambda e: [o.name for o in ORDERS].index(e["order"]) if _is_registered(e) else -1
        )
    data = {
        "entries": entries,
        "first": first,
        "faintest": FAINTEST,
        "cost": {key: float(f"{float(getattr(cost, key)):.5g}") for key in ("f", "i", "w", "comm")},
        "unit": unit,
        "who": f"{initial.axis}=" if initial is not None and initial.axis else "rank ",
        "sources": {order.name: order.source for order in ORDERS},
        "looks": [asdict(look_of(kind)) for kind in Kind],
    }
    text = json.dumps(data, separators=(",", ":"))
    return _make_page(base64.b64encode(zlib.compress(text.encode(), 9)).decode(), initial, unit)


def readable_cost(cost: Cost, unit: str) -> tuple[Cost, str]:
    """Return the costs in a unit in which the largest is at least 1; unchanged without a unit."""
    units = {"s": 1e3, "ms": 1.0, "µs": 1e-3, "ns": 1e-6}
    if unit not in units:
        return cost, unit
    names = [cost_field.name for cost_field in fields(cost) if cost_field.name not in RATIOS]
    largest = max(float(getattr(cost, name) or 0) for name in names) * units[unit]
    best_unit = next((name for name, size in units.items() if largest >= size), "ns")
    factor = units[unit] / units[best_unit]
    times = {name: value * factor for name in names if (value := getattr(cost, name)) is not None}
    between = cost.between and {edge: value * factor for edge, value in cost.between.items()}
    return replace(cost, **times, between=between), best_unit


def _weight_lists(t: Timeline, cost: Cost) -> dict[str, list[float]]:
    """Return the weights of stages and slices, where they are not all equal."""
    weights = {"shares": (cost.shares, t.stages), "parts": (cost.slices, t.slices)}
    return {
        name: [float(x) for x in relative_weights(values, count, name)]
        for name, (values, count) in weights.items()
        if values is not None
    }


def _is_registered(entry: dict[str, Any]) -> bool:
    return any(order.name == entry["order"] for order in ORDERS)


def order_variants(order: Order) -> Iterator[tuple[int, int, str]]:
    """Yield (chunks, slices, name) of the variants in which an order is shown; none of a searched
    one."""
    if order.searched:
        return
    for chunks in order.chunks or CHUNKS:
        for slices in SLICES if order.sliced else (1,):
            yield chunks, slices, _describe_variant(order.name, chunks, slices)


def _describe_variant(name: str, chunks: int, slices: int) -> str:
    """Describe what distinguishes a timeline from others of its order and sizes."""
    order = next((candidate for candidate in ORDERS if candidate.name == name), None)
    fixed = order is not None and order.chunks is not None and len(order.chunks) == 1
    parts = [f"{chunks} stages a rank"] if chunks > 1 and not fixed else []
    parts += [f"{slices} slices"] if slices > 1 else []
    return ", ".join(parts)


def _make_entries(cost: Cost, also: tuple[int, int] | None) -> Iterator[dict[str, Any]]:
    """Yield every order at the offered sizes, and at `also` (ranks, microbatches) if that is
    small."""
    sizes = list(product(RANKS, MICRO))
    if also is not None and also not in sizes and max(also) <= max(MICRO):
        sizes.append(also)
    for order in ORDERS:
        for chunks, slices, name in order_variants(order):
            for ranks, micro in sizes:
                try:
                    timeline = make_order(
                        order.name, ranks, micro, chunks, slices=slices, cost=cost
                    )
                except OrderError:
                    continue
                yield _make_entry(order.name, micro, name, timeline)


def _make_entry(name: str, micro: int, variant: str, timeline: Timeline) -> dict[str, Any]:
    return {
        "order": name,
        "ranks": timeline.ranks,
        "micro": micro,
        "variant": variant,
        "timeline": pack_timeline(timeline),
    }


def _make_page(data: str, initial: InitialTimeline | None, unit: str) -> str:
    title = f"{initial.order}: timeline" if initial else "timelines"
    script = resources.files("schedlang.viz").joinpath("page.js").read_text()
    selects = "".join(
        f'<label>{text} <select id="{name}"></select></label>'
        for name, text in (
            ("order", "order"),
            ("variant", "form"),
            ("ranks", "ranks"),
            ("micro", "microbatches"),
        )
    )
    of = f" ({unit})" if unit else ""
    costs = "".join(
        f'<label>{text}{of} <input id="{name}" type="number" min="0" step="any"></label>'
        for name, text in (("f", "F"), ("i", "I"), ("w", "W"), ("comm", "transfer"))
    )
    key = "".join(
        f'<span style="background:{look_of(kind).fill}"></span>{look_of(kind).word}'
        for kind in (Kind.F, Kind.B, Kind.I, Kind.W)
    )
    heads = "".join(
        f"<th>{text}</th>"
        for text in ("order", "form", "makespan", "bubble", "without barrier", "live at most")
    )
    body = (
        f'<h1>{escape(title)}</h1><form onsubmit="return false">{selects}{costs}'
        '<label><input id="transfers" type="checkbox"> transfers</label></form>\n'
        '<p id="source"></p><p><b id="told"></b></p><p class="key">'
        f"{key}; later stages of a rank are fainter, a second replica is hatched</p>\n"
        '<div id="frame"><svg xmlns="http://www.w3.org/2000/svg" class="t" id="drawing" '
        'role="img" aria-label="timeline"></svg></div>\n'
        f"<p>F, I and W are the times{of} of one microbatch on one rank's whole share of the model;"
        " a whole backward takes I + W, a stage of several on a rank its part. Activations are in "
        "microbatches of one rank's share.</p>\n"
        '<h2>live activations, at most</h2><table id="peaks"></table>\n'
        f'<h2>all orders at these sizes</h2><div class="wide"><table><thead><tr>{heads}</tr>'
        '</thead><tbody id="others"></tbody></table></div>\n'
        f'<script type="text/plain" id="data">{data}</script>\n<script>{script}</script>\n</html>\n'
    )
    return html_page(title, SHEET + STYLE, body, 1240)


# -- a timeline as a few short strings, which the page's script reads ------------------------------


FIRST = 40  # the character of zero: printable, above quotes and the ampersand
PACKED = {
    "kind": 0,
    "stage": 0,
    "microbatch": 0,
    "replica": 0,
    "slice": 0,
    "version": 0,
    "peer": -1,
}


def pack_timeline(timeline: Timeline) -> dict[str, Any]:
    """Pack the compute rows of a timeline: one character per row and column.

    Columns with only default values are left out. `rows` counts those of each rank, `edges` is left
    out for a chain of stages, `copies` are the kinds that run beside the computation of their rank,
    `peak` is the maximum of each rank, in microbatches of one rank's share. `extra` are the pairs
    (made, used) that do not follow from the stages' edges, without a transfer.
    """
    t = timeline.compute()
    packed: dict[str, Any] = {"rows": np.diff(t.starts).tolist(), "stages": t.stages}
    packed["peak"] = [round(float(x), 6) for x in peak_activations(timeline)]
    for name, usual in PACKED.items():
        column = getattr(t, name)
        if (column != usual).any():
            packed[name] = "".join(map(chr, (column + (FIRST - usual)).tolist()))
    if t.edges != chain_edges(t.stages):
        packed["edges"] = t.edges
    if np.isin(t.kind, COPY_KINDS).any():
        packed["copies"] = COPY_KINDS
    if extra := _extra_pairs(t):
        packed["extra"] = extra
    return packed


def _extra_pairs(t: Timeline) -> list[tuple[int, int]]:
    """Return pairs on one rank that its order does not imply, and those of barriers."""
    src, dst = dependencies(t)
    copies = np.isin(t.kind, COPY_KINDS)
    explicit = (t.rank[src] == t.rank[dst]) & ((src > dst) | copies[src])
    pairs = [(src[explicit], dst[explicit])]
    if (t.kind == Kind.BARRIER).any():
        pairs += barrier_waits(t, copies)
    return [pair for a, b in pairs for pair in zip(a.tolist(), b.tolist())]


# -- a measured step beside its simulated one ------------------------------------------------------


MICROSECONDS = 1e6  # of a second
WIDEST = 1100.0
MEASURED_SHEET = (
    "#frame{overflow:auto}"
    "#frame svg{width:100%;min-width:1010px;height:auto}td,th{padding:1px 14px 1px 0;"
    "text-align:left;font-variant-numeric:tabular-nums}"
)


def measured_svg(measured: MeasuredStep, title: str, who: str = "rank ") -> str:
    """Draw each rank's planned bars, and the measured ones below; `who` names a lane, such as
    `pp=`."""
    layers = {"planned": measured.planned, "measured": measured.times}
    caption = " · ".join((title, *measured.text().split("   ")))
    return draw_timings(layers, title=caption, widest=WIDEST, unit=float("inf"), who=who)


def measured_page(measured: MeasuredStep, title: str, who: str = "rank ") -> str:
    """Return the picture as a self-contained page, with the figures and the means below it."""
    value = measured.to_json()
    names = ("makespan", "makespan_bubble", "rank_span", "bubble")
    labels = ("step of the pipeline", "its bubble", "longest rank", "its bubble")
    rows = "".join(
        f"<tr><td>{label}</td><td>{_format_figure(name, value['measured'][name])}</td>"
        f"<td>{_format_figure(name, value['simulated'][name])}</td></tr>"
        for name, label in zip(names, labels)
    )
    means = "".join(
        f"<tr><td>{mean['kind']}</td><td>{mean['stage']}</td>"
        f"<td>{mean['seconds'] * 1e3:.3f} ms</td></tr>"
        for mean in value["means"]
    )
    body = (
        f"<h1>{escape(title)}</h1>\n"
        f'<div id="frame">{measured_svg(measured, title, who)}</div>\n'
        "<p>Planned: the same timeline, simulated with the mean time of each kind of operation at "
        f"each stage and {value['transfer'] * 1e3:.3f} ms for a transfer, all as measured.</p>\n"
        f"<table><tr><th></th><th>measured</th><th>simulated</th></tr>{rows}</table>\n"
        f"<table><tr><th>kind</th><th>stage</th><th>mean</th></tr>{means}</table>\n</html>\n"
    )
    return html_page(title, MEASURED_SHEET, body, 1340)


def measured_trace(measured: MeasuredStep) -> str:
    """Return both timings as processes of one Perfetto trace; `pipeline` holds the figures."""
    text = format_trace({"planned": measured.planned, "measured": measured.times}, MICROSECONDS)
    return text.rstrip()[:-1] + f', "pipeline": {json.dumps(measured.to_json())}}}\n'


def _format_figure(name: str, value: float) -> str:
    return f"{value:.2%}" if "bubble" in name else f"{value * 1e3:.2f} ms"
