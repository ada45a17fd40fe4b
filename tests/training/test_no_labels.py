"""Tests of losses of parts none of whose labels counts, whether the host knows that or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from schedlang.runtime.no_labels import no_labels

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.1},
    "weighted": {"weight": torch.tensor([1.0, 2.0, 0.5])},
    "both": {"weight": torch.tensor([1.0, 2.0, 0.5]), "label_smoothing": 0.1},
    "another": {"ignore_index": 2},
}


def trained(labels: Tensor, way: dict[str, Any], weight: Any) -> tuple[Tensor, Tensor, Tensor]:
    """A loss that is multiplied by what is learned, and gradients for its weight in a batch."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 3, generator=draw).requires_grad_()
    sure = torch.tensor(0.5, requires_grad=True)
    with no_labels(weight):
        loss = F.cross_entropy(logits, labels, **way) * sure
    loss.backward(torch.as_tensor(weight, dtype=loss.dtype))
    assert logits.grad is not None and sure.grad is not None
    return loss.detach(), logits.grad, sure.grad


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("known", [True, False])
def test_no_gradient_that_is_no_number(way: str, known: bool) -> None:
    """Of a part without labels loss and gradients are zero, and those of any other are torch's."""
    given = WAYS[way]
    ignored = given.get("ignore_index", -100)
    number = float if known else torch.tensor
    for found in trained(torch.full((4,), ignored), given, number(0.0)):
        assert not found.any()
    labels = torch.tensor([0, 1, ignored, 1])
    for mine, plain in zip(trained(labels, given, number(2.0)), trained(labels, given, 2.0)):
        assert torch.equal(mine, plain) and mine.isfinite().all()


def test_nothing_in_the_whole_batch() -> None:
    """Then a part weighs something all the same, and its loss is the model's own of nothing."""
    assert trained(torch.full((4,), -100), {}, torch.tensor(1.0))[0].isnan()
