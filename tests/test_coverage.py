"""Tests of coverage: what was not exercised is said, and what was is not."""

import torch

from schedlang.passes.coverage import gaps, unoffered
from schedlang.passes.observe import Observation


def _batch(rows: int, *, ragged: bool, floats: bool) -> dict[str, torch.Tensor]:
    labels = torch.ones(rows, 4, dtype=torch.long)
    mask = torch.ones_like(labels)
    if ragged:
        labels[0, 1:], mask[0, 1:] = -100, 0
    batch = {"labels": labels, "attention_mask": mask}
    return {**batch, "x": torch.ones(rows, 4)} if floats else batch


def _words(found) -> str:
    return " | ".join(gap.condition for gap in found)


def test_a_full_set_has_no_gaps() -> None:
    """Ragged and even batches, floats, dropout, axes of different sizes: nothing to say."""
    batches = [
        _batch(4, ragged=False, floats=True),
        _batch(5, ragged=True, floats=True),
        _batch(6, ragged=True, floats=True),
    ]
    sizes = {"tp": 2, "dp": 3}
    assert gaps(batches, sizes=sizes, parts=2, drawn=9, parameters={"w": 7}) == ()


def test_each_gap_is_named() -> None:
    """One even batch without anything special leaves everything open."""
    batches = [_batch(4, ragged=False, floats=False)] * 3
    found = gaps(batches, sizes={"a": 2, "b": 2}, parts=2, drawn=0, parameters={"w": 8})
    for words in (
        "one batch only",
        "smaller last part",
        "no ignored labels",
        "no padding",
        "no float inputs",
        "no dropout",
        "all axes have size 2",
        "divides every parameter",
    ):
        assert words in _words(found)
    assert "equal parts" in _words(gaps([_batch(5, ragged=True, floats=True)], sizes={}, parts=2))


def test_what_a_program_does_not_offer_is_a_gap() -> None:
    """Kinds left out and values not read appear by name."""
    seen = Observation(missing=frozenset({"replicas"}), unread=frozenset({"Cache"}))
    assert _words(unoffered(seen)) == "replicas (not offered) | `Cache` in the output"
