"""`calibrate`: fits a machine to measurements, and its file is read back."""

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


def _rates(cluster: Cluster) -> list[Rate]:
    """Return the float32 rates that a machine would measure; each operation counts twice."""
    rates = [Rate("start", "float32", 0, 0, cluster.operator_seconds("other", 0, 0))]
    for k in range(12):
        moved_bytes = 2.0 ** (20 + k)
        rates.append(
            Rate(
                "copy", "float32", 0, moved_bytes, cluster.operator_seconds("other", 0, moved_bytes)
            )
        )
        flops = 2.0 ** (26 + k)
        rates.append(
            Rate("product", "float32", flops, 0, cluster.operator_seconds("product", 2 * flops, 0))
        )
        seconds = cluster.operator_seconds("attention", 2 * flops * 1e3, 0)
        rates.append(Rate("attention", "float32", flops * 1e3, 0, seconds))
    return rates


def test_a_machine_is_found_from_what_it_would_measure() -> None:
    """The fit recovers every constant; unmeasured ones stay unchanged."""
    ops = ("all_reduce", "all_gather", "broadcast")
    sizes = [(op, 2.0**k) for op in ops for k in range(10, 30, 2)]
    sent = [
        Rate(op, "float32", 0, size, MINE.collective_seconds(op, size, 4, 1)) for op, size in sizes
    ]
    base = replace(MINE, speed=1.0, stream=1.0, link=1.0, network=1.0, start=0.0, ramp=0.0, hop=0.0)
    fitted = fit_machine(base, _rates(MINE), sent, "float32", 4).cluster
    for name in ("speed", "stream", "link", "network", "attention", "start", "ramp", "hop", "far"):
        assert getattr(fitted, name) == pytest.approx(getattr(MINE, name), rel=1e-3), name
    assert dict(fitted.peaks) == {"float32": pytest.approx(1e12)}
    one_rank = fit_machine(CLUSTERS["h100"], _rates(MINE), [], "float32", 1).cluster
    assert (one_rank.link, one_rank.library) == (450e9, "nccl")


def test_neither_part_of_a_line_is_below_zero() -> None:
    """A fitted line has no negative part; without samples it raises ValueError."""
    assert fit_line([(1.0, 1.0, 1.0), (1.0, 2.0, 3.0)])[0] == 0
    assert fit_line([(1.0, 1.0, 2.0), (1.0, 2.0, 1.0)])[1] == 2  # the highest rate of the samples
    assert fit_line([(1.0, 6.0, 2.0)])[:2] == (0, 3)
    with pytest.raises(ValueError, match="nothing was measured"):
        fit_line([])


@pytest.mark.parametrize("one", [MINE, *CLUSTERS.values()], ids=lambda one: one.name)
def test_a_file_says_what_a_machine_is(one: Cluster, tmp_path: Path) -> None:
    """A machine file that is written and read gives the same machine."""
    path = tmp_path / "mine.toml"
    path.write_text(machine_toml(FittedMachine(one, {"speed": "5 sizes"})))
    assert read_machines(path) == {one.name: one}


def test_the_verb_writes_what_on_reads(tmp_path: Path) -> None:
    """`calibrate` on one rank measures the device, and takes links from `--like`."""
    path = tmp_path / "mine.toml"
    arguments = ["calibrate", "--longest", "2e-3", "--ranks", "1", "--like", "h100"]
    result = CliRunner().invoke(app, [*arguments, "--json", "-o", str(path)])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert {sample["what"] for sample in report["samples"]} == {
        "start",
        "copy",
        "product",
        "attention",
    }
    (machine,) = read_machines(path).values()
    assert machine.link == 450e9 and 1e8 < machine.speed < 1e16 and 0 < machine.start < 1e-2


def test_work_that_takes_no_time_is_as_quick_as_was_seen() -> None:
    """Message times that do not depend on bytes give a finite rate."""
    start, rate, _ = fit_line([(1.0, 1e3, 2e-3), (1.0, 1e4, 1.9e-3), (1.0, 1e6, 1.8e-3)])
    assert start == pytest.approx(1.9e-3, rel=0.1) and rate == pytest.approx(1e6 / 1.8e-3)


@pytest.mark.deep
def test_messages_between_ranks_are_measured(tmp_path: Path) -> None:
    """Two ranks: hop time and link rate are plausible."""
    path = tmp_path / "mine.toml"
    result = CliRunner().invoke(app, ["calibrate", "--longest", "1e-2", "-o", str(path)])
    assert result.exit_code == 0, result.output
    (machine,) = read_machines(path).values()
    assert machine.node == 2 and 0 < machine.hop < 1 and 1e6 < machine.link < 1e13


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
    """Wrong options are refused before anything is measured."""
    result = CliRunner().invoke(app, ["calibrate", *words])
    assert result.exit_code == 2 and said in result.output
