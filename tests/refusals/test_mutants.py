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


def test_mutants_are_planned_or_refused() -> None:
    """Whatever a hand may do to a valid schedule ends in a plan or a refusal."""
    _run(400, seed=1, every=40)


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(4))
def test_many_mutants(seed: int) -> None:
    """20,000 of them, none of which takes a second."""
    played("x.sched", "schedule 1\n", costs=True)  # what is imported and made once
    assert all(seconds < SOON for seconds, _ in _run(5000, 100 + seed, every=10))


def test_noise_is_refused(tmp_path: Path) -> None:
    """Bytes of any kind are read or refused."""
    rng = random.Random(2)
    for _ in range(200):
        raw = noise(rng)
        try:
            read_bytes(tmp_path / "x.sched", raw)
        except Exception as error:
            raise AssertionError(f"neither read nor refused: {raw!r}") from error
