"""Timelines: columns, checks, times, transfers and pictures."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlang.pipeline.schedules import ORDERS, make_order
from schedlang.pipeline.timeline.memory import peak_live
from schedlang.pipeline.timeline.proof import check_timeline, with_transfers
from schedlang.pipeline.timeline.simulation import simulate_timeline
from schedlang.pipeline.timeline.table import (
    Kind,
    Op,
    Timeline,
    TimelineError,
    chain_edges,
    timeline_from_rows,
)
from schedlang.viz.timeline_pictures import draw_timeline

F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W  # noqa: E741


def rows_of(t: Timeline) -> list[list[Op]]:
    return [list(t.rows(rank)) for rank in range(t.ranks)]


def test_rows_round_trip() -> None:
    """Rows to columns and back are the identity, and equal rows make equal timelines."""
    rows = [[Op(F, 0, 0), Op(I, 0, 0, slice=2), Op(W, 0, 0)], [Op(F, 1, 0, version=3)]]
    timeline = timeline_from_rows(rows)
    assert rows_of(timeline) == rows
    assert timeline == timeline_from_rows(rows) and hash(timeline) == hash(timeline_from_rows(rows))
    assert timeline != timeline_from_rows([rows[0], [Op(F, 1, 0)]])
    assert timeline.edges == chain_edges(2) == ((0, 1),)


def test_columns_cannot_be_written() -> None:
    """A timeline is a value: its columns are read-only, also where the caller keeps the arrays."""
    microbatches = np.zeros(1, np.int32)
    t = replace(timeline_from_rows([[Op(F, 0, 0)]]), microbatch=microbatches)
    microbatches[0] = 5
    assert t.microbatch[0] == 0
    with pytest.raises(ValueError, match="read-only"):
        t.kind[0] = 1


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[Op(F, 0, 0), Op(F, 0, 0), Op(B, 0, 0)]], "is there twice"),
        ([[Op(B, 0, 0), Op(F, 0, 0)]], "F before B"),
        ([[Op(F, 0, 0), Op(F, 0, 1), Op(B, 0, 0)]], "microbatch 1 has a forward without"),
        ([[Op(F, 0, 0), Op(I, 0, 0)]], "without a weight gradient"),
        ([[Op(F, 0, 0), Op(B, 0, 0), Op(W, 0, 0)]], "without a weight gradient, or reverse"),
        ([[Op(F, 0, 0), Op(W, 0, 0), Op(I, 0, 0)]], "I before W"),
        ([[Op(F, 0, 0), Op(B, 0, 0), Op(I, 0, 0), Op(W, 0, 0)]], "is there twice"),
        ([[Op(F, 0, 0), Op(F, 0, 1)], [Op(F, 1, 0)]], "stage 1, microbatch 1 has no forward"),
        ([[Op(F, 0, 0)], [Op(B, 0, 0)]], "on the same rank"),
        ([[Op(F, 1, 0)], [Op(F, 0, 0), Op(B, 1, 0), Op(B, 0, 0)]], "a forward|on the same rank"),
    ],
)
def test_check_refuses(rows: list[list[Op]], message: str) -> None:
    """Missing, duplicate and misplaced operations are refused by name."""
    with pytest.raises(TimelineError, match=message):
        check_timeline(timeline_from_rows(rows))


def test_check_finds_deadlock() -> None:
    """A deadlock of two ranks is found, with what they wait for."""
    rows = [
        [Op(F, 0, 0), Op(B, 0, 0), Op(F, 0, 1), Op(B, 0, 1)],
        [Op(F, 1, 0), Op(F, 1, 1), Op(B, 1, 0), Op(B, 1, 1)],
    ]
    with pytest.raises(TimelineError, match="B of stage 0, microbatch 0.*waits for B of stage 1"):
        check_timeline(timeline_from_rows(rows))


def test_transfers_match_in_order() -> None:
    """Added transfers are accepted; swapped or missing receives are refused."""
    valid = with_transfers(make_order("1f1b", 3, 4))
    check_timeline(valid)
    rows = rows_of(valid)
    receives = [k for k, op in enumerate(rows[1]) if op.kind is Kind.RECV_F]
    a, b = receives[:2]
    rows[1][a], rows[1][b] = rows[1][b], rows[1][a]
    with pytest.raises(TimelineError, match="do not match"):
        check_timeline(timeline_from_rows(rows, valid.edges))
    del rows[1][a]
    with pytest.raises(TimelineError, match="do not match"):
        check_timeline(timeline_from_rows(rows, valid.edges))


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Strategy: any timeline that can run, over any graph, in a random order."""
    ranks, stages, micro = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    extra = draw(st.sets(st.tuples(st.integers(0, stages - 1), st.integers(0, stages - 1))))
    edges = {*chain_edges(stages), *((s, t) for s, t in extra if s < t)}
    rank_of_stage = [draw(st.integers(0, ranks - 1)) for _ in range(stages)]
    rows: list[list[Op]] = [[] for _ in range(ranks)]
    ready = {(F, s, m) for s in range(stages) for m in range(micro) if s == 0}
    finished: set[tuple[Kind, int, int]] = set()
    while ready:
        kind, s, m = draw(st.sampled_from(sorted(ready)))
        ready.discard((kind, s, m))
        finished.add((kind, s, m))
        rows[rank_of_stage[s]].append(Op(kind, s, m))
        for t in range(stages):
            if all((F, x, m) in finished for x, y in edges if y == t):
                ready |= {(F, t, m)} - finished
            if (F, t, m) in finished and all((B, y, m) in finished for x, y in edges if x == t):
                ready |= {(B, t, m)} - finished
    return timeline_from_rows(rows, edges)


@given(timelines(), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_any_possible_order(t: Timeline, lookahead: int) -> None:
    """Any possible order passes; receives are in sending order and before their use."""
    full = with_transfers(t, lookahead)
    check_timeline(full)
    assert full.compute() == t
    for rank in range(full.ranks):
        passed: set[tuple[Kind, int, int, int]] = set()
        for op in full.rows(rank):
            sources = [x for x, y in t.edges if y == op.stage and t.stage_rank[x] != rank]
            if op.kind is F:
                assert all((Kind.RECV_F, op.stage, op.microbatch, x) in passed for x in sources)
            if op.kind is Kind.SEND_F:
                assert (F, op.stage, op.microbatch, -1) in passed
            passed.add((op.kind, op.stage, op.microbatch, op.peer))


@given(timelines())
@settings(max_examples=60, deadline=None)
def test_times(t: Timeline) -> None:
    """No two operations of a rank overlap, all work is done, and transfers only add time."""
    times = simulate_timeline(t)
    for rank in range(t.ranks):
        part = slice(int(t.starts[rank]), int(t.starts[rank + 1]))
        assert (times.start[part][1:] >= times.end[part][:-1]).all()
    assert times.busy.sum() == 3 * (t.kind == F).sum()
    assert times.rank_span <= times.makespan <= simulate_timeline(t, transfer=0.5).makespan
    assert 0.0 <= times.bubble < 1.0


def test_costs_per_operation() -> None:
    """Costs may be given for each operation, and a transfer costs only between ranks."""
    t = timeline_from_rows([[Op(F, 0, 0), Op(F, 1, 0)], [Op(F, 2, 0)]])
    times = simulate_timeline(t, np.array([1.0, 2.0, 4.0]), transfer=0.5)
    assert times.start.tolist() == [0.0, 1.0, 3.5] and times.makespan == 7.5
    assert times.rank_span == 4.0


def test_peak_live() -> None:
    """An activation lives from its forward to its weight gradient, not to its input gradient."""
    late = [Op(F, 0, 0), Op(I, 0, 0), Op(F, 0, 1), Op(W, 0, 0), Op(I, 0, 1), Op(W, 0, 1)]
    unsplit = [Op(F, 1, 0), Op(B, 1, 0), Op(F, 1, 1), Op(B, 1, 1)]
    assert peak_live(timeline_from_rows([late, unsplit])).tolist() == [2, 1]


def test_text() -> None:
    """One line per rank; the stage is named where a rank has several; long lines are shortened."""
    assert make_order("1f1b", 2, 2).text() == "rank 0: F0 F1 B0 B1\nrank 1: F0 B0 F1 B1"
    assert make_order("interleaved1f1b", 2, 2, 2).text().startswith("rank 0: 0F0 0F1 2F0 2F1 2B0 ")
    shortened = make_order("gpipe", 1, 50).text(40)
    assert (
        shortened.startswith("rank 0: F0 F1 ")
        and " .. " in shortened
        and shortened.endswith(" B48 B49")
    )
    assert len(shortened) <= len("rank 0: ") + 40


@pytest.mark.parametrize("known", ORDERS, ids=lambda o: o.name)
def test_svg(known: object) -> None:
    """The picture is well-formed, self-contained, and has one block for each operation."""
    t = make_order(known.name, 2, 4)  # type: ignore[attr-defined]
    t = t.pick(np.isin(t.kind, (F, B, I, W)))
    root = ET.fromstring(draw_timeline(t, title="a < b & c"))
    blocks = [e for e in root.iter() if e.get("class") == "b"]
    assert len(blocks) == len(t)
    text = draw_timeline(t)
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "") and "dark" in text
    assert all(f">{m}<" in text for m in range(4))
