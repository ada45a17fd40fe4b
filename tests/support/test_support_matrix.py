"""The support matrix: some pairs are proven again, and the page agrees with the recorded cells."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine import Threads
from tests.support import page
from tests.support.cells import FAILED, NO_MODEL, VERIFIED, judge_cell
from tests.support.features import Combination, combinations_of, in_order

QUICK_COMBINATIONS: tuple[Combination, ...] = (
    ("zero 3", "expert"),
    ("tensor", "channels"),
    ("sequence", "interleaved"),
    ("ulysses", "checkpoint"),
    ("grid", "offload"),
    ("expert", "tie"),
    ("1F1B", "spatial"),
    ("freeze", "ring"),
    ("tensor", "compress"),
)
ALL = tuple(combinations_of())


def _joined_names(names: Combination) -> str:
    return " x ".join(names)


@pytest.mark.parametrize("names", QUICK_COMBINATIONS, ids=_joined_names)
def test_a_diagonal(names: Combination, threads: Threads) -> None:
    """Each feature, paired with another one, trains as the original model does."""
    assert in_order(names) in ALL
    cell = judge_cell(in_order(names), threads)
    assert cell.status == VERIFIED, cell.why
    assert cell.worst < 1e-9


@pytest.mark.deep
@pytest.mark.parametrize("names", ALL, ids=_joined_names)
def test_every_combination(names: Combination, threads: Threads) -> None:
    """No combination differs from its model or ends in an internal error."""
    cell = judge_cell(names, threads)
    assert cell.status != FAILED, cell.why


def test_the_page_is_what_is_known() -> None:
    """All combinations are recorded, none failed, and the page is generated from them."""
    cells = page.read_cells()
    assert set(cells) == set(ALL), sorted(set(ALL) ^ set(cells))[:5]
    assert not [_joined_names(names) for names, cell in cells.items() if cell.status == FAILED]
    assert page.page_text(cells) == page.PAGE.read_text()
    assert all(cell.status == NO_MODEL or cell.text for cell in cells.values())


def test_a_wrong_gradient_is_a_failed_cell(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program with wrongly scaled gradients makes a failed cell."""
    from schedlang.runtime.grad_reduction import zero

    original = zero.ShardedStage.add_unit

    def averaged(self: Any, module: Any, *args: Any) -> None:
        original(self, module, *args)
        module.set_gradient_divide_factor(2.0)

    monkeypatch.setattr(zero.ShardedStage, "add_unit", averaged)
    cell = judge_cell(("zero 2", "tensor"), threads)
    assert (cell.status, "gradient" in cell.why) == (FAILED, True), cell.why
