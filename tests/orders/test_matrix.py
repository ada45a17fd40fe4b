"""Orders on models: a part of the matrix is run anew, and the page records what came of it."""

from __future__ import annotations

import pytest

from schedlang.pipeline.schedules import ORDERS
from tests.engine import Threads
from tests.matrix import DIFFERS, PAGE, cell, diagonal, original, recorded, rewritten, run
from tests.proofs import assert_near
from tests.small_models import SMALL

PAIRS = list(diagonal())


@pytest.mark.parametrize(
    ("known", "model"), PAIRS, ids=[f"{known.name} on {model.name}" for known, model in PAIRS]
)
def test_the_diagonal(known: object, model: object, threads: Threads) -> None:
    """Each order with a model, each model with an order: equal to the original, or as recorded."""
    found = cell(known, model, threads)  # type: ignore[arg-type]
    key = known.name, model.name  # type: ignore[attr-defined]
    marks = recorded(PAGE.read_text())
    if key in marks:
        assert found == marks[key], f"{key}: `python -m tests.matrix` writes it again"
    else:
        assert found.mark != DIFFERS, f"{key}: {found}"


def test_no_cell_is_wrong() -> None:
    """No order that runs computes something else; the page is read back as it was written."""
    page = PAGE.read_text()
    assert not [key for key, one in recorded(page).items() if one.mark == DIFFERS]
    assert rewritten(page, recorded(page)) == page


def test_a_difference_is_seen() -> None:
    """A gradient that is off by a part in a million is not passed as equal."""
    wanted = original("MLP", 4)
    name = next(name for name in wanted if name.startswith("grad 1 "))
    with pytest.raises(AssertionError, match="grad 1"):
        assert_near(wanted | {name: wanted[name] * (1 + 1e-6)}, wanted)


@pytest.mark.deep
def test_the_page_is_current() -> None:
    """All orders of the registry on all models: the table is what comes of them today."""
    page = PAGE.read_text()
    marks = recorded(page)
    assert set(marks) == {(known.name, model.name) for known in ORDERS for model in SMALL}
    assert page == rewritten(page, run(ORDERS))
