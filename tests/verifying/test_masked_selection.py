"""Models and losses that select by a mask, return a scalar with dims, or write in place.

Each is compared with the unmodified original.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.runtime.float64 import Float64
from schedlang.runtime.modes import enter_modes
from tests.engine import Threads
from tests.proofs import assert_proven, make_plan

DP = "  zero(stage=1, over=dp)"
PP = '  blocks  pipeline_split(over=pp)\n  pipeline(order="1F1B", micro=2)'
ROWS = {"dp=2": DP, "pp=2": PP, "dp=2, pp=2": f"{PP}\n{DP}"}


class Tagger(nn.Module):
    """Classifies each unmasked token, as ELECTRA's discriminator does.

    `selection`: how tokens are selected; "written": also changes them in blocks, as Qwen3-VL.
    """

    def __init__(self, selection: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = selection
        self.table = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 1)

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss of unmasked tokens, and all logits."""
        x = self.table(ids)
        for block in self.blocks:
            x = block(x).tanh()
            if self.way == "written":
                x = x.clone()
                x[mask] = x[mask] + x.mean(-1, keepdim=True)[mask]
        logits = self.head(x)[..., 0]
        if self.way == "selected":
            selected_logits, selected_labels = (
                logits.masked_select(mask),
                labels.masked_select(mask),
            )
        else:
            selected_logits, selected_labels = logits[mask], labels[mask]
        return {
            "loss": F.binary_cross_entropy_with_logits(selected_logits, selected_labels),
            "logits": logits,
        }


def tagger_batch(seed: int) -> dict[str, Tensor]:
    """Return rows with masked ends; lengths differ between batches."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(11, (4, 6), generator=generator)
    lengths = torch.tensor([6, 3, 5, 4]).roll(seed)
    mask = torch.arange(6) < lengths[:, None]
    labels = torch.randint(2, (4, 6), generator=generator).double()
    return {"ids": ids, "mask": mask, "labels": labels}


def count_tokens(batch: Mapping[str, Any]) -> Tensor:
    """Return the number of unmasked tokens."""
    return batch["mask"].sum()


@pytest.mark.parametrize("way", ["taken", "selected", "written"])
@pytest.mark.parametrize("mesh", ROWS)
def test_what_a_mask_of_the_batch_selects(threads: Threads, mesh: str, way: str) -> None:
    """Mask selections with a different count in every batch are equal to the original."""
    plan = make_plan(Tagger(way).double(), ROWS[mesh], mesh)
    assert_proven(threads, plan, [tagger_batch(0), tagger_batch(1)], weight=count_tokens)


class FloatLabels(nn.Module):
    """A model whose float labels mark ignored entries by -100 (SpeechT5's spectra)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss of labels other than -100."""
        for block in self.blocks:
            x = block(x).tanh()
        keep = labels != -100.0
        return {"loss": (x.masked_select(keep) - labels.masked_select(keep)).abs().mean(), "y": x}


@pytest.mark.parametrize("mesh", ROWS)
def test_what_float_labels_select(threads: Threads, mesh: str) -> None:
    """A mask computed from labels is accepted, although its count is unknown."""
    batches = []
    for seed in range(2):
        draw = torch.Generator().manual_seed(seed)
        x, labels = torch.randn(2, 4, 4, generator=draw).double()
        labels[1, 2:] = -100.0
        batches.append({"x": x, "labels": labels})
    plan = make_plan(FloatLabels().double(), ROWS[mesh], mesh)
    assert_proven(threads, plan, batches, weight=lambda batch: (batch["labels"] != -100.0).sum())


class NoLoss(nn.Module):
    """A model without a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layers."""
        for block in self.blocks:
            x = block(x).tanh()
        output: Tensor = self.head(x)
        return output


def make_batch(seed: int) -> dict[str, Tensor]:
    """Return inputs and targets."""
    x, y = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(seed)).double()
    return {"x": x, "y": y}


def loss_of_one_dim(output: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """Return a loss of shape [1]."""
    return (output - batch["y"]).square().mean().reshape(1)


def writing_loss(output: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """Return a loss that changes the output in place."""
    return output.sub_(batch["y"]).square().mean()


@pytest.mark.parametrize("mesh", ROWS)
@pytest.mark.parametrize("loss", [loss_of_one_dim, writing_loss])
def test_losses_as_they_are_written(threads: Threads, loss: Any, mesh: str) -> None:
    """A loss may have dims or change the output; evaluation returns the unchanged output."""
    plan = make_plan(NoLoss().double(), ROWS[mesh], mesh)
    assert_proven(threads, plan, [make_batch(0), make_batch(1)], loss=loss)


def _evaluated(plan: Any, batch: dict[str, Tensor]) -> Tensor:
    from schedlang.passes.lower.build import build

    with enter_modes(Float64()):
        program = build(plan, batch, loss=writing_loss)
        output: Tensor = program.eval_step({"x": batch["x"]})
    return output


@pytest.mark.parametrize("mesh", ROWS)
def test_evaluation_needs_no_labels(threads: Threads, mesh: str) -> None:
    """Evaluation works on a batch without labels."""
    model = NoLoss().double()
    world, batch = 4 if mesh == "dp=2, pp=2" else 2, make_batch(2)
    with torch.no_grad():
        expected = model(batch["x"])
    for output in threads.run(_evaluated, world, make_plan(model, ROWS[mesh], mesh), batch):
        assert torch.allclose(output, expected, rtol=1e-12)
