"""Published tables of scaling, told by the planner's price with one constant for a cluster."""

from __future__ import annotations

import numpy as np
import pytest

from schedlang.passes.planner.critical_path import find_critical_path
from tests.benchmarks.scaling import TABLES, TOLD, Row, constant, error, long_sequences, slower


@pytest.fixture(scope="module")
def made() -> dict[str, list[Row]]:
    return {name: list(table()) for name, table in TABLES.items()}


@pytest.fixture(scope="module")
def longer(made: dict[str, list[Row]]) -> float:
    return constant([row for name, rows in made.items() if name not in TOLD for row in rows])


# of the tables' mean, and of any row
BOUNDS = {
    "weak scaling": (0.07, 0.10),
    "more ranks": (0.10, 0.14),
    "recomputation": (0.02, 0.03),
    "layers": (0.05, 0.10),
    "Zero Bubble": (0.08, 0.15),
    "MegaScale": (0.03, 0.05),
    "strong scaling": (0.07, 0.10),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_tables(name: str, made: dict[str, list[Row]], longer: float) -> None:
    """One constant for all tables of a cluster, whatever the model and the ranks."""
    mean, most = BOUNDS[name]
    assert error(made[name], longer) <= mean
    assert max(error([row], longer) for row in made[name]) <= most


def test_zero_3_collapses(made: dict[str, list[Row]], longer: float) -> None:
    """With one more constant, of what gathers reach: a third of the speed on four times the ranks.

    It is fitted to one of the six runs; the others are told.
    """
    rows = made["ZeRO-3"]
    sending = slower(rows[1:2], longer)
    assert max(error([row], longer, sending) for row in rows) <= 0.10
    speeds = [row.told(longer, sending) for row in rows[:3]]
    assert speeds[0] > 3 * speeds[2]


def test_long_sequences() -> None:
    """From 4,096 tokens to a million, over 1 to 32 parts of context."""
    assert max(abs(told / took - 1) for _, told, took in long_sequences()) <= 0.05


# Qi et al. 2024, tables 5 and 9: stages, microbatches, milliseconds of a forward, both halves of a
# backward and a message; which part of a step ranks are idle, by 1F1B and with three stages a rank
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
    """The longest way of measured stages takes what is published; interleaved but for a message of
    each rank, which that paper leaves out."""
    ranks, micro, *times, send, plain, interleaved = row
    whole, places = micro * sum(times), int(ranks)
    for name, chunks, idle, less in (
        ("1F1B", 1, plain, 0.0),
        ("Interleaved1F1B", 3, interleaved, ranks * send),
    ):
        f, i, w = (np.full(places * chunks, one / chunks) for one in times)
        way = find_critical_path(name, places, chunks, int(micro), f, i, w, send)
        took = way.seconds(f, i, w, send) - less
        assert 1 - whole / took == pytest.approx(idle, abs=1e-4 if less else 1.2e-3)
