"""Schedules drawn over many models: proven or refused with a code, and a wrong program is seen."""

from __future__ import annotations

import pytest

from schedlang.diagnostics.codes import CODES
from schedlang.schedule import Schedule
from tests.drawn.judge import ABSENT, BROKEN, FAILED, PASSED, REFUSED, judged
from tests.drawn.least import least
from tests.drawn.models import NAMES
from tests.drawn.rows import drawn
from tests.engine import Threads
from tests.zoo.bug import mutate

QUICK = range(0, 25)  # each of the examples, and of our own networks
SEED = 3


@pytest.mark.parametrize("number", QUICK)
def test_a_drawn_schedule_holds(number: int, threads: Threads) -> None:
    """What is not refused with a code equals its original."""
    found = judged(number, SEED, threads)
    assert found.kind in (PASSED, REFUSED, ABSENT), (found.why, found.text)
    assert found.kind != REFUSED or found.why.split()[0] in CODES


@pytest.mark.deep
@pytest.mark.parametrize("tens", range(20))
def test_two_hundred_hold(tens: int, threads: Threads) -> None:
    """The same of 200, of which a third at least is no refusal."""
    found = [judged(1000 + 10 * tens + k, SEED, threads) for k in range(10)]
    wrong = [one for one in found if one.kind not in (PASSED, REFUSED, ABSENT)]
    assert not wrong, [(one.number, one.why, one.text) for one in wrong]
    assert sum(one.kind == PASSED for one in found) >= 2


def test_a_wrong_program_is_no_pass(threads: Threads) -> None:
    """A schedule that passes fails once the runtime has a bug in what it uses."""
    text = 'schedule 1\n\nmesh(dp=2)\n\nstep "drawn" {\n  zero(stage=0, over=dp)\n}\n'
    number = NAMES.index("nanogpt")
    assert judged(number, SEED, threads, text=text).kind == PASSED
    with mutate("D01"):
        assert judged(number, SEED, threads, text=text).kind == FAILED


def test_a_raised_error_is_no_refusal(threads: Threads) -> None:
    """A mistake of ours is told apart from a refusal, with its traceback; nothing is raised."""
    text = 'schedule 1\n\nstep "drawn" {\n  nothing.here  checkpoint()\n}\n'
    number = NAMES.index("towers")
    assert judged(number, SEED, threads, text=text).why.startswith("S201")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Schedule, "plan", lambda self: {}["gone"])
        found = judged(number, SEED, threads, text="schedule 1\n")
    assert found.kind == BROKEN and found.why.strip().endswith("KeyError: 'gone'")


def test_the_same_number_is_the_same_schedule() -> None:
    """Another process draws the same; another seed draws other schedules."""
    number = NAMES.index("nanogpt")
    texts = [drawn("nanogpt", number, seed) for seed in (5, 5, *range(6, 14))]
    assert texts[0] == texts[1] and len(set(texts)) > 6


def test_the_least_that_ends_the_same() -> None:
    """Rows and options that have no part in an outcome go, ranks too."""
    text = (
        'schedule 1\n\nmesh(dp=4, tp=2)\n\nstep "drawn" {\n  a.*  shard(col, over=tp)\n'
        "  b  checkpoint(every=2)\n  zero(stage=1, over=dp)\n}\n"
    )
    found = least(text, lambda tried: "b  checkpoint(" in tried and "dp=2" not in tried)
    assert found == 'schedule 1\n\nmesh(dp=3, tp=1)\n\nstep "drawn" {\n  b  checkpoint()\n}\n'
