"""The verifier's own mistakes: for each there is a program by which it would be noticed."""

from __future__ import annotations

import pytest

from schedlang.runtime.launch.pool import Pool
from tests.tiers import thinned
from tests.zoo.verifier import FLAWS, Flaw


@pytest.mark.parametrize("flaw", thinned(FLAWS.values()), ids=FLAWS.keys())
def test_a_mistake_of_the_verifier_would_be_noticed(flaw: Flaw, pool: Pool) -> None:
    """A wrong program is caught (a right one passes), and with the mistake it would not be.

    The first half fails for a verifier that has the mistake; the second says what it watches.
    """
    assert flaw.verdict(pool, flawed=False) is flaw.cries_wolf, "the verifier has this mistake"
    if flaw.id == "V05":  # refused by the comparison itself
        with pytest.raises(AssertionError):
            flaw.verdict(pool, flawed=True)
    else:
        assert flaw.verdict(pool, flawed=True) is not flaw.cries_wolf, "it watches nothing"


def test_all_are_there() -> None:
    """Fourteen ways in which verifiers have failed."""
    assert list(FLAWS) == [f"V{n:02}" for n in range(1, 15)]
