"""Versions of weights: tables of the orders with stale weights, and their check."""

from __future__ import annotations

from typing import Any

import pytest

from schedlang.pipeline.schedules import OrderError, make_order
from schedlang.pipeline.timeline.table import Kind, Op, Timeline, TimelineError, timeline_from_rows
from schedlang.pipeline.timeline.versions import check_versions, update_versions, weight_copies

SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 4, 7, 8, 16)]
STALE = ("PipeDream", "PipeDream-2BW", "PipeMare", "Pipelined-Backprop")


def versions_read(t: Timeline, kind: Kind) -> dict[tuple[int, int], int]:
    """The version that a kind of operation reads: (stage, microbatch) -> version."""
    rows = (op for rank in range(t.ranks) for op in t.rows(rank))
    return {(op.stage, op.microbatch): op.version for op in rows if op.kind is kind}


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_pipedream_is_as_old_as_stages_follow(p: int, m: int) -> None:
    """Stage r reads weights that are p - 1 - r updates old, in F and B, and keeps up to p - r."""
    t = make_order("pipedream", p, m)
    expected = {(r, i): max(0, i - (p - 1 - r)) for r in range(p) for i in range(m)}
    assert versions_read(t, Kind.F) == versions_read(t, Kind.B) == expected
    assert update_versions(t).tolist() == list(range(1, m + 1))
    copies = weight_copies(t).tolist()
    assert all(copies[r] <= p - r for r in range(p))
    assert m < 2 * p or copies == [p - r for r in range(p)]  # short steps end before that


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_double_buffers_hold_two_versions(p: int, m: int) -> None:
    """2BW keeps two versions at any depth: update t reads the weights before update t - 1."""
    t = make_order("2BW", p, m)
    update_of = update_versions(t)
    expected = {(r, i): max(0, int(update_of[i]) - 2) for r in range(p) for i in range(m)}
    assert versions_read(t, Kind.F) == versions_read(t, Kind.B) == expected
    assert weight_copies(t).tolist() == [2 if update_of.max() > 1 else 1] * p
    assert (update_of == 1).sum() >= min(p, m)


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize(("name", "every"), [("PB", None), ("PipeMare", 1), ("PipeMare", None)])
def test_nothing_is_kept(name: str, every: int | None, p: int, m: int) -> None:
    """One copy of the weights: F reads them 2 (p-1-r) microbatches late, B the newest."""
    t = make_order(name, p, m, every=every)
    group = int((update_versions(t) == 1).sum())
    assert every is None or group == every
    forward_versions = {
        (r, i): max(0, i - 2 * (p - 1 - r)) // group for r in range(p) for i in range(m)
    }
    assert versions_read(t, Kind.F) == forward_versions
    assert versions_read(t, Kind.B) == {(r, i): i // group for r in range(p) for i in range(m)}
    assert weight_copies(t).tolist() == [1] * p


@pytest.mark.parametrize("name", STALE)
def test_one_update_is_the_synchronous_order(name: str) -> None:
    """With all microbatches in one update every version is 0 and one copy is enough."""
    t = make_order(name, 4, 8, every=8)
    kinds = {kind: set(versions_read(t, kind).values()) for kind in (Kind.F, Kind.B)}
    assert kinds == {Kind.F: {0}, Kind.B: {0}}
    assert weight_copies(t).tolist() == [1] * 4 and update_versions(t).tolist() == [1] * 8


def test_synchronous_orders_have_no_versions() -> None:
    """Synchronous orders pass the check, with one update and one copy."""
    t = make_order("1F1B", 4, 8)
    check_versions(t)
    assert not t.stale
    assert weight_copies(t).tolist() == [1] * 4 and update_versions(t).tolist() == [1] * 8


@pytest.mark.parametrize(
    ("name", "micro", "every", "said"),
    [
        ("1F1B", 8, 2, "1F1B makes one update a step; leave `every` out, or one of PipeDream"),
        ("PipeDream", 8, 3, "8 microbatches are no whole number of updates of 3; every= 1, 2, 4"),
        ("PipeDream", 8, 0, "no whole number of updates of 0"),
        ("2BW", 8, 2, "an update of 2 microbatches is too small for 4 stages"),
    ],
)
def test_updates_that_do_not_fit(name: str, micro: int, every: int, said: str) -> None:
    """An illegal `every` is refused with legal values."""
    with pytest.raises(OrderError) as error:
        make_order(name, 4, micro, every=every)
    assert said in str(error.value)


def F(m: int, v: int) -> Op:
    return Op(Kind.F, 0, m, version=v)


def B(m: int, v: int) -> Op:
    return Op(Kind.B, 0, m, version=v)


def U(v: int) -> Op:
    return Op(Kind.STEP, 0, 0, version=v)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([F(0, 0), B(0, 0), U(2)], "makes the versions [2], not 1, 2"),
        ([F(0, 0), B(0, 0), U(1), U(2)], "an update without a backward"),
        ([F(0, 0), F(1, 0), B(0, 0), U(1), B(1, 0)], "a backward that no update follows"),
        ([F(0, 1), B(0, 1), U(1)], "reads version 1 for microbatch 0, when version 0 is"),
        ([F(0, -1), B(0, -1), U(1)], "reads version -1"),
        ([F(0, -1), B(0, -1)], "a backward that no update follows"),
        (
            [F(0, 0), F(1, 0), B(0, 0), U(1), F(2, 0), B(1, 1), U(2), B(2, 2), U(3)],
            "reads version 1 in a backward of microbatch 1 and another one in its forward",
        ),
    ],
)
def test_wrong_versions_are_refused(rows: Any, said: str) -> None:
    """Impossible versions, or gradients without an update, are refused with their stage."""
    with pytest.raises(TimelineError) as error:
        check_versions(timeline_from_rows([rows]))
    assert "stage 0" in str(error.value) and said in str(error.value)


def test_stages_agree_on_updates() -> None:
    """A microbatch belongs to the same update on all stages."""
    first_stage = [F(0, 0), F(1, 0), B(0, 0), U(1), B(1, 0), U(2)]
    second_stage = [F(0, 0), F(1, 0), B(0, 0), B(1, 0), U(1)]
    rows = [first_stage, [op._replace(stage=1) for op in second_stage]]
    with pytest.raises(TimelineError, match="microbatch 1 goes into update 2 of stage 0 and"):
        check_versions(timeline_from_rows(rows))
