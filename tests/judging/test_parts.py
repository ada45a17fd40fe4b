"""Gradients of parts of a batch (rows, tokens), and originals that cannot run on some parts."""

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
from tests.judging.catches.language_model import LanguageModel
from tests.judging.versions.balanced import padded_batch, token_loss


class TwoRowsOnly(nn.Module):
    """A layer that needs at least two rows."""

    def forward(self, x: Tensor) -> Tensor:
        """Return tanh, or raise for a single row."""
        if len(x) < 2:
            raise ValueError("one row has no statistics")
        return torch.tanh(x)


def build_parts(inner: nn.Module, world: int = 2) -> tuple[BatchParts, str]:
    """Return the parts of a small model with padded rows, and the first condition's name."""
    torch.manual_seed(0)
    batches = tuple(padded_batch(seed, 4, 3) for seed in range(3))
    unused: Any = None
    task = Task(unused, LanguageModel(inner), batches, world, token_loss)
    case = _float64_case(task)
    conditions, observed, _ = _conditions(case, task)
    return BatchParts(
        Trial(case, unused, world, tuple(conditions), unused, True), observed.labels
    ), conditions[0].name


@pytest.mark.parametrize("ignored", [-100, -1, 5])
def test_the_label_that_does_not_count_is_found(ignored: int) -> None:
    """The ignored label is found if negative; a positive one is not."""

    def loss(output: Tensor, batch: Any) -> Tensor:
        targets = batch["labels"].flatten()
        return F.cross_entropy(output.flatten(0, 1), targets, ignore_index=ignored)

    def batch(seed: int) -> dict[str, Tensor]:
        tensors = padded_batch(seed, 4, 3)
        tensors["labels"] = tensors["labels"].masked_fill(tensors["labels"] == -100, ignored)
        return tensors

    unused: Any = None
    task = Task(unused, LanguageModel(nn.Tanh()), tuple(map(batch, range(3))), 2, loss)
    _, observed, _ = _conditions(_float64_case(task), task)
    assert [label.ignore_index for label in observed.labels] == [ignored] * (ignored < 0)


def test_parts_of_rows_and_words_make_the_whole() -> None:
    """Gradients of parts, weighted by label counts, add up to the batch's."""
    batch_cuts, condition = build_parts(nn.Tanh())
    batch = batch_cuts.trial.conditions[0].batches[0]
    (full_gradient,) = batch_cuts._gradients(batch, [list(range(4))], None)
    rows = next(batch_cuts.split_by_rows("head.weight", condition))
    tokens = next(batch_cuts.split_by_tokens("head.weight", condition))
    assert (rows.unit, tokens.unit) == ("the batch", "the words")
    for cut, dim in ((rows, 0), (tokens, 1)):
        label_counts = [(part != -100).sum() for part in batch["labels"].chunk(2, dim)]
        total = sum(part * n for part, n in zip(cut.parts, label_counts)) / sum(label_counts)
        assert torch.allclose(total, full_gradient["head.weight"], rtol=1e-12)


def test_an_original_that_takes_no_single_row() -> None:
    """Splits into single rows are skipped, and those into two remain."""
    batch_cuts, condition = build_parts(TwoRowsOnly(), world=4)
    counts = {len(cut.parts) for cut in batch_cuts.split_by_rows("head.weight", condition)}
    assert counts == {2}


def test_an_error_of_ours_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors that are not the original's are raised."""

    def broken(*_: object) -> Any:
        raise ValueError("not the original's")

    monkeypatch.setattr(batch_parts, "select_rows", broken)
    batch_cuts, condition = build_parts(nn.Tanh())
    with pytest.raises(ValueError, match="not the original's"):
        list(batch_cuts.split_by_rows("head.weight", condition))
