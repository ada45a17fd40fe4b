"""Gradients in parts of a batch: of rows and of words; what the original does not take is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from schedlang.passes.judge import batch_parts
from schedlang.passes.judge.batch_parts import BatchParts
from schedlang.passes.judge.judge import Task, _conditions, _float64_case
from schedlang.passes.judge.trial import Trial
from tests.judging.catches.words import Words
from tests.judging.versions.balanced import of_words, padded


class Even(nn.Module):
    """Something that asks for two rows at least."""

    def forward(self, x: Tensor) -> Tensor:
        """Those that it got."""
        if len(x) < 2:
            raise ValueError("one row has no statistics")
        return torch.tanh(x)


def made(inner: nn.Module, world: int = 2) -> tuple[BatchParts, str]:
    """Parts of a small model with padded rows, and the first condition's name."""
    torch.manual_seed(0)
    batches = tuple(padded(seed, 4, 3) for seed in range(3))
    never: Any = None
    task = Task(never, Words(inner), batches, world, of_words)
    case = _float64_case(task)
    conditions, seen, _ = _conditions(case, task)
    return BatchParts(
        Trial(case, never, world, tuple(conditions), never, True), seen.labels
    ), conditions[0].name


@pytest.mark.parametrize("ignored", [-100, -1, 5])
def test_the_label_that_does_not_count_is_found(ignored: int) -> None:
    """That of torch, or one below 0 that batches have; of another it is not known that it is."""

    def loss(output: Tensor, batch: Any) -> Tensor:
        wanted = batch["labels"].flatten()
        return F.cross_entropy(output.flatten(0, 1), wanted, ignore_index=ignored)

    def batch(seed: int) -> dict[str, Tensor]:
        found = padded(seed, 4, 3)
        found["labels"] = found["labels"].masked_fill(found["labels"] == -100, ignored)
        return found

    never: Any = None
    task = Task(never, Words(nn.Tanh()), tuple(map(batch, range(3))), 2, loss)
    _, seen, _ = _conditions(_float64_case(task), task)
    assert [one.ignore_index for one in seen.labels] == [ignored] * (ignored < 0)


def test_parts_of_rows_and_words_make_the_whole() -> None:
    """Weighed by their counts of labels, gradients in parts add up to that of the batch."""
    found, condition = made(nn.Tanh())
    batch = found.trial.conditions[0].batches[0]
    (whole,) = found._gradients(batch, [list(range(4))], None)
    rows = next(found.split_by_rows("head.weight", condition))
    words = next(found.split_by_tokens("head.weight", condition))
    assert (rows.unit, words.unit) == ("the batch", "the words")
    for cut, dim in ((rows, 0), (words, 1)):
        each = [(part != -100).sum() for part in batch["labels"].chunk(2, dim)]
        total = sum(part * n for part, n in zip(cut.parts, each)) / sum(each)
        assert torch.allclose(total, whole["head.weight"], rtol=1e-12)


def test_an_original_that_takes_no_single_row() -> None:
    """Cuts into single rows are left out, and those into two remain."""
    found, condition = made(Even(), world=4)
    counts = {len(cut.parts) for cut in found.split_by_rows("head.weight", condition)}
    assert counts == {2}


def test_an_error_of_ours_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what the original raises says that it takes no part of its batch."""

    def broken(*_: object) -> Any:
        raise ValueError("not the original's")

    monkeypatch.setattr(batch_parts, "select_rows", broken)
    found, condition = made(nn.Tanh())
    with pytest.raises(ValueError, match="not the original's"):
        list(found.split_by_rows("head.weight", condition))
