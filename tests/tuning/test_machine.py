"""Machines: collective times against published measurements, general properties, and files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.language.syntax import parse, read
from schedlang.passes.simulate.machine import (
    CLUSTERS,
    GIB,
    cluster_named,
    cluster_of,
    read_machines,
    with_figures,
)

LARGE = 8e9  # bytes
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")
# bus bandwidth in GB/s for large messages, as measured with nccl-tests
MEASURED = [
    ("a100", "all_reduce", 8, 235),  # NCCL's own upper limit (tuning.cc, from 2.8 on)
    ("h100", "reduce_scatter", 8, 360),  # NVIDIA/nccl #1281
    ("h100", "all_reduce", 2, 368),  # NVIDIA/nccl #1455: rings, 365 to 370 on 2 to 8 ranks
    ("h100", "all_reduce", 4, 368),
    ("h100", "all_reduce", 5, 420),  # and by NVLink SHARP
    ("h100", "all_reduce", 6, 440),
    ("h100", "all_reduce", 7, 460),
    ("h100", "all_reduce", 8, 480),
    ("h200", "all_reduce", 8, 475),  # NVIDIA/nccl-tests #272
    ("b200", "all_reduce", 8, 830),  # NVIDIA/nccl #1807
]


@pytest.mark.parametrize(("name", "op", "ranks", "measured"), MEASURED)
def test_large_messages_go_as_fast_as_measured(
    name: str, op: str, ranks: int, measured: float
) -> None:
    """Bus bandwidth is within 5 % of published measurements."""
    share = (2 if op == "all_reduce" else 1) * (ranks - 1) / ranks
    bandwidth = share * LARGE / CLUSTERS[name].collective_seconds(op, LARGE, ranks, 1)
    assert bandwidth == pytest.approx(measured * 1e9, rel=0.05)


# microseconds of an all_reduce of 2^k bytes on 8 ranks of H20, whose links are an H100's, without
# sums by the switch: a table of nccl-tests in kvcache-ai/Mooncake #3484, taken for NCCL's own (what
# is quoted of it begins below its name)
MEDIUM = {20: 27.8, 21: 40.7, 22: 53.2, 23: 81.2, 24: 121.3, 25: 195.4, 27: 700.3}


@pytest.mark.parametrize("power", MEDIUM)
def test_medium_messages_go_about_as_fast_as_measured(power: int) -> None:
    """Times of 1 to 128 MiB are within 18 % of measurements."""
    seconds = replace(CLUSTERS["h100"], reducing=0.0).collective_seconds(
        "all_reduce", 2.0**power, 8, 1
    )
    assert seconds == pytest.approx(MEDIUM[power] * 1e-6, rel=0.18)


def test_four_adapters_of_a_node_carry_what_was_measured() -> None:
    """Three nodes of 8 A100 with 4 adapters of 200 Gbit/s: 96 GB/s (NVIDIA/nccl-tests #119)."""
    half = replace(CLUSTERS["a100"], network=12.5e9)
    bandwidth = 2 * 23 / 24 * LARGE / half.collective_seconds("all_reduce", LARGE, 24, 1)
    assert bandwidth == pytest.approx(96e9, rel=0.05)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(sorted(CLUSTERS)),
    st.sampled_from(OPS),
    st.integers(2, 64),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.floats(0, 34),
    st.floats(0, 3),
)
def test_more_bytes_take_longer_and_none_less_than_the_wires_need(
    name: str, op: str, ranks: int, stride: int, power: float, more: float
) -> None:
    """Times grow with bytes, and are bounded below by link and network bandwidth."""
    cluster = CLUSTERS[name]
    size = 2**power
    seconds = cluster.collective_seconds(op, size, ranks, stride)
    assert seconds <= cluster.collective_seconds(op, size * 2**more, ranks, stride) * (1 + 1e-12)
    sends = {"broadcast": 1.0, "send": 1.0, "all_reduce": 1.0}.get(op, (ranks - 1) / ranks)
    assert seconds >= sends * size / cluster.link * (1 - 1e-12)


@pytest.mark.parametrize("name", [name for name, one in CLUSTERS.items() if one.library])
@pytest.mark.parametrize("ranks", [8, 64])
def test_small_messages_are_latency(name: str, ranks: int) -> None:
    """8 bytes take as long as 1024 bytes, and longer between more nodes."""
    for op in OPS:
        few, many = (CLUSTERS[name].collective_seconds(op, size, ranks, 1) for size in (8, 1024))
        assert few > 5e-6 and many == pytest.approx(few, rel=0.05)
        assert few <= CLUSTERS[name].collective_seconds(op, 8, 2 * ranks, 1)


def test_all_to_all_leaves_its_node_by_its_ranks_own_way() -> None:
    """Two nodes of 8: half of what a rank sends leaves the node by its own adapter."""
    for name in ("h100", "mi300x"):
        cluster = CLUSTERS[name]
        seconds = cluster.collective_seconds("all_to_all", LARGE, 16, 1)
        assert seconds == pytest.approx(LARGE / 2 / (cluster.network * cluster.routed), rel=0.01)


def test_operators_reach_what_was_measured() -> None:
    """Large products reach their share of the peak; an empty operator takes its start time."""
    cluster = CLUSTERS["a100"]
    large = 2 * 16384**3
    assert large / cluster.operator_seconds("product", large, 0) == pytest.approx(
        267.9e12, rel=0.01
    )
    assert large / cluster.operator_seconds("attention", large, 0) == pytest.approx(
        0.65 * 312e12, rel=0.01
    )
    assert cluster.operator_seconds("other", 0, 2039e9) == pytest.approx(
        1 / cluster.streaming, rel=1e-3
    )
    assert (
        cluster.operator_seconds("other", 0, 0)
        == cluster.operator_seconds("product", 0, 0)
        == cluster.start
        == 3.8e-6
    )
    slow = replace(cluster, ramp=1.0)
    assert slow.operator_seconds("product", 267.9e12, 0) == pytest.approx(2, rel=1e-3)
    assert slow.operator_seconds("other", 0, 0) == cluster.start
    fast = with_figures(cluster, speed=1e12)
    assert fast.operator_seconds("product", 1e12, 0) == pytest.approx(1, rel=1e-3)


MINE = "[Mine]\nspeed = 1e12\nstream = 1e11\nlink = 1e10\nnetwork = 1e9\nnode = 4\n"


def test_a_file_of_ones_own_is_read(tmp_path: Path) -> None:
    """Missing fields of a machine file have the data sheet's defaults."""
    path = tmp_path / "mine.toml"
    path.write_text(f'{MINE}memory = "2 GiB"\npeaks = {{ float64 = 1e11 }}\n')
    machine, ranks = cluster_named(str(path))
    assert machine is not None and ranks is None
    assert (machine.name, machine.node, machine.memory) == ("mine", 4, 2 * GIB)
    assert (machine.product, machine.start, machine.peaks) == (1.0, 0.0, (("float64", 1e11),))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("speed = ", "Invalid"),
        ("speed = 1", "a machine is a table"),
        ("", "a machine is a table"),
        (MINE, "lacks memory"),
        (f"{MINE}memory = 'much'", "a size is needed"),
        (f"{MINE}memory = 1\nproduct = 1.5", "a share is at most 1"),
        (f"{MINE}memory = 1\nproduct = 0", "a number above 0"),
        (f"{MINE}memory = 1\nstart = true", "a number is needed"),
        (f"{MINE}memory = 1\nstart = -1", "not below 0"),
        (f"{MINE}memory = 1\nstart = inf", "not below 0"),
        (f"{MINE}memory = 1\npeaks = 3", "a table of operations"),
        (f"{MINE}memory = 1\nlibrary = 3", "a name is needed"),
        (f"{MINE}memory = 1\nstarts = 3", "has no field `starts`"),
        (f"{MINE.replace('= 4', '= 0')}memory = 1", "a whole number above 0"),
    ],
)
def test_a_file_that_is_no_machine_is_refused(tmp_path: Path, text: str, why: str) -> None:
    """S936 names the field and table, and the valid values."""
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(Refusal) as caught:
        read_machines(path)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "S936" and why in " ".join(diagnostic.notes)
    assert any("calibrate" in help_text for help_text in diagnostic.helps)


def test_the_file_of_a_machine_lies_beside_the_schedule(tmp_path: Path) -> None:
    """The machine file of a schedule is found beside it, from any folder."""
    (tmp_path / "mine.toml").write_text(MINE + "memory = 1\n")
    path = tmp_path / "my.sched"
    path.write_text('schedule 1\n\nmesh(dp=2) on "mine.toml"\n')
    machine, ranks = cluster_of(parse(read(path)))
    assert machine is not None and machine.name == "mine" and ranks is None
