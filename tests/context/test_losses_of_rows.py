"""Losses that are a mean over rows: a rank with some tokens of each row cannot compute its part.

Sums over all tokens that are divided by a count are shared by the ranks, and not by slices.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.analyze.prepare import prepare
from tests.engine import Threads
from tests.proofs import assert_proven, make_plan


class Attention(nn.Module):
    """Causal attention of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` and what its tokens read."""
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + mixed.transpose(1, 2).flatten(2)


class Reader(nn.Module):
    """Two layers of attention; the loss is a mean over counted labels.

    weighing  "tokens" by torch's loss, "counts" by a sum over a count, "rows" in each row first
    """

    def __init__(self, weighing: str) -> None:
        super().__init__()
        self.weighing = weighing
        self.enter, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.layers = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Return the loss."""
        x = self.enter(ids)
        for layer in self.layers:
            x = layer(x)
        scores = self.head(x)
        if self.weighing == "tokens":
            return F.cross_entropy(scores.flatten(0, 1), labels.flatten())
        losses = F.cross_entropy(scores.mT, labels, reduction="none")
        counted = labels >= 0
        if self.weighing == "counts":
            return losses.sum() / counted.sum()
        return (losses.sum(1) / counted.sum(1)).mean()


def _batches(ignored: bool) -> list[dict[str, Tensor]]:
    """Three batches whose first tokens all have labels, the last ones only if not `ignored`."""
    torch.manual_seed(1)
    batches = [
        {"ids": torch.randint(11, (4, 12)), "labels": torch.randint(11, (4, 12))} for _ in range(3)
    ]
    for batch in batches if ignored else ():
        batch["labels"][2:, 10:] = -100
    return batches


CASES = {
    "context": ("context_parallel(gather, over=cp)", "cp=2", "S659"),
    "slices": (
        'layers  pipeline_split(over=pp)\npipeline(order="Seq1F1B", micro=2, slices=2)',
        "pp=2",
        "S655",
    ),
}


@pytest.mark.parametrize("ignored", [True, False])
@pytest.mark.parametrize(
    ("case", "weighing"), [("context", "rows"), ("slices", "rows"), ("slices", "counts")]
)
def test_a_loss_that_parts_weigh_otherwise_is_refused(
    case: str, weighing: str, ignored: bool
) -> None:
    """A small batch, to try, has a label that does not count, whether or not the batch has one."""
    rows, mesh, code = CASES[case]
    torch.manual_seed(0)
    with pytest.raises(Refusal) as caught:
        prepare(make_plan(Reader(weighing).double(), rows, mesh), _batches(ignored)[0])
    text = caught.value.render()
    assert code in text and "the loss is" in text
    if case == "context":
        assert "is not a mean over its tokens" in text and "equal weights" in text


@pytest.mark.parametrize(
    ("case", "weighing"), [("context", "tokens"), ("context", "counts"), ("slices", "tokens")]
)
def test_a_loss_over_tokens_is_right(threads: Threads, case: str, weighing: str) -> None:
    """Labels that begin not to count in a later batch change no weights."""
    rows, mesh, _ = CASES[case]
    torch.manual_seed(0)
    batches = [*_batches(False)[:1], *_batches(True)[1:]]
    assert_proven(threads, make_plan(Reader(weighing).double(), rows, mesh), batches)
