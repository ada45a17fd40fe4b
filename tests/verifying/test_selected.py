"""Models and losses that take what a mask selects, that end in one number with dims, or that write.

Each is compared with the untouched original.
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
from tests.proofs import planned, proven

DP = "  zero(stage=1, over=dp)"
PP = '  blocks  pipeline_split(over=pp)\n  pipeline(order="1F1B", micro=2)'
ROWS = {"dp=2": DP, "pp=2": PP, "dp=2, pp=2": f"{PP}\n{DP}"}


class Tagger(nn.Module):
    """Tells of each token that counts whether it was replaced, as ELECTRA's discriminator does.

    `way`: how it takes them; `extra`: images' tokens get something in every block, as Qwen3-VL's.
    """

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.table = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 1)

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The loss of the tokens that count, and the logits of all."""
        x = self.table(ids)
        for block in self.blocks:
            x = block(x).tanh()
            if self.way == "written":
                x = x.clone()
                x[mask] = x[mask] + x.mean(-1, keepdim=True)[mask]
        logits = self.head(x)[..., 0]
        if self.way == "selected":
            taken, wanted = logits.masked_select(mask), labels.masked_select(mask)
        else:
            taken, wanted = logits[mask], labels[mask]
        return {"loss": F.binary_cross_entropy_with_logits(taken, wanted), "logits": logits}


def tagged(first: int) -> dict[str, Tensor]:
    """Rows whose ends do not count, of other lengths in other batches."""
    draw = torch.Generator().manual_seed(first)
    ids = torch.randint(11, (4, 6), generator=draw)
    lengths = torch.tensor([6, 3, 5, 4]).roll(first)
    mask = torch.arange(6) < lengths[:, None]
    labels = torch.randint(2, (4, 6), generator=draw).double()
    return {"ids": ids, "mask": mask, "labels": labels}


def counted(batch: Mapping[str, Any]) -> Tensor:
    """How many tokens count."""
    return batch["mask"].sum()


@pytest.mark.parametrize("way", ["taken", "selected", "written"])
@pytest.mark.parametrize("mesh", ROWS)
def test_what_a_mask_of_the_batch_selects(threads: Threads, mesh: str, way: str) -> None:
    """Its number is known without values of what is selected, and in every batch another one."""
    plan = planned(Tagger(way).double(), ROWS[mesh], mesh)
    proven(threads, plan, [tagged(0), tagged(1)], weight=counted)


class Marked(nn.Module):
    """A model whose labels tell by a number, not by a mask, what counts (SpeechT5's spectra)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The loss of the labels that are none of -100."""
        for block in self.blocks:
            x = block(x).tanh()
        keep = labels != -100.0
        return {"loss": (x.masked_select(keep) - labels.masked_select(keep)).abs().mean(), "y": x}


@pytest.mark.parametrize("mesh", ROWS)
def test_what_float_labels_select(threads: Threads, mesh: str) -> None:
    """A mask without values is no reason to refuse a model: it may select all that there is."""
    batches = []
    for seed in range(2):
        draw = torch.Generator().manual_seed(seed)
        x, labels = torch.randn(2, 4, 4, generator=draw).double()
        labels[1, 2:] = -100.0
        batches.append({"x": x, "labels": labels})
    plan = planned(Marked().double(), ROWS[mesh], mesh)
    proven(threads, plan, batches, weight=lambda batch: (batch["labels"] != -100.0).sum())


class Plain(nn.Module):
    """A model without a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """What the layers give."""
        for block in self.blocks:
            x = block(x).tanh()
        out: Tensor = self.head(x)
        return out


def points(seed: int) -> dict[str, Tensor]:
    """Rows, and what they should give."""
    x, y = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(seed)).double()
    return {"x": x, "y": y}


def of_one_number(output: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """One number, in one dim."""
    return (output - batch["y"]).square().mean().reshape(1)


def writing(output: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """Writes into the output."""
    return output.sub_(batch["y"]).square().mean()


@pytest.mark.parametrize("mesh", ROWS)
@pytest.mark.parametrize("loss", [of_one_number, writing])
def test_losses_as_they_are_written(threads: Threads, loss: Any, mesh: str) -> None:
    """A loss may have dims, and may write into the output: what is evaluated is the output."""
    plan = planned(Plain().double(), ROWS[mesh], mesh)
    proven(threads, plan, [points(0), points(1)], loss=loss)


def _evaluated(plan: Any, batch: dict[str, Tensor]) -> Tensor:
    from schedlang.passes.lower.build import build

    with enter_modes(Float64()):
        program = build(plan, batch, loss=writing)
        output: Tensor = program.eval_step({"x": batch["x"]})
    return output


@pytest.mark.parametrize("mesh", ROWS)
def test_evaluation_needs_no_labels(threads: Threads, mesh: str) -> None:
    """A batch without what the loss reads is evaluated: nothing is trained by it."""
    model = Plain().double()
    world, batch = 4 if mesh == "dp=2, pp=2" else 2, points(2)
    with torch.no_grad():
        whole = model(batch["x"])
    for seen in threads.run(_evaluated, world, planned(model, ROWS[mesh], mesh), batch):
        assert torch.allclose(seen, whole, rtol=1e-12)
