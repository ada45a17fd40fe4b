"""Mutants of valid schedules, and noise: a plan or a refusal, no traceback, and soon."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import pytest

from tests.refusals.mutants import mutants, noise, played, read_bytes, valid

SOON = 1.0  # second of computing; only the long run holds it against this


def _run(count: int, seed: int, every: int) -> list[tuple[float, str]]:
    """Play so many mutants, counting costs of each so many; the slowest of them."""
    rng, slowest = random.Random(seed), []
    for number, (path, text) in enumerate(islice(mutants(rng, valid()), count)):
        try:
            seen = played(path, text, costs=number % every == 0)
        except Exception as error:
            raise AssertionError(f"neither a plan nor a refusal of\n{text}") from error
        slowest = sorted([*slowest, (seen.seconds, text)])[-3:]
    return slowest


def _warm() -> None:
    """What is imported and made once."""
    played("x.sched", "schedule 1\n", costs=True)


def test_mutants_are_planned_or_refused() -> None:
    """Whatever a hand may do to a valid schedule ends in a plan or a refusal."""
    _run(400, seed=1, every=40)


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(4))
def test_many_mutants(seed: int) -> None:
    """20,000 of them, none of which takes a second."""
    _warm()
    assert all(seconds < SOON for seconds, _ in _run(5000, 100 + seed, every=10))


def _noise(folder: Path, count: int, seed: int) -> float:
    """Read so much noise; the seconds of the slowest."""
    rng, slowest = random.Random(seed), 0.0
    for _ in range(count):
        raw = noise(rng)
        try:
            slowest = max(slowest, read_bytes(folder / "x.sched", raw).seconds)
        except Exception as error:
            raise AssertionError(f"neither read nor refused: {raw!r}") from error
    return slowest


def test_noise_is_refused(tmp_path: Path) -> None:
    """Bytes of any kind are read or refused."""
    _noise(tmp_path, 200, seed=2)


@pytest.mark.deep
def test_much_noise(tmp_path: Path) -> None:
    """2,000 strings of it, none of which takes a second."""
    _warm()
    assert _noise(tmp_path, 2000, seed=3) < SOON
