"""Pipeline orders: equal to torch's operation by operation, and to their closed forms."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from schedlang.pipeline.cost import Cost
from schedlang.pipeline.schedules import (
    ORDERS,
    Order,
    OrderError,
    checked_size,
    find_order,
    make_order,
)
from schedlang.pipeline.timeline.memory import peak_activations, peak_live
from schedlang.pipeline.timeline.proof import check_timeline, with_transfers
from schedlang.pipeline.timeline.simulation import simulate_timeline
from schedlang.pipeline.timeline.table import UNIT_TIMES, Kind

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "torch_orders.json").read_text())


@pytest.mark.parametrize("row", GOLDEN, ids=lambda r: f"{r['schedule']}-{r['p']}-{r['m']}")
def test_golden(row: dict[str, Any]) -> None:
    """Spans, bubbles and live activations are those of torch's schedules at unit cost."""
    t = make_order(row["schedule"], row["p"], row["m"], row["v"])
    times = simulate_timeline(t, {kind: cost / row["v"] for kind, cost in UNIT_TIMES.items()})
    assert times.rank_span == row["span_max_rank"] and times.makespan == row["makespan"]
    assert round(times.span_bubble, 4) == row["bubble_rank"]
    assert round(times.bubble, 4) == row["bubble_makespan"]
    assert (peak_live(t) / row["v"]).tolist() == row["peak_MB_per_rank"]


COSTS = [(1, 1, 1), (3, 4, 2), (5, 2, 1), (2, 3, 4), (7, 1, 5), (2, 5, 3)]


@pytest.mark.parametrize("known", [o for o in ORDERS if o.name != "Search"], ids=lambda o: o.name)
def test_closed_forms(known: Order) -> None:
    """Every legal size can run with transfers; bubble and peak equal the closed forms exactly."""
    checked = stated = 0
    for ranks, micro, chunks in itertools.product((1, 2, 3, 4, 7), (1, 2, 3, 4, 9, 16), (1, 2, 3)):
        try:
            size = checked_size(known, ranks, micro, chunks)
        except OrderError:
            continue
        checked += 1
        t = known.make(size)
        check_timeline(with_transfers(t))
        if known.peak:
            assert max(peak_activations(t)) == known.peak(size), size
        for times in COSTS if known.bubble and known.replicas == 1 else ():
            f, i, w = (Fraction(x, 7) for x in times)
            assert known.bubble
            idle = known.bubble(replace(size, cost=Cost(f, i, w)))
            if idle is not None:
                stated += 1
                assert (
                    simulate_timeline(t, Cost(f, i, w)).rank_span - micro * (f + i + w) == idle
                ), size
    assert checked > 2
    assert stated > 5 or not known.bubble or known.replicas > 1


@pytest.mark.parametrize(
    ("name", "chunks", "held"),
    [
        ("GPipe", 1, lambda p, r: 20),
        ("1F1B", 1, lambda p, r: p - r),
        ("Eager1F1B", 1, lambda p, r: 2 * (p - r) - 1),
        ("ZB-H1", 1, lambda p, r: p),
        ("ZB-H2", 1, lambda p, r: 2 * p - 1),
        ("BFS", 3, lambda p, r: 20),
        ("GIS", 2, lambda p, r: p),
        ("Interleaved1F1B", 2, lambda p, r: Fraction(2 * (p - 1 - r) + p + 1, 2)),
    ],
)
@pytest.mark.parametrize("p", [2, 4, 5])
def test_held_by_each_rank(name: str, chunks: int, held: Any, p: int) -> None:
    """The peak of activations on each rank is its closed form."""
    assert peak_activations(make_order(name, p, 20, chunks)).tolist() == [
        held(p, r) for r in range(p)
    ]


def _torch_rows(name: str, ranks: int, micro: int, chunks: int) -> list[list[str]]:
    """The compute operations of torch's schedule, as `2F0`; overlapped ones one after the other."""
    from torch.distributed.pipelining import schedules

    schedule = object.__new__(getattr(schedules, name))
    schedule.pp_group_size, schedule._n_microbatches = ranks, micro
    schedule._num_stages = schedule.num_stages = ranks * chunks
    schedule.n_local_stages, schedule._stages = chunks, [None] * chunks
    schedule.number_of_rounds = max(1, micro // ranks)
    schedule.microbatches_per_round = micro // schedule.number_of_rounds
    if name == "ScheduleGPipe":
        operations = schedule._get_pipeline_order()
    else:
        operations = {r: schedule._calculate_single_rank_operations(r) for r in range(ranks)}
    flat = [
        [part for a in operations[r] if a for part in a.sub_actions or (a,)] for r in range(ranks)
    ]
    return [
        [
            f"{a.stage_index}{a.computation_type.value}{a.microbatch_index}"
            for a in row
            if a.computation_type.value in ("F", "B", "I", "W")
        ]
        for row in flat
    ]


@pytest.mark.parametrize(
    ("name", "theirs", "chunks"),
    [
        ("ScheduleGPipe", "ScheduleGPipe", 1),
        # torch's own list for 1F1B is for printing and counts the last rank's microbatches from
        # one; with one stage per rank and weights left out, this schedule is 1F1B
        ("Schedule1F1B", "ScheduleInterleavedZeroBubble", 1),
        ("ZB-H1", "ScheduleInterleavedZeroBubble", 1),
        ("ScheduleInterleaved1F1B", "ScheduleInterleaved1F1B", 2),
        ("ScheduleInterleaved1F1B", "ScheduleInterleaved1F1B", 3),
        ("ScheduleLoopedBFS", "ScheduleLoopedBFS", 2),
        ("ScheduleLoopedBFS", "ScheduleLoopedBFS", 3),
        ("ScheduleInterleavedZeroBubble", "ScheduleInterleavedZeroBubble", 1),
        ("ScheduleInterleavedZeroBubble", "ScheduleInterleavedZeroBubble", 2),
        ("ScheduleInterleavedZeroBubble", "ScheduleInterleavedZeroBubble", 3),
        ("ScheduleZBVZeroBubble", "ScheduleZBVZeroBubble", 2),
        ("ScheduleDualPipeV", "ScheduleDualPipeV", 2),
    ],
)
@pytest.mark.parametrize(
    ("ranks", "micro"), [(1, 2), (2, 4), (4, 8), (4, 10), (3, 5), (4, 2), (3, 9), (5, 12), (8, 16)]
)
def test_as_torch(name: str, theirs: str, chunks: int, ranks: int, micro: int) -> None:
    """torch's class names give torch's orders, operation by operation."""
    if "Interleaved" in theirs and micro % max(1, micro // ranks):
        pytest.skip("torch refuses these sizes")
    if theirs == "ScheduleDualPipeV" and micro < 2 * ranks:
        pytest.skip("torch refuses these sizes")
    t = make_order(name, ranks, micro, chunks)
    schedlang_rows = [
        [f"{op.stage}{op.kind.name}{op.microbatch}" for op in t.rows(rank)] for rank in range(ranks)
    ]
    torch_rows = _torch_rows(theirs, ranks, micro, chunks)
    if name == "Schedule1F1B":
        torch_rows = [
            [text.replace("I", "B") for text in row if "W" not in text] for row in torch_rows
        ]
    assert schedlang_rows == torch_rows


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("1F1B", 2, 4, 2), r'chunks=1, or order="Interleaved1F1B", chunks=2'),
        (("GPipe", 0, 4, 1), "at least 1"),
        (("Interleaved1F1B", 2, 4, 1), 'chunks=2, or order="1F1B"'),
        (("ZB-V", 4, 9, 1), "chunks=2"),
        (("OneFOneB", 2, 4, 1), "orders: GPipe, 1F1B, Eager1F1B"),
    ],
)
def test_refused(args: tuple[str, int, int, int], message: str) -> None:
    """Illegal sizes are refused with legal ones."""
    with pytest.raises(OrderError, match=message):
        make_order(*args)


def test_what_is_proposed_is_legal() -> None:
    """Sizes that refusals propose are accepted, after one proposal for each mistake."""
    refused_orders = set()
    limits = (None, Fraction(1, 2), Fraction(2), Fraction(7, 2))
    sizes = itertools.product(ORDERS, (1, 2, 3, 4, 6), (1, 2, 3, 8), (1, 2, 3, 4), limits)
    for order, *size_args in sizes:
        error = _refusal(order, *size_args)
        if error is None:
            continue
        refused_orders.add(order.name)
        for proposal in _proposed(error, size_args):
            second_error = _refusal(order, *proposal)
            assert second_error is None or second_error.reason != error.reason, (
                error,
                second_error,
            )
            for second_proposal in _proposed(second_error, proposal) if second_error else ():
                assert _refusal(order, *second_proposal) is None, (second_error, second_proposal)
    assert len(refused_orders) > 10


def _refusal(order: Order, ranks: int, micro: int, chunks: int, memory: Any) -> OrderError | None:
    try:
        checked_size(order, int(ranks), int(micro), int(chunks), memory=memory)
    except OrderError as error:
        return error
    return None


def _proposed(error: OrderError, size_args: list[Any]) -> list[list[Any]]:
    """The sizes that a refusal proposes, one list for each number."""
    names = ("ranks", "micro", "chunks", "memory")
    legal_text = re.sub(r"(\d+) ranks", r"ranks=\1", error.legal.split(", or order=")[0])
    proposals = re.findall(r"(ranks|micro|chunks|memory)=([\d.]+)", legal_text)
    assert proposals, error
    if " with " in legal_text:  # all of them together
        return [
            [
                Fraction(dict(proposals)[name]) if name in dict(proposals) else value
                for name, value in zip(names, size_args)
            ]
        ]
    return [
        [Fraction(x) if name == changed else value for name, value in zip(names, size_args)]
        for changed, x in proposals
    ]


def test_names() -> None:
    """No two orders share a name; names of papers are found in upper or lower case."""
    names = [name.lower() for order in ORDERS for name in (order.name, *order.aliases)]
    assert len(set(names)) == len(names)
    for name in ("zbv", "ZB-v", "gis-h", "breadth-first", "interleaved-zb", "DAPPLE-pb", "v-min"):
        assert find_order(name)


def test_a_million_operations() -> None:
    """Orders, times and transfers of a million operations are complete."""
    t = make_order("interleaved1f1b", 64, 1024, 8)
    assert len(t) == 2 * 64 * 8 * 1024
    times = simulate_timeline(t)
    assert times.bubble == pytest.approx(63 / (8 * 1024 + 63))
    full = with_transfers(t)
    sends = (full.kind == Kind.SEND_F) | (full.kind == Kind.SEND_B)
    assert sends.sum() == 2 * 511 * 1024
