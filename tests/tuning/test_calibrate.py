"""calibrate: what is measured gives a machine, and its file is read again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from schedlang.cli import app
from schedlang.passes.simulate.calibration import FittedMachine, fit_line, fit_machine, machine_toml
from schedlang.passes.simulate.machine import CLUSTERS, Cluster, read_machines
from schedlang.runtime.device_rates import Rate

MINE = replace(
    Cluster("mine", 2e12, 1e11, 1e10, 1e10, 4, 2**34),
    attention=0.5,
    start=2e-6,
    ramp=3e-6,
    hop=1e-5,
    far=1e-5,
)


def _rates(one: Cluster) -> list[Rate]:
    """What a machine would measure of itself in float32, each operation of which counts twice."""
    found = [Rate("start", "float32", 0, 0, one.operator_seconds("other", 0, 0))]
    for k in range(12):
        moved = 2.0 ** (20 + k)
        found.append(Rate("copy", "float32", 0, moved, one.operator_seconds("other", 0, moved)))
        flops = 2.0 ** (26 + k)
        found.append(
            Rate("product", "float32", flops, 0, one.operator_seconds("product", 2 * flops, 0))
        )
        took = one.operator_seconds("attention", 2 * flops * 1e3, 0)
        found.append(Rate("attention", "float32", flops * 1e3, 0, took))
    return found


def test_a_machine_is_found_from_what_it_would_measure() -> None:
    """Every constant comes back; what nobody measured stays as it was."""
    ops = ("all_reduce", "all_gather", "broadcast")
    sizes = [(op, 2.0**k) for op in ops for k in range(10, 30, 2)]
    sent = [
        Rate(op, "float32", 0, size, MINE.collective_seconds(op, size, 4, 1)) for op, size in sizes
    ]
    base = replace(MINE, speed=1.0, stream=1.0, link=1.0, network=1.0, start=0.0, ramp=0.0, hop=0.0)
    found = fit_machine(base, _rates(MINE), sent, "float32", 4).cluster
    for name in ("speed", "stream", "link", "network", "attention", "start", "ramp", "hop", "far"):
        assert getattr(found, name) == pytest.approx(getattr(MINE, name), rel=1e-3), name
    assert dict(found.peaks) == {"float32": pytest.approx(1e12)}
    alone = fit_machine(CLUSTERS["h100"], _rates(MINE), [], "float32", 1).cluster
    assert (alone.link, alone.library) == (450e9, "nccl")


def test_neither_part_of_a_line_is_below_zero() -> None:
    """Samples that would ask for it are told by the other part alone; without any, it says so."""
    assert fit_line([(1.0, 1.0, 1.0), (1.0, 2.0, 3.0)])[0] == 0
    assert fit_line([(1.0, 1.0, 2.0), (1.0, 2.0, 1.0)])[1] == 2  # the most that was reached
    assert fit_line([(1.0, 6.0, 2.0)])[:2] == (0, 3)
    with pytest.raises(ValueError, match="nothing was measured"):
        fit_line([])


@pytest.mark.parametrize("one", [MINE, *CLUSTERS.values()], ids=lambda one: one.name)
def test_a_file_says_what_a_machine_is(one: Cluster, tmp_path: Path) -> None:
    """Written and read again it is the same machine."""
    path = tmp_path / "mine.toml"
    path.write_text(machine_toml(FittedMachine(one, {"speed": "5 sizes"})))
    assert read_machines(path) == {one.name: one}


def test_the_verb_writes_what_on_reads(tmp_path: Path) -> None:
    """The device at hand, of its messages what another machine has."""
    path = tmp_path / "mine.toml"
    words = ["calibrate", "--longest", "2e-3", "--ranks", "1", "--like", "h100"]
    ran = CliRunner().invoke(app, [*words, "--json", "-o", str(path)])
    assert ran.exit_code == 0, ran.output
    told = json.loads(ran.stdout)
    assert {one["what"] for one in told["samples"]} == {"start", "copy", "product", "attention"}
    (found,) = read_machines(path).values()
    assert found.link == 450e9 and 1e8 < found.speed < 1e16 and 0 < found.start < 1e-2


def test_work_that_takes_no_time_is_as_quick_as_was_seen() -> None:
    """Messages that take as long whatever their bytes: no link is infinitely quick, in no file."""
    start, rate, _ = fit_line([(1.0, 1e3, 2e-3), (1.0, 1e4, 1.9e-3), (1.0, 1e6, 1.8e-3)])
    assert start == pytest.approx(1.9e-3, rel=0.1) and rate == pytest.approx(1e6 / 1.8e-3)


@pytest.mark.deep
def test_messages_between_ranks_are_measured(tmp_path: Path) -> None:
    """Two ranks: a step takes some microseconds, and bytes take longer."""
    path = tmp_path / "mine.toml"
    ran = CliRunner().invoke(app, ["calibrate", "--longest", "1e-2", "-o", str(path)])
    assert ran.exit_code == 0, ran.output
    (found,) = read_machines(path).values()
    assert found.node == 2 and 0 < found.hop < 1 and 1e6 < found.link < 1e13


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--ranks", "0"), "`--ranks 0` are too few"),
        (("--ranks", "1"), "links between ranks are not measured"),
        (("--like", "abacus"), "unknown machine `abacus`"),
        (("--dtype", "int8"), "cannot measure in `int8`"),
        (("--longest", "0"), "`--longest` must be finite and above 0"),
        (("-o", "nowhere/mine.toml"), "mkdir -p nowhere"),
    ],
)
def test_what_cannot_be_measured_is_said(words: tuple[str, ...], said: str) -> None:
    """Before anything is measured."""
    ran = CliRunner().invoke(app, ["calibrate", *words])
    assert ran.exit_code == 2 and said in ran.output
