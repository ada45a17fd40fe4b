"""Mutated schedules and random bytes: a plan or a refusal, no traceback, within a second."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import pytest

from tests.refusals.mutants import check_and_plan, mutants, noise, read_bytes, valid_schedules

LIMIT = 1.0  # seconds of computing; asserted only in the deep tests


def _slowest_mutants(count: int, seed: int, every: int) -> list[tuple[float, str]]:
    """Check `count` mutants, accounting every n-th; returns the slowest three."""
    rng, slowest = random.Random(seed), []
    for number, (path, text) in enumerate(islice(mutants(rng, valid_schedules()), count)):
        try:
            outcome = check_and_plan(path, text, costs=number % every == 0)
        except Exception as error:
            raise AssertionError(f"neither a plan nor a refusal of\n{text}") from error
        slowest = sorted([*slowest, (outcome.seconds, text)])[-3:]
    return slowest


def _warm_up() -> None:
    """Do imports and set-up that happen only once."""
    check_and_plan("x.sched", "schedule 1\n", costs=True)


def test_mutants_are_planned_or_refused() -> None:
    """Any edit of a valid schedule ends in a plan or a refusal."""
    _slowest_mutants(400, seed=1, every=40)


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(4))
def test_many_mutants(seed: int) -> None:
    """None of 20,000 mutants takes a second."""
    _warm_up()
    assert all(seconds < LIMIT for seconds, _ in _slowest_mutants(5000, 100 + seed, every=10))


def _slowest_noise(folder: Path, count: int, seed: int) -> float:
    """Read `count` random files; returns the seconds of the slowest."""
    rng, slowest = random.Random(seed), 0.0
    for _ in range(count):
        raw = noise(rng)
        try:
            slowest = max(slowest, read_bytes(folder / "x.sched", raw).seconds)
        except Exception as error:
            raise AssertionError(f"neither read nor refused: {raw!r}") from error
    return slowest


def test_noise_is_refused(tmp_path: Path) -> None:
    """Random bytes are read or refused."""
    _slowest_noise(tmp_path, 200, seed=2)


@pytest.mark.deep
def test_much_noise(tmp_path: Path) -> None:
    """None of 2,000 random byte strings takes a second."""
    _warm_up()
    assert _slowest_noise(tmp_path, 2000, seed=3) < LIMIT
