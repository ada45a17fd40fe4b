"""The orders: equal to torch's own operation by operation, and to their closed forms."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from schedlang.orders import ORDERS, OrderError, Size, find, order, sized
from schedlang.timeline import UNIT, Kind, check, peak_live, timing, with_transfers

GOLDEN = json.loads((Path(__file__).parent / "data" / "torch_orders.json").read_text())
SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 3, 4, 7, 8, 16)]


@pytest.mark.parametrize("row", GOLDEN, ids=lambda r: f"{r['schedule']}-{r['p']}-{r['m']}")
def test_golden(row: dict[str, Any]) -> None:
    """Spans, bubbles and live activations are those of torch's schedules at unit cost."""
    t = order(row["schedule"], row["p"], row["m"], row["v"])
    times = timing(t, {kind: cost / row["v"] for kind, cost in UNIT.items()})
    assert times.rank_span == row["span_max_rank"] and times.makespan == row["makespan"]
    assert round(times.span_bubble, 4) == row["bubble_rank"]
    assert round(times.bubble, 4) == row["bubble_makespan"]
    assert (peak_live(t) / row["v"]).tolist() == row["peak_MB_per_rank"]


@pytest.mark.parametrize(
    "known", [o for o in ORDERS if o.replicas == 1 and o.bubble and o.peak], ids=lambda o: o.name
)
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_closed_forms(known: Any, chunks: int) -> None:
    """Every legal size ends, with transfers, and has the bubble and the peak of its paper."""
    tried = 0
    for ranks, micro in SIZES:
        try:
            size = sized(known, ranks, micro, chunks)
        except OrderError:
            continue
        tried += 1
        t = known.make(size)
        check(with_transfers(t))
        assert Fraction(int(peak_live(t).max()), chunks) == known.peak(size)
        if micro % ranks == 0 or chunks == 1:  # the closed form is for whole rounds
            idle = timing(t).makespan - 3 * micro * chunks
            assert idle == pytest.approx(float(known.bubble(size)) * chunks)
    assert tried == 0 or tried > 20


def _torch_rows(name: str, ranks: int, micro: int, chunks: int) -> list[list[str]]:
    """The compute operations of torch's schedule, as `2F0`."""
    from torch.distributed.pipelining import schedules

    schedule = object.__new__(getattr(schedules, name))
    schedule.pp_group_size, schedule._n_microbatches = ranks, micro
    schedule._num_stages, schedule.n_local_stages = ranks * chunks, chunks
    schedule.number_of_rounds = max(1, micro // ranks)
    schedule.microbatches_per_round = micro // schedule.number_of_rounds
    if name == "ScheduleInterleavedZeroBubble":
        schedule.num_stages = ranks
    if chunks > 1 or name == "ScheduleInterleavedZeroBubble":
        rows = [schedule._calculate_single_rank_operations(rank) for rank in range(ranks)]
    else:
        made = schedule._get_pipeline_order()
        rows = [made[rank] for rank in range(ranks)]
    names = {"F": "F", "B": "B", "I": "B"}
    return [
        [
            f"{a.stage_index}{names[a.computation_type.value]}{a.microbatch_index}"
            for a in row
            if a and a.computation_type.value in names
        ]
        for row in rows
    ]


@pytest.mark.parametrize(
    ("name", "theirs", "chunks"),
    [
        ("ScheduleGPipe", "ScheduleGPipe", 1),
        # torch's own list for 1F1B is for printing and counts the last rank's microbatches from
        # one; with one stage per rank and weights left out, this schedule is 1F1B
        ("Schedule1F1B", "ScheduleInterleavedZeroBubble", 1),
        ("ScheduleInterleaved1F1B", "ScheduleInterleaved1F1B", 2),
    ],
)
@pytest.mark.parametrize(("ranks", "micro"), [(2, 4), (4, 8), (4, 10), (3, 5), (4, 2)])
def test_as_torch(name: str, theirs: str, chunks: int, ranks: int, micro: int) -> None:
    """torch's class names give torch's order, operation by operation on every rank."""
    size = Size(ranks, micro, chunks)
    if find(name).problem(size) or (name == "Schedule1F1B" and micro < ranks):
        pytest.skip("torch refuses these sizes")
    t = order(name, ranks, micro, chunks)
    ours = [
        [f"{op.stage}{op.kind.name}{op.microbatch}" for op in t.rows(rank)] for rank in range(ranks)
    ]
    assert ours == _torch_rows(theirs, ranks, micro, chunks)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("1F1B", 2, 4, 2), r'chunks=1, or order="Interleaved1F1B", chunks=2'),
        (("GPipe", 0, 4, 1), "at least 1"),
        (("Interleaved1F1B", 2, 4, 1), 'chunks=2, or order="1F1B"'),
        (("Interleaved1F1B", 4, 9, 2), "micro=8 or micro=12"),
        (("OneFOneB", 2, 4, 1), "orders: GPipe, 1F1B, Interleaved1F1B"),
    ],
)
def test_refused(args: tuple[str, int, int, int], message: str) -> None:
    """Sizes that an order does not have are refused with sizes that it has."""
    with pytest.raises(OrderError, match=message):
        order(*args)


def test_what_is_proposed_is_legal() -> None:
    """Every number of microbatches proposed in a refusal is accepted."""
    refused = 0
    for ranks in range(1, 9):
        for micro in range(1, 40):
            try:
                order("interleaved1f1b", ranks, micro, 2)
            except OrderError as error:
                refused += 1
                for word in error.legal.split(" or "):
                    order("interleaved1f1b", ranks, int(word.removeprefix("micro=")), 2)
    assert refused > 50


def test_a_million_operations() -> None:
    """Orders, times and transfers of a million operations fit into columns, none lost."""
    t = order("interleaved1f1b", 64, 1024, 8)
    assert len(t) == 2 * 64 * 8 * 1024
    times = timing(t)
    assert times.bubble == pytest.approx(63 / (8 * 1024 + 63))
    full = with_transfers(t)
    sends = (full.kind == Kind.SEND_F) | (full.kind == Kind.SEND_B)
    assert sends.sum() == 2 * 511 * 1024
