"""Tests of blame: it names exactly the rows that break a schedule."""

import math

from hypothesis import given
from hypothesis import strategies as st

from schedlang.passes.localize.blame import blame


@given(st.integers(1, 200), st.data())
def test_a_single_row_is_found_in_few_runs(count: int, data: st.DataObject) -> None:
    """One bad row among n is named with about log2(n) runs."""
    bad = data.draw(st.integers(0, count - 1))
    found = blame(range(count), lambda rows: bad in rows)
    assert found.rows == (bad,) and found.prefix == bad + 1
    assert found.runs <= math.ceil(math.log2(count)) + 2


@given(st.integers(2, 40), st.data())
def test_rows_that_fail_together_are_found_together(count: int, data: st.DataObject) -> None:
    """A set of rows that fails only as a whole is named whole, in order, and nothing else."""
    bad = data.draw(st.sets(st.integers(0, count - 1), min_size=2, max_size=4))
    found = blame(
        [f"row {i}" for i in range(count)], lambda rows: {f"row {i}" for i in bad} <= set(rows)
    )
    assert found.rows == tuple(f"row {i}" for i in sorted(bad))


@given(st.integers(1, 20), st.data())
def test_illegal_subsets_count_as_holding(count: int, data: st.DataObject) -> None:
    """Where each row needs the one before it, the culprit comes with what it needs."""
    bad = data.draw(st.integers(0, count - 1))

    def fails(rows: tuple[int, ...]) -> bool:
        return rows == tuple(range(len(rows))) and bad in rows

    assert blame(range(count), fails).rows == tuple(range(bad + 1))


@given(st.integers(4, 12), st.data())
def test_rows_that_are_legal_only_together_are_left_out_together(
    count: int, data: st.DataObject
) -> None:
    """Two rows that need each other, and are not to blame, do not stand beside the guilty one."""
    bad, one, other = data.draw(
        st.lists(st.integers(0, count - 1), min_size=3, max_size=3, unique=True)
    )

    def fails(rows: tuple[int, ...]) -> bool:
        return bad in rows and (one in rows) == (other in rows)

    assert blame(range(count), fails).rows == (bad,)


@given(st.integers(1, 12), st.randoms(use_true_random=False))
def test_whatever_fails_the_answer_fails(count: int, random) -> None:
    """For any predicate, the rows named do fail, and leaving out one but the last does not."""
    table: dict[tuple[int, ...], bool] = {(): False, tuple(range(count)): True}

    def fails(rows: tuple[int, ...]) -> bool:
        return table.setdefault(rows, random.random() < 0.5)

    found = blame(range(count), fails).rows
    assert fails(found)
    for row in found[:-1]:
        assert not fails(tuple(r for r in found if r != row))


def test_a_failure_without_rows_blames_none() -> None:
    """If the empty schedule fails, no row is to blame."""
    assert blame([1, 2], lambda rows: True).rows == ()
    assert blame([], lambda rows: True).rows == ()
