"""Random schedules over many models: equal or refused with a code; the check detects bugs."""

from __future__ import annotations

import pytest

from schedlang.diagnostics.codes import CODES
from schedlang.schedule import Schedule
from tests.drawn.judge import ABSENT, BROKEN, FAILED, PASSED, REFUSED, Outcome, judge_schedule
from tests.drawn.models import NAMES
from tests.drawn.rows import draw_schedule
from tests.drawn.shrink_text import shrink_text
from tests.engine import Threads
from tests.zoo.bug import mutate

QUICK = range(0, 25)  # covers each example and each network of this folder
SEED = 3


@pytest.mark.parametrize("number", QUICK)
def test_a_drawn_schedule_holds(number: int, threads: Threads) -> None:
    """A schedule that is not refused with a code equals its original."""
    outcome = judge_schedule(number, SEED, threads)
    assert outcome.kind in (PASSED, REFUSED, ABSENT), (outcome.why, outcome.text)
    assert outcome.kind != REFUSED or outcome.why.split()[0] in CODES


@pytest.mark.deep
@pytest.mark.parametrize("first", range(1000, 1200, 40))
def test_two_hundred_hold(first: int, threads: Threads) -> None:
    """The same for 200 schedules of installed models, of which enough are not refused."""
    outcomes: list[Outcome] = []
    for number in range(first, first + 40):
        drawn = (judge_schedule(number + 1000 * k, SEED, threads) for k in range(20))
        outcomes.append(next(outcome for outcome in drawn if outcome.kind != ABSENT))
    failures = [outcome for outcome in outcomes if outcome.kind not in (PASSED, REFUSED)]
    assert not failures, [(outcome.number, outcome.why, outcome.text) for outcome in failures]
    assert sum(outcome.kind == PASSED for outcome in outcomes) >= 8


def test_a_wrong_program_is_no_pass(threads: Threads) -> None:
    """A passing schedule fails when a bug is injected into the runtime."""
    text = 'schedule 1\n\nmesh(dp=2)\n\nstep "drawn" {\n  zero(stage=0, over=dp)\n}\n'
    number = NAMES.index("nanogpt")
    assert judge_schedule(number, SEED, threads, text=text).kind == PASSED
    with mutate("D01"):
        assert judge_schedule(number, SEED, threads, text=text).kind == FAILED


def test_a_raised_error_is_no_refusal(threads: Threads) -> None:
    """An internal error is no refusal and has its traceback; nothing is raised."""
    text = 'schedule 1\n\nstep "drawn" {\n  nothing.here  checkpoint()\n}\n'
    number = NAMES.index("towers")
    assert judge_schedule(number, SEED, threads, text=text).why.startswith("S201")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Schedule, "plan", lambda self: {}["gone"])
        outcome = judge_schedule(number, SEED, threads, text="schedule 1\n")
    assert outcome.kind == BROKEN and outcome.why.strip().endswith("KeyError: 'gone'")


def test_the_same_number_is_the_same_schedule() -> None:
    """The same seed draws the same schedule; other seeds draw others."""
    number = NAMES.index("nanogpt")
    texts = [draw_schedule("nanogpt", number, seed) for seed in (5, 5, *range(6, 14))]
    assert texts[0] == texts[1] and len(set(texts)) > 6


def test_the_least_that_ends_the_same() -> None:
    """Shrinking removes rows, options and ranks that do not matter for the outcome."""
    text = (
        'schedule 1\n\nmesh(dp=4, tp=2)\n\nstep "drawn" {\n  a.*  shard(col, over=tp)\n'
        "  b  checkpoint(every=2)\n  zero(stage=1, over=dp)\n}\n"
    )
    shrunk = shrink_text(text, lambda tried: "b  checkpoint(" in tried and "dp=2" not in tried)
    assert shrunk == 'schedule 1\n\nmesh(dp=3, tp=1)\n\nstep "drawn" {\n  b  checkpoint()\n}\n'
