"""Random user models under random schedules: equal by two comparisons, or refused with a code."""

from __future__ import annotations

import pytest

from schedlang.diagnostics.codes import CODES
from tests.drawn.judge import FAILED, PASSED, REFUSED
from tests.engine import Threads
from tests.properties.user_blocks import KINDS
from tests.properties.user_models import Drawn, outcome, plain_outcome
from tests.zoo.bug import mutate

SEED = 1


@pytest.mark.parametrize("number", range(12))
def test_a_user_model_is_right_or_refused(threads: Threads, number: int) -> None:
    """Equal as by `verify` with dropout, and to a plain loop without dropout."""
    judged_outcome = outcome(Drawn(number, SEED), threads)
    assert judged_outcome.kind in (PASSED, REFUSED), (judged_outcome.why, judged_outcome.text)
    assert judged_outcome.kind == PASSED or judged_outcome.why.split()[0] in CODES


@pytest.mark.deep
@pytest.mark.parametrize("tens", range(12))
def test_many_user_models_are_right_or_refused(threads: Threads, tens: int) -> None:
    """The same for 120 models, most of which are not refused."""
    outcomes = [outcome(Drawn(100 + 10 * tens + k, SEED), threads) for k in range(10)]
    failures = [outcome_ for outcome_ in outcomes if outcome_.kind not in (PASSED, REFUSED)]
    assert not failures, [(outcome_.model, outcome_.why, outcome_.text) for outcome_ in failures]
    assert sum(outcome_.kind == PASSED for outcome_ in outcomes) >= 4


@pytest.mark.parametrize(
    "seed, number",
    [
        (3, 23),  # an encoder layer with sharded projections, evaluated
        (6, 10),  # one module under two names, sharded under both
    ],
)
def test_what_users_models_have_found(threads: Threads, seed: int, number: int) -> None:
    """Models that once failed are equal."""
    judged_outcome = outcome(Drawn(number, seed), threads)
    assert judged_outcome.kind == PASSED, (judged_outcome.why, judged_outcome.text)


def test_the_plain_loop_sees_a_wrong_sum(threads: Threads) -> None:
    """Gradients summed twice over ranks differ from those of the plain loop."""
    text = 'schedule 1\n\nmesh(dp=2)\n\nstep "drawn" {\n  zero(stage=0, over=dp)\n}\n'
    drawn = Drawn(9, SEED)
    assert plain_outcome(drawn, text, threads)[0] == PASSED
    with mutate("D01"):
        assert plain_outcome(drawn, text, threads)[0] == FAILED


def test_every_kind_of_block_is_drawn() -> None:
    """A hundred models contain every kind of block; the same number gives the same model."""
    models = [Drawn(number, SEED).subject().model() for number in range(100)]
    names = {type(block).__name__.lower() for model in models for block in model.layers()}
    assert names == set(KINDS)
    assert str(models[3]) == str(Drawn(3, SEED).subject().model())
    assert Drawn(3, SEED).text == Drawn(3, SEED).text
