"""Orders on small models: one diagonal of the matrix is run, and the page has the results."""

from __future__ import annotations

import pytest

from schedlang.pipeline.schedules import ORDERS
from tests.engine import Threads
from tests.order_matrix import (
    DIFFERS,
    PAGE,
    diagonal_pairs,
    recorded_cells,
    rewrite_page,
    run_cell,
    run_orders,
    train_original,
)
from tests.proofs import assert_near
from tests.small_models import SMALL_MODELS

PAIRS = list(diagonal_pairs())


@pytest.mark.parametrize(
    ("known", "model"), PAIRS, ids=[f"{known.name} on {model.name}" for known, model in PAIRS]
)
def test_the_diagonal(known: object, model: object, threads: Threads) -> None:
    """Each order with one model, each model with an order: as recorded on the page."""
    result = run_cell(known, model, threads)  # type: ignore[arg-type]
    key = known.name, model.name  # type: ignore[attr-defined]
    marks = recorded_cells(PAGE.read_text())
    if key in marks:
        assert result == marks[key], f"{key}: `python -m tests.order_matrix` writes it again"
    else:
        assert result.mark != DIFFERS, f"{key}: {result}"


def test_no_cell_is_wrong() -> None:
    """No recorded cell differs; the page can be read and written back unchanged."""
    page = PAGE.read_text()
    assert not [
        key for key, cell_result in recorded_cells(page).items() if cell_result.mark == DIFFERS
    ]
    assert rewrite_page(page, recorded_cells(page)) == page


def test_a_difference_is_seen() -> None:
    """A relative error of 1e-6 in a gradient is detected."""
    expected = train_original("MLP", 4)
    name = next(name for name in expected if name.startswith("grad 1 "))
    with pytest.raises(AssertionError, match="grad 1"):
        assert_near(expected | {name: expected[name] * (1 + 1e-6)}, expected)


@pytest.mark.deep
def test_the_page_is_current() -> None:
    """The table on the page is that of all orders on all models now."""
    page = PAGE.read_text()
    marks = recorded_cells(page)
    assert set(marks) == {(order.name, model.name) for order in ORDERS for model in SMALL_MODELS}
    assert page == rewrite_page(page, run_orders(ORDERS))
