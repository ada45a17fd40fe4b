"""Tables of orders: read and written as by torch, and refused if they are invalid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from schedlang.pipeline.schedules import ORDERS, OrderError, make_order, read_table, write_table
from schedlang.pipeline.timeline.table import Kind, Op, Timeline, timeline_from_rows


def _torch_runtime(t: Timeline) -> Any:
    """torch's runtime without stages, enough to read and write tables."""
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    runtime = object.__new__(_PipelineScheduleRuntime)
    runtime._stages, runtime._num_stages, runtime._n_microbatches = [], t.stages, t.microbatches
    runtime.pp_group_size, runtime._defer_pp_recv, runtime.pipeline_order = t.ranks, False, {}
    return runtime


@pytest.mark.parametrize(
    ("name", "chunks"), [("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2), ("Hanayo", 4)]
)
def test_torch_reads_and_writes_our_tables(name: str, chunks: int, tmp_path: Path) -> None:
    """torch loads our tables; tables that torch writes, with or without messages, are the order."""
    t = make_order(name, 4, 8, chunks)
    schedlang_file, torch_file = tmp_path / "ours.csv", tmp_path / "theirs.csv"
    schedlang_file.write_text(write_table(t))
    runtime = _torch_runtime(t)
    runtime._load_csv(str(schedlang_file))
    for dump_format in ("compute_only", "compute_comms"):
        runtime._dump_csv(str(torch_file), format=dump_format)
        text = torch_file.read_bytes().decode()
        assert read_table(text) == t and read_table(text, 4, 8) == t
        assert ("SEND_F" in text) == (dump_format == "compute_comms")


@pytest.mark.parametrize("name", ["ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"])
def test_torch_tables_with_split_backwards(name: str, tmp_path: Path) -> None:
    """Tables of torch's own zero-bubble orders, idle cells included, are read operation by
    operation."""
    from torch.distributed.pipelining import schedules

    schedule = object.__new__(getattr(schedules, name))
    schedule.pp_group_size, schedule._n_microbatches, schedule._num_stages = 4, 8, 8
    schedule.n_local_stages, schedule.num_stages = 2, 8
    schedule.number_of_rounds, schedule.microbatches_per_round = 2, 4
    schedule.pipeline_order = {r: schedule._calculate_single_rank_operations(r) for r in range(4)}
    if hasattr(schedule, "_add_bubbles_to_actions"):
        schedule.pipeline_order = schedule._add_bubbles_to_actions(4)
    schedule._dump_csv = schedules.PipelineScheduleMulti._dump_csv.__get__(schedule)
    path = tmp_path / "torch.csv"
    schedule._dump_csv(str(path))
    t = read_table(path.read_text())
    for rank, actions in schedule.pipeline_order.items():
        expected = [str(action) for action in actions if action is not None]
        assert [f"{o.stage}{o.kind.name}{o.microbatch}" for o in t.rows(rank)] == expected
    assert (t.kind == Kind.W).sum() > 0


def test_overlapped_cells() -> None:
    """Cells that torch overlaps run one after the other, as torch's DualPipeV writes them."""
    from torch.distributed.pipelining.schedules import _Action

    pair = (_Action.from_str("0F1"), _Action.from_str("1B0"))
    cell = str(_Action.from_str(f"({pair[0]};{pair[1]})OVERLAP_F_B"))
    t = read_table(f"0F0,1F0,{cell},1F1,0B0,,1B1,0B1\n")
    assert t.text() == "rank 0: 0F0 1F0 0F1 1B0 1F1 0B0 1B1 0B1"


@pytest.mark.parametrize("known", [o for o in ORDERS if o.chunks is not None], ids=lambda o: o.name)
def test_every_order_survives_its_table(known: Any) -> None:
    """Replicas, slices, versions, recomputed and parked operations are read as written."""
    for ranks, micro in ((4, 8), (8, 16)):
        t = make_order(known.name, ranks, micro, slices=3 if known.sliced else 1)
        if not known.relaxed:
            assert read_table(write_table(t)) == t


def test_versions_survive() -> None:
    """A table keeps versions, and the steps that make them."""
    rows = [Op(Kind.F, 0, 0), Op(Kind.B, 0, 0), Op(Kind.STEP, 0, 0, version=1)]
    t = timeline_from_rows([[*rows, Op(Kind.F, 0, 1, version=1), Op(Kind.B, 0, 1, version=1)]])
    assert write_table(t) == "0F0,0B0,0STEP0v1,0F1v1,0B1v1\n"
    assert read_table(write_table(t)) == t


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no operation"),
        ("0F0,0B0,0F0", r"line 1, column 9: `0F0` does again .* line 1, column 1"),
        ("0F0,0I0,0B0,0W0", r"line 1, column 9: `0B0` does again what `0I0`"),
        ("0F0\n1F0,1B0", "line 1: `0B0` is missing"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0", "line 2: `1F1` is missing"),
        ("0F0,0B0\n2F0,2B0", "`1F0` is missing"),
        ("0F0,0I0", "line 1: `0W0` is missing"),
        ("0F0,0B0,0W0", "line 1, column 9: `0W0` has no input gradient"),
        ("0F0,0B0\n 0F1,0B1", r"line 2, column 2: stage 0 is on rank 1, and at line 1, column 1"),
        ("0F0, 0Q0 ,0B0", "line 1, column 6: `0Q0` is no operation"),
        ("0F0,F1,0B0", "line 1, column 5: `F1`"),
        ("0F0x,0B0", "line 1, column 1: `0F0x`"),
        ("0F,0B0", "line 1, column 1: `0F` does not say"),
        ("0EVICT0,0F0,0B0", "name a partner"),
        ("0F0~1,0B0", "name a partner"),
        ("0B0,0F0", "never ends"),
        ("0F0,0B0\n1B0,1F0", "never ends"),
        ("0F0,0B0r1", "line 1, column 5: `0B0r1` is of another replica"),
        ("0F0s1,0B0s1,0F0,0B0", "never ends"),
    ],
)
def test_broken_tables(text: str, message: str) -> None:
    """Invalid tables are refused with line and column, or with what is missing."""
    with pytest.raises(OrderError, match=message):
        read_table(text)


def test_wrong_sizes() -> None:
    """A table for other sizes is refused with its own sizes; trailing blank lines are legal."""
    text = write_table(make_order("1F1B", 2, 4))
    assert read_table(text + "\n \n", 2, 4) == make_order("1F1B", 2, 4)
    with pytest.raises(OrderError, match="ranks=2"):
        read_table(text, 4, 4)
    with pytest.raises(OrderError, match="micro=4"):
        read_table(text, 2, 8)


def test_a_file_is_an_order(tmp_path: Path) -> None:
    """The path of a table stands for its order; other sizes are refused with those it has."""
    path = tmp_path / "mine.CSV"
    path.write_text(write_table(make_order("Interleaved1F1B", 2, 4)))
    assert make_order(str(path), 2, 4) == make_order("Interleaved1F1B", 2, 4)
    with pytest.raises(OrderError, match="2 ranks with micro=4"):
        make_order(str(path), 2, 8)
    with pytest.raises(OrderError, match="No such file"):
        make_order(str(tmp_path / "other.csv"), 2, 4)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OrderError, match="it is not text"):
        make_order(str(path), 2, 4)
