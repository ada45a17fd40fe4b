"""Random user models under kernels, fusions, casts, frozen and tied parameters, rows of memory."""

from __future__ import annotations

from random import Random

import pytest

from schedlang.diagnostics.codes import CODES
from tests.drawn.judge import PASSED, REFUSED
from tests.drawn.rows import text
from tests.engine import Threads
from tests.properties.user_models import Drawn
from tests.properties.user_rows import OtherRows, outcome

SEED = 5


@pytest.mark.parametrize("number", [2, 3, 8, 9, 10, 12])
def test_other_rows_are_right_or_refused(threads: Threads, number: int) -> None:
    """Training and evaluations equal a plain loop's; on one rank also with dropout."""
    kind, reason, schedule = outcome(Drawn(number, SEED), threads)
    assert kind in (PASSED, REFUSED), (reason, schedule)
    assert kind == PASSED or reason.split()[0] in CODES


@pytest.mark.deep
@pytest.mark.parametrize("tens", range(8))
def test_many_other_rows_are_right_or_refused(threads: Threads, tens: int) -> None:
    """The same for 80 models, most of which are not refused."""
    outcomes = [outcome(Drawn(100 + 10 * tens + k, SEED), threads) for k in range(10)]
    assert not [found for found in outcomes if found[0] not in (PASSED, REFUSED)]
    assert sum(kind == PASSED for kind, _, _ in outcomes) >= 4


@pytest.mark.parametrize(
    "seed, number",
    [
        (5, 17),  # a kernel that cast float64 under `cast(fp16)`, and an accuracy before the loss
        (5, 1),  # `program.module` beside two `zero` rows
        (5, 31),  # a GRU whose saved products were written into
    ],
)
def test_what_other_rows_have_found(threads: Threads, seed: int, number: int) -> None:
    """Models that once failed, or were refused, are equal."""
    kind, reason, schedule = outcome(Drawn(number, seed), threads)
    assert kind == PASSED, (reason, schedule)


def test_every_kind_of_row_is_drawn() -> None:
    """The rows of fifty numbers contain each verb of this generator."""
    texts = ""
    for number in range(50):
        rng = Random(number)
        texts += text(Drawn(number % 5, SEED).name, rng, (), ("others",), OtherRows)
    for verb in ("replace_kernel", "fuse", "decompose", "split_backward", "freeze", "tie", "cast"):
        assert f"  {verb}(" in texts, verb
    for option in ("plan=", "save=", "parameters", "gradients", "optimizer", "activations"):
        assert f"({option}" in texts, option
