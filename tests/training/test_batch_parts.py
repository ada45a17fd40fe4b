"""Splitting batches in parts: all rows once, in order, and outputs joined again."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.batch import (
    MissingOutput,
    largest_part,
    row_count,
    split_batch,
    split_rows,
    splits_evenly,
    stack_outputs,
)


@given(st.integers(0, 40), st.integers(1, 9))
def test_shares_are_even(count: int, parts: int) -> None:
    """Consecutive ranges cover all rows; sizes differ by at most one, larger ones first."""
    runs = split_rows(count, parts)
    assert [row for rows in runs for row in rows] == list(range(count))
    sizes = [len(rows) for rows in runs]
    assert sizes == sorted(sizes, reverse=True) and max(sizes) - min(sizes) <= 1


@given(st.integers(0, 60), st.lists(st.integers(1, 7), min_size=1, max_size=6))
def test_shares_by_weight(count: int, weights: list[int]) -> None:
    """Consecutive ranges cover all rows, each within one row of its quota; equal weights split as
    no weights."""
    runs = split_rows(count, tuple(weights))
    assert [row for rows in runs for row in rows] == list(range(count))
    quotas = [count * weight / sum(weights) for weight in weights]
    assert all(abs(len(rows) - quota) < 1 for rows, quota in zip(runs, quotas, strict=True))
    if len(set(weights)) == 1:
        assert runs == split_rows(count, len(weights))


def test_a_replica_without_enough_rows_is_refused() -> None:
    """The refusal names the replica, and the number of rows that it needs."""
    batch = {"x": torch.zeros(5, 2)}
    assert [len(part.rows) for (part,) in split_batch(batch, (3, 1), 1)] == [4, 1]
    assert len(largest_part(batch, (1, 3), 1)["x"]) == 4
    with pytest.raises(Refusal, match="S606.*5 rows, but 7 are needed") as refused:
        split_batch(batch, (3, 1), 2)
    assert "at least 7 rows" in str(refused.value.diagnostics[0].helps)
    assert len(split_batch({"x": torch.zeros(7, 2)}, (3, 1), 2)[1]) == 2


@settings(deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 5))
def test_every_row_is_in_one_part(replicas: int, micro: int, more: int) -> None:
    """Rows of all tensors stay together; other values go to every part unchanged."""
    count = replicas * micro + more
    batch = {
        "x": torch.arange(count),
        "y": torch.arange(count) * 2,
        "scale": 3,
        "n": torch.ones(()),
    }
    flat = [part for replica in split_batch(batch, replicas, micro) for part in replica]
    assert torch.equal(torch.cat([part.inputs["x"] for part in flat]), batch["x"])
    largest = largest_part(batch, replicas, micro)
    assert str(largest) == str(flat[0].inputs) and len(largest["x"]) == max(
        len(p.rows) for p in flat
    )
    assert splits_evenly(batch, replicas, micro) == (len({len(part.rows) for part in flat}) == 1)
    for part in flat:
        assert part.inputs["x"].tolist() == list(part.rows)
        assert torch.equal(part.inputs["y"], part.inputs["x"] * 2)
        assert part.inputs["scale"] == 3 and part.inputs["n"].ndim == 0


def test_rows_that_may_lie_along_either_dim_are_left_out() -> None:
    """If dim 0 has several entries per row and another dim exactly one, nothing is joined."""
    inside = [torch.zeros(4, count, 3) for count in (2, 2)]
    assert isinstance(stack_outputs(inside, [2, 2], [1.0, 1.0]), MissingOutput)
    assert stack_outputs([part[:2] for part in inside], [2, 2], [1.0, 1.0]).shape == (4, 2, 3)


def test_outputs_come_together() -> None:
    """Rows are joined, losses weighed, and other values come from the first part."""
    outputs = [
        {"y": torch.ones(2, 3), "loss": torch.tensor(1.0), "name": "a"},
        {"y": torch.zeros(1, 3), "loss": torch.tensor(4.0), "name": "a"},
    ]
    stacked = stack_outputs(outputs, [2, 1], [1.0, 3.0])
    assert stacked["y"].sum(1).tolist() == [3, 3, 0] and stacked["name"] == "a"
    assert stacked["loss"].item() == pytest.approx(3.25)


def test_a_part_without_labels_has_no_loss_and_does_not_spoil_the_others() -> None:
    """The mean over no label is NaN; its weight is zero."""
    losses = [torch.tensor(2.0), torch.tensor(math.nan), torch.tensor(4.0)]
    assert stack_outputs(losses, [1, 1, 1], [1.0, 0.0, 3.0]).item() == pytest.approx(3.5)
    nothing = stack_outputs(losses[1:2] * 2, [1, 1], [0.0, 0.0])
    assert math.isnan(nothing) and stack_outputs([nothing, losses[0]], [2, 1], [0.0, 1.0]) == 2.0


def test_too_few_rows_and_none() -> None:
    """Refused with the number of rows and of parts."""
    with pytest.raises(Refusal, match="the batch has 3 rows, but 4 are needed"):
        split_batch({"x": torch.zeros(3)}, 2, 2)
    with pytest.raises(Refusal, match="no rows"):
        row_count({"x": torch.tensor(1.0), "y": 2})
