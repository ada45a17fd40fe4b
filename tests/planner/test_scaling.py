"""Published scaling tables, predicted by the planner's price with one fitted constant."""

from __future__ import annotations

import numpy as np
import pytest

from schedlang.passes.planner.critical_path import find_critical_path
from tests.benchmarks.scaling import (
    NOT_FITTED,
    TABLES,
    Row,
    fit_computing,
    fit_sending,
    long_sequences,
    mean_error,
)


@pytest.fixture(scope="module")
def made() -> dict[str, list[Row]]:
    return {name: list(table()) for name, table in TABLES.items()}


@pytest.fixture(scope="module")
def longer(made: dict[str, list[Row]]) -> float:
    return fit_computing(
        [row for name, rows in made.items() if name not in NOT_FITTED for row in rows]
    )


# largest mean error of a table, and of any row
BOUNDS = {
    "weak scaling": (0.07, 0.10),
    "more ranks": (0.05, 0.07),
    "recomputation": (0.02, 0.03),
    "layers": (0.05, 0.10),
    "Zero Bubble": (0.08, 0.15),
    "MegaScale": (0.03, 0.05),
    "strong scaling": (0.07, 0.10),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_tables(name: str, made: dict[str, list[Row]], longer: float) -> None:
    """One constant predicts all tables of a cluster, whatever the model and the ranks."""
    mean, max_error = BOUNDS[name]
    assert mean_error(made[name], longer) <= mean
    assert max(mean_error([row], longer) for row in made[name]) <= max_error


def test_zero_3_collapses(made: dict[str, list[Row]], longer: float) -> None:
    """With one more constant for gathers: a third of the speed on four times the ranks.

    It is fitted to one of the six runs; the others are predicted.
    """
    rows = made["ZeRO-3"]
    sending = fit_sending(rows[1:2], longer)
    assert max(mean_error([row], longer, sending) for row in rows) <= 0.10
    speeds = [row.told(longer, sending) for row in rows[:3]]
    assert speeds[0] > 3 * speeds[2]


def test_long_sequences() -> None:
    """Sequences from 4,096 tokens to a million, with context parallelism from 1 to 32."""
    assert max(abs(predicted / measured - 1) for _, predicted, measured in long_sequences()) <= 0.05


# Qi et al. 2024, tables 5 and 9: stages, microbatches, milliseconds of a forward, both halves of a
# backward and a message; share of idle time with 1F1B and with three stages a rank
BUBBLES = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1055),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.0818),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0443),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552, 0.1104),
    (16, 64, 11.307, 11.254, 8.101, 0.379, 0.2082, 0.0852),
    (16, 128, 11.325, 11.308, 8.109, 0.378, 0.1251, 0.0445),
]


@pytest.mark.parametrize("row", BUBBLES, ids=str)
def test_interleaving(row: tuple[float, ...]) -> None:
    """The critical path of measured stages gives the published idle time; interleaved without a
    message per rank, which that paper leaves out."""
    ranks, micro, *times, send, idle_1f1b, interleaved = row
    busy_time, places = micro * sum(times), int(ranks)
    for name, chunks, idle, less in (
        ("1F1B", 1, idle_1f1b, 0.0),
        ("Interleaved1F1B", 3, interleaved, ranks * send),
    ):
        f, i, w = (np.full(places * chunks, duration / chunks) for duration in times)
        path = find_critical_path(name, places, chunks, int(micro), f, i, w, send)
        step_time = path.seconds(f, i, w, send) - less
        assert 1 - busy_time / step_time == pytest.approx(idle, abs=1e-4 if less else 1.2e-3)
