"""Traces, bars and pictures of timelines: every operation, on its rank, at its time."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from typer.testing import CliRunner

from schedlang.cli import app
from schedlang.pipeline.cost import Cost
from schedlang.pipeline.schedules import ORDERS, checked_size, make_order
from schedlang.pipeline.timeline.simulation import Timing, simulate_timeline
from schedlang.pipeline.timeline.table import Kind, Op, dependencies, timeline_from_rows
from schedlang.viz.timeline_page import UNIT, format_trace
from schedlang.viz.timeline_pictures import IDLE, MOST_BLOCKS, MOST_RANKS, draw_bars, draw_timings

F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W  # noqa: E741


def all_timings() -> list[Timing]:
    """A timing of each order at small sizes."""
    timings = []
    for order in ORDERS:
        size = checked_size(order, 4, 8, slices=2 if order.sliced else 1)
        timings.append(simulate_timeline(order.make(size), Cost(3, 4, 2, 1)))
    return timings


def trace_events(text: str, *phases: str) -> list[dict[str, Any]]:
    """The events of some phases in a trace."""
    return [e for e in json.loads(text)["traceEvents"] if e["ph"] in phases]


def test_a_trace_has_every_operation_and_every_transfer() -> None:
    """Operations are on their ranks at their times without overlaps; arrows join producers and
    consumers."""
    for times in all_timings():
        t, text = times.timeline, format_trace(times)
        operations = sorted(
            (e["tid"] // 2, e["name"][: len(e["name"].rstrip("0123456789."))], round(e["ts"], 3))
            for e in trace_events(text, "X", "i")
        )
        assert operations == sorted(
            (int(r), Kind(int(k)).name, round(s * UNIT, 3))
            for r, k, s in zip(t.rank, t.kind, times.start)
        )
        ends: dict[int, float] = {}
        for e in sorted(trace_events(text, "X"), key=lambda e: e["ts"]):
            assert e["ts"] >= ends.get(e["tid"], 0.0) - 1e-3
            ends[e["tid"]] = e["ts"] + e["dur"]
        producers, consumers = dependencies(t)
        across_ranks = t.rank[producers] != t.rank[consumers]
        pairs = [sorted(trace_events(text, ph), key=lambda e: e["id"]) for ph in "sf"]
        assert len(pairs[0]) == len(pairs[1]) == int(across_ranks.sum())
        for start, end in zip(*pairs):
            assert start["id"] == end["id"] and start["ts"] < end["ts"]
            assert start["tid"] != end["tid"]


def test_two_timings_are_two_processes() -> None:
    """Planned and measured timings are two processes with their own names and ids."""
    times = simulate_timeline(make_order("1F1B", 2, 2))
    text = format_trace({"planned": times, "measured": times})
    names = {
        e["pid"]: e["args"]["name"] for e in trace_events(text, "M") if e["name"] == "process_name"
    }
    assert names == {0: "planned", 1: "measured"}
    assert {e["pid"] for e in trace_events(text, "X")} == {0, 1}
    ids = [e["id"] for e in trace_events(text, "s")]
    assert len(set(ids)) == len(ids)


def bar_letters(line: str) -> str:
    """The letter of each cell of a bar."""
    cells, last = "", ""
    for cell in line.split(" ", 2)[2].strip():
        last = cell if cell.isalpha() or cell == IDLE else last
        cells += last
    return cells


def test_bars_are_to_scale() -> None:
    """Each cell shows what its rank does at that time; lines have the requested width."""
    for times in all_timings():
        text = draw_bars(times, 120)
        t, lines = times.timeline, text.split("\n")
        assert len(lines) == t.ranks + 1 and all(len(line) <= 120 for line in lines[:-1])
        for rank in range(t.ranks):
            observed = bar_letters(lines[rank])
            scale = times.makespan / len(observed)
            rows = range(int(t.starts[rank]), int(t.starts[rank + 1]))
            for cell, letter in enumerate(observed):
                time = (cell + 0.5) * scale
                running = [k for k in rows if times.start[k] <= time < times.end[k]]
                assert letter == (Kind(int(t.kind[running[0]])).name[0] if running else IDLE)


def test_colour_changes_nothing_but_colour() -> None:
    """Without escapes a coloured bar equals a plain one."""
    times = simulate_timeline(make_order("1F1B", 3, 4))
    plain, coloured = draw_bars(times, 60), draw_bars(times, 60, colour=True)
    assert "\x1b" not in plain and "\x1b" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain.replace("-", " ")


def test_large_timelines_stay_small_and_whole() -> None:
    """64 ranks x 512: lines for the first and last ranks only, one path for all blocks of a
    kind."""
    times = simulate_timeline(make_order("1F1B", 64, 512))
    lines = draw_bars(times, 100).split("\n")
    assert len(lines) == MOST_RANKS + 2 and f"{64 - MOST_RANKS} ranks more" in "\n".join(lines)
    root = ElementTree.fromstring(draw_timings({"": times}))
    paths = [e.get("d") or "" for e in root.iter("{http://www.w3.org/2000/svg}path")]
    assert sum(path.count("M") for path in paths) == len(times.timeline) > MOST_BLOCKS


def picture_elements(times: Timing, **options: Any) -> list[ElementTree.Element]:
    """The elements of a timing's picture."""
    return list(ElementTree.fromstring(draw_timings({"": times}, **options)).iter())


def test_what_takes_no_time_is_marked() -> None:
    """Evictions, loads and updates each have a mark of their own shape."""
    rows = [
        [
            Op(F, 0, 0),
            Op(Kind.EVICT, 0, 0, peer=1),
            Op(Kind.LOAD, 0, 0, peer=1),
            Op(B, 0, 0),
            Op(Kind.STEP, 0, 0, version=1),
        ],
        [Op(F, 1, 0), Op(B, 1, 0)],
    ]
    times = simulate_timeline(timeline_from_rows(rows))
    marks = [e for e in picture_elements(times) if e.get("class") == "k"]
    assert len(marks) == 3 and len({str(e.get("d"))[-12:] for e in marks}) == 3
    assert "version 1" in "".join(marks[-1].itertext())


def test_replicas_and_slices_are_told_apart() -> None:
    """A second replica is hatched; a slice is in the block's label."""
    rows = [[Op(F, 0, 0, 0, 0), Op(F, 0, 0, 0, 1), Op(F, 0, 1, 1, 0), Op(F, 0, 1, 1, 1)]]
    elements = picture_elements(simulate_timeline(timeline_from_rows(rows)), unit=40.0)
    assert sum(e.get("fill") == "url(#replica)" for e in elements) == 2 + 1  # the legend's
    labels = ["".join(e.itertext()) for e in elements if e.get("class") == "op"]
    assert labels == ["0.0", "0.1", "1.0", "1.1"]


def test_transfers_are_drawn_where_asked() -> None:
    """With `transfers=True` each transfer between ranks is a line, gradients in their own style."""
    times = simulate_timeline(make_order("GPipe", 3, 4), Cost(comm=1))
    assert not any(str(e.get("class")).startswith("way") for e in picture_elements(times))
    lines = {e.get("class"): e.get("d") for e in picture_elements(times, transfers=True)}
    assert str(lines["way"]).count("M") == str(lines["way back"]).count("M") == 2 * 4


def test_a_packed_trace(tmp_path: Path) -> None:
    """A trace whose name ends in .gz is compressed, with the same content."""
    for name in ("t.json", "t.json.gz"):
        result = CliRunner().invoke(app, ["simulate", "--trace", str(tmp_path / name)])
        assert result.exit_code == 0, result.output
    packed = gzip.decompress((tmp_path / "t.json.gz").read_bytes())
    assert packed == (tmp_path / "t.json").read_bytes()
