"""The support matrix: some of its pairs are proven anew; the page says what came of all."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine import Threads
from tests.support import page
from tests.support.cells import FAILED, NO_MODEL, VERIFIED, judged
from tests.support.features import Combination, combinations_of, ordered

ALWAYS: tuple[Combination, ...] = (
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


def _named(names: Combination) -> str:
    return " x ".join(names)


@pytest.mark.parametrize("names", ALWAYS, ids=_named)
def test_a_diagonal(names: Combination, threads: Threads) -> None:
    """Each way to split or keep, with another one, trains as the original does."""
    assert ordered(names) in ALL
    found = judged(ordered(names), threads)
    assert found.status == VERIFIED, found.why
    assert found.worst < 1e-9


@pytest.mark.deep
@pytest.mark.parametrize("names", ALL, ids=_named)
def test_every_combination(names: Combination, threads: Threads) -> None:
    """No combination computes something else, and none ends in an error of ours."""
    found = judged(names, threads)
    assert found.status != FAILED, found.why


def test_the_page_is_what_is_known() -> None:
    """All combinations have been run, none has failed, and the page is written from them."""
    cells = page.read()
    assert set(cells) == set(ALL), sorted(set(ALL) ^ set(cells))[:5]
    assert not [_named(names) for names, cell in cells.items() if cell.status == FAILED]
    assert page.page(cells) == page.PAGE.read_text()
    assert all(cell.status == NO_MODEL or cell.text for cell in cells.values())


def test_a_wrong_gradient_is_a_failed_cell(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program whose gradients are not summed over the ranks is told from one that is right."""
    from schedlang.runtime.grad_reduction import zero

    plain = zero.ShardedStage.add_unit

    def averaged(self: Any, module: Any, *given: Any) -> None:
        plain(self, module, *given)
        module.set_gradient_divide_factor(2.0)

    monkeypatch.setattr(zero.ShardedStage, "add_unit", averaged)
    found = judged(("zero 2", "tensor"), threads)
    assert (found.status, "gradient" in found.why) == (FAILED, True), found.why
