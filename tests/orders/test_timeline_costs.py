"""Times and memory of timelines under a `Cost`: exact, by chunk, slice and edge, two streams."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlang.pipeline.cost import Cost
from schedlang.pipeline.schedules import make_order
from schedlang.pipeline.timeline.memory import peak_activations, peak_live, with_evictions
from schedlang.pipeline.timeline.proof import check_queues, check_timeline, with_transfers
from schedlang.pipeline.timeline.simulation import Simulator, Timing, simulate_timeline
from schedlang.pipeline.timeline.table import Kind, Op, Timeline, TimelineError, timeline_from_rows
from tests.timelines import timelines

F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W  # noqa: E741
HALF = Fraction(1, 2)


def naive_times(t: Timeline, cost: Cost) -> dict[Op, tuple[Fraction, Fraction]]:
    """Start and end of every F, B, I and W, by iterating over all rows until nothing changes."""
    share = Fraction(t.ranks, t.stages * t.slices)
    duration = {F: cost.f, B: cost.i + cost.w, I: cost.i, W: cost.w}
    rows = [list(t.rows(rank)) for rank in range(t.ranks)]
    rank_of = {op: rank for rank, ops in enumerate(rows) for op in ops}
    names = {(op.kind if op.kind is not I else B, *op[1:5]): op for op in rank_of}
    times_by_op: dict[Op, tuple[Fraction, Fraction]] = {}

    def inputs(op: Op) -> list[Op]:
        place, is_backward = op[1:5], op.kind is not F
        keys = [(F, *place)] if op.kind in (B, I) else [(B, *place)] if op.kind is W else []
        for a, b in t.edges if op.kind is not W else ():
            if (a if is_backward else b) == op.stage:
                keys.append((B if is_backward else F, b if is_backward else a, *place[1:]))
        step = 0 if op.kind is W else 1 if is_backward else -1
        keys.append((B if is_backward else F, *place[:3], op.slice + step))
        return [names[w] for w in keys if w in names and names[w] != op]

    changed = True
    while changed:
        changed = False
        for ops in rows:
            free_at = Fraction(0)
            for op in ops:
                predecessors = inputs(op)
                if any(x not in times_by_op for x in predecessors):
                    break
                lags = [
                    cost.comm / t.slices if rank_of[x] != rank_of[op] else 0 for x in predecessors
                ]
                start = max(
                    [free_at, *(times_by_op[x][1] + lag for x, lag in zip(predecessors, lags))]
                )
                free_at = start + duration[op.kind] * share
                changed |= times_by_op.get(op) != (start, free_at)
                times_by_op[op] = (start, free_at)
    return times_by_op


def ends_of(times: Timing) -> list[Fraction]:
    assert times.tick is not None
    return [int(x) * times.tick for x in times.ends.tolist()]


COSTS = st.fractions(0, 5, max_denominator=7)


@given(timelines(), COSTS, COSTS, COSTS, COSTS)
@settings(max_examples=60, deadline=None)
def test_exact(t: Timeline, f: Fraction, i: Fraction, w: Fraction, comm: Fraction) -> None:
    """Fractions stay exact, and times equal a naive simulation."""
    cost = Cost(f, i, w, comm)
    times, expected = simulate_timeline(t, cost), naive_times(t, cost)
    ops = [op for rank in range(t.ranks) for op in t.rows(rank)]
    assert ends_of(times) == [expected[op][1] for op in ops]
    assert times.makespan == max(end for _, end in expected.values())
    spans = []
    for rank in range(t.ranks):
        rank_times = [expected[op] for op in t.rows(rank)]
        spans += [rank_times[-1][1] - rank_times[0][0]] if rank_times else []
        assert times.busy[rank] == sum(end - start for start, end in rank_times)
    assert times.rank_span == max(spans)
    floats = simulate_timeline(t, Cost(float(f), float(i), float(w), float(comm)))
    assert floats.makespan == pytest.approx(float(times.makespan))


@given(timelines(), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_rounds_are_steps(t: Timeline, comm: int) -> None:
    """Simulation by rounds (many ranks) and by rows (few ranks) gives the same result."""
    cost = Cost(2, 3, 1, comm)
    steps = simulate_timeline(t, cost)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("schedlang.pipeline.timeline.simulation.MIN_RANKS_FOR_ROUNDS", 0)
        patch.setattr("schedlang.pipeline.timeline.simulation.MIN_ROWS_PER_ROUND", 0)
        rounds = simulate_timeline(t, cost)
        patch.setattr(Simulator, "_steps", None)  # a call would fail
        assert simulate_timeline(t, cost).makespan == rounds.makespan
    assert np.array_equal(steps.begins, rounds.begins) and np.array_equal(steps.ends, rounds.ends)


def test_slow_rounds_are_given_up() -> None:
    """If few of many ranks can run, the simulation falls back from rounds to steps."""
    count, ranks = 40, 33
    rows = [[Op(k, s, m) for m in range(count) for k in (F, B)] for s in range(ranks)]
    times = simulate_timeline(timeline_from_rows(rows), Cost())
    assert times.makespan == count * ranks * 3


def test_large_numbers() -> None:
    """Fractions that do not fit into 64 bits stay exact."""
    tiny = Fraction(1, 3**50)
    times = simulate_timeline(make_order("1F1B", 2, 1), Cost(1 + tiny, 1, 1, Fraction(1, 2**40)))
    lag = Fraction(1, 2**40)
    assert times.makespan == 2 * (3 + tiny) + 2 * lag


def test_shares() -> None:
    """Stages, slices and edges may have different costs; chunks and slices take their share."""
    t = timeline_from_rows([[Op(F, 0, 0), Op(F, 2, 0)], [Op(F, 1, 0)]])
    cost = Cost(f=3, shares=(1, 2, 3), between={(0, 1): 5}, comm=1)
    assert ends_of(simulate_timeline(t, cost)) == [
        1,
        12,
        8,
    ]  # 3 * 2 ranks / 3 stages, times 1/2, 1, 3/2
    sliced = timeline_from_rows([[Op(F, 0, 0, slice=j) for j in range(3)]])
    assert ends_of(simulate_timeline(sliced, Cost(f=3, slices=(1, 2, 3)))) == [
        HALF,
        Fraction(3, 2),
        3,
    ]
    assert ends_of(simulate_timeline(sliced, Cost(f=3))) == [1, 2, 3]
    with pytest.raises(ValueError, match="2 weights of stages, and there are 3"):
        simulate_timeline(t, Cost(shares=(1, 2)))
    with pytest.raises(ValueError, match="below zero"):
        simulate_timeline(t, Cost(f=-1))


def test_copies_run_beside() -> None:
    """Copies run one after the other beside their rank's operations, and B waits for them."""
    offload, reload = Kind.OFFLOAD, Kind.RELOAD
    rows = [
        [Op(F, 0, 0), Op(offload, 0, 0), Op(F, 0, 1), Op(reload, 0, 0), Op(B, 0, 1), Op(B, 0, 0)]
    ]
    times = simulate_timeline(timeline_from_rows(rows), Cost(2, 1, 0, offload=3, reload=4))
    # copies: 2 to 5, 5 to 9; the rank is free from 2 to 4 for F1, to 5 for B1
    assert ends_of(times) == [2, 5, 4, 9, 5, 10]
    assert times.makespan == 10 and times.busy.tolist() == [6]


def test_barrier_and_step() -> None:
    """A barrier starts when the last rank reaches it; a step takes time on its rank."""
    rows = [
        [Op(F, 0, 0), Op(Kind.BARRIER, 0, 0), Op(Kind.STEP, 0, 0, version=1)],
        [Op(F, 1, 0), Op(F, 1, 1), Op(Kind.BARRIER, 1, 0), Op(Kind.STEP, 1, 0, version=1)],
    ]
    times = simulate_timeline(timeline_from_rows(rows, ()), Cost(2, step=3, barrier=1))
    assert ends_of(times) == [2, 5, 8, 2, 4, 5, 8]
    with pytest.raises(TimelineError, match="rank 1 has 0 barriers and rank 0 has 1: BARRIER"):
        simulate_timeline(timeline_from_rows([rows[0], rows[1][:2]], ()), Cost())


def test_unshard_is_waited_for() -> None:
    """An operation waits for the latest UNSHARD of its stage before it."""
    rows = [[Op(Kind.UNSHARD, 0, 0), Op(F, 0, 0), Op(Kind.UNSHARD, 1, 0), Op(F, 1, 0)]]
    # stages of one rank take half each: 2 to gather, 1 to run
    assert ends_of(simulate_timeline(timeline_from_rows(rows), Cost(2, unshard=4))) == [2, 3, 5, 6]


def test_messages() -> None:
    """Messages are counted at their sender, also those of parked activations."""
    times = simulate_timeline(make_order("1F1B", 3, 4), Cost(comm=HALF))
    assert times.sent.tolist() == [4, 8, 4] and times.messages == 16
    assert times.sending.tolist() == [2, 4, 2]
    park = [Op(F, 0, 0), Op(Kind.EVICT, 0, 0, peer=1), Op(Kind.LOAD, 0, 0, peer=1), Op(B, 0, 0)]
    assert simulate_timeline(timeline_from_rows([park, []])).sent.tolist() == [1, 1]


def test_peak_in_microbatches() -> None:
    """Memory counts in microbatches of a rank's share; I frees what is not kept until W."""
    assert peak_activations(make_order("Interleaved1F1B", 4, 8, 2)).tolist()[0] == Fraction(11, 2)
    late = [Op(F, 0, 0), Op(I, 0, 0), Op(F, 0, 1), Op(W, 0, 0), Op(I, 0, 1), Op(W, 0, 1)]
    t = timeline_from_rows([late])
    assert peak_activations(t).tolist() == [2]
    assert peak_activations(t, Cost(kept=Fraction(1, 3))).tolist() == [Fraction(4, 3)]
    assert peak_activations(t, Cost(kept=0.25)).tolist() == [1.25]
    uneven = timeline_from_rows([[Op(F, 0, 0), Op(B, 0, 0)], [Op(F, 1, 0), Op(B, 1, 0)]])
    assert peak_activations(uneven, Cost(shares=(1, 3))).tolist() == [HALF, Fraction(3, 2)]
    assert peak_activations(uneven, Cost(shares=(1, 3), held=(1, 1))).tolist() == [1, 1]


def test_peak_of_what_lies_elsewhere() -> None:
    """Parked activations count on the partner, offloaded ones nowhere, recomputed ones late."""
    parked = [
        Op(F, 0, 0),
        Op(Kind.EVICT, 0, 0, peer=1),
        Op(F, 0, 1),
        Op(B, 0, 1),
        Op(Kind.LOAD, 0, 0, peer=1),
        Op(B, 0, 0),
    ]
    t = timeline_from_rows([parked, []])
    assert peak_live(t).tolist() == [1, 1] and peak_live(with_transfers(t)).tolist() == [1, 1]
    host = {Kind.EVICT: Kind.OFFLOAD, Kind.LOAD: Kind.RELOAD}
    offloaded = [op._replace(kind=host.get(op.kind, op.kind), peer=-1) for op in parked]
    assert peak_activations(timeline_from_rows([offloaded])).tolist() == [1]
    recomputed = [
        Op(F, 0, 0),
        Op(F, 0, 1),
        Op(Kind.RECOMPUTE, 0, 0),
        Op(B, 0, 0),
        Op(Kind.RECOMPUTE, 0, 1),
        Op(B, 0, 1),
    ]
    assert peak_activations(
        timeline_from_rows([recomputed]), Cost(inputs=Fraction(1, 10))
    ).tolist() == [Fraction(11, 10)]
    assert ends_of(simulate_timeline(timeline_from_rows([recomputed]), Cost(2, 1, 0)))[-1] == 10


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[Op(F, 0, 0), Op(B, 0, 0, replica=1)]], "through replicas 0 and 1"),
        (
            [[Op(F, 0, 0, slice=1), Op(F, 0, 0), Op(B, 0, 0, slice=1), Op(B, 0, 0)]],
            r"slice 1 \(rank 0\) waits for F of stage 0, microbatch 0, slice 0",
        ),
        (
            [[Op(F, 0, 0), Op(F, 0, 0, slice=1), Op(B, 0, 0), Op(B, 0, 0, slice=1)]],
            "slices backward in reverse",
        ),
        ([[Op(F, 0, 0), Op(Kind.EVICT, 0, 0, peer=0), Op(B, 0, 0)]], "has no LOAD"),
        ([[Op(F, 0, 0), Op(Kind.LOAD, 0, 0, peer=0), Op(B, 0, 0)]], "has no EVICT"),
        (
            [
                [
                    Op(F, 0, 0),
                    Op(Kind.LOAD, 0, 0, peer=1),
                    Op(Kind.EVICT, 0, 0, peer=1),
                    Op(B, 0, 0),
                ],
                [],
            ],
            "LOAD of .* waits for EVICT",
        ),
        (
            [
                [
                    Op(F, 0, 0),
                    Op(Kind.EVICT, 0, 0, peer=1),
                    Op(Kind.LOAD, 0, 0, peer=2),
                    Op(B, 0, 0),
                ],
                [],
                [],
            ],
            "names no partner, or another one",
        ),
        ([[Op(Kind.RECOMPUTE, 0, 0), Op(F, 0, 0), Op(B, 0, 0)]], "F before RECOMPUTE"),
        ([[Op(F, 0, 0), Op(Kind.RECOMPUTE, 0, 0)]], "a backward that is not there"),
        ([[Op(F, 0, 0, version=1), Op(B, 0, 0, version=1)]], "stage 0 has a backward"),
        ([[Op(F, 0, 0), Op(B, 0, 0), Op(Kind.STEP, 0, 0, version=2)]], r"\[2\], not 1, 2"),
        (
            [[Op(Kind.UNSHARD, 0, 0), Op(F, 0, 0), Op(Kind.RESHARD, 0, 0), Op(B, 0, 0)]],
            r"B of stage 0, microbatch 0 \(rank 0\) waits for an UNSHARD",
        ),
        ([[Op(F, 0, 0), Op(Kind.REDUCE, 0, 0), Op(B, 0, 0)]], "has no REDUCE after it"),
        ([[Op(F, 0, -1)]], "counted from 0"),
    ],
)
def test_check_refuses(rows: list[list[Op]], message: str) -> None:
    """Invalid timelines are refused with the operation, its rank and what it waits for."""
    with pytest.raises(TimelineError, match=message):
        check_timeline(timeline_from_rows(rows))


def test_messages_in_time() -> None:
    """A send must follow what computes its tensors, a receive precede what uses them."""
    rows = [
        [Op(F, 0, 0), Op(Kind.SEND_F, 0, 0, peer=1)],
        [Op(Kind.RECV_F, 1, 0, peer=0), Op(F, 1, 0)],
    ]
    check_timeline(timeline_from_rows(rows))
    with pytest.raises(TimelineError, match=r"SEND_F .* sends what F of stage 0.* stands later"):
        check_timeline(timeline_from_rows([rows[0][::-1], rows[1]]))
    with pytest.raises(TimelineError, match=r"F of stage 1.* waits for RECV_F .* stands later"):
        check_timeline(timeline_from_rows([rows[0], rows[1][::-1]]))


@pytest.mark.parametrize("lookahead", [0, 1, 3])
@pytest.mark.parametrize(
    "given",
    [
        ("1F1B", 4, 8),
        ("GPipe", 4, 8),
        ("Interleaved1F1B", 4, 8, 2),
        ("ZB-H1", 4, 8),
        ("DualPipe", 4, 8),
        ("Hanayo", 4, 8, 2),
    ],
)
def test_messages_block_nobody(given: tuple[Any, ...], lookahead: int) -> None:
    """With one queue for each direction every order completes, with any early receives."""
    check_queues(with_transfers(make_order(*given), lookahead))


def test_one_queue_for_both_directions() -> None:
    """With one queue for both directions an early receive blocks a send: refused."""
    early = with_transfers(make_order("1F1B", 2, 4), 1)
    check_timeline(early)
    check_queues(early)
    with pytest.raises(TimelineError, match="on rank 1 RECV_F of stage 1.* stands before"):
        check_queues(early, one_way=False)


def test_parked_messages_have_queues_of_their_own() -> None:
    """Messages of parked activations do not block those of stages."""
    parked = with_evictions(make_order("1F1B", 4, 8), {0: 1})
    check_queues(with_transfers(parked))
