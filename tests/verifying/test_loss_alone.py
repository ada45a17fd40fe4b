"""A loss function of a model that is too large to be tried: it is tried on random outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.verify import probe
from tests.engine import Threads
from tests.proofs import make_plan

Batch = dict[str, Tensor]
ROWS, TOKENS, WORDS = 8, 6, 5


class Policy(nn.Module):
    """Scores of words, and a value of each token; the mask is returned as it was given."""

    def __init__(self, returns_mask: bool = False) -> None:
        super().__init__()
        self.returns_mask = returns_mask
        self.embed, self.head = nn.Embedding(WORDS, 4), nn.Linear(4, WORDS)
        self.value = nn.Linear(4, 1)

    def forward(self, ids: Tensor, mask: Tensor) -> dict[str, Any]:
        hidden = self.embed(ids)
        output = {"scores": self.head(hidden), "values": self.value(hidden)[..., 0], "name": "x"}
        return output | ({"mask": mask} if self.returns_mask else {})


def batch() -> Batch:
    """Return rows with masks of unequal lengths, and advantages."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(WORDS, (ROWS, TOKENS), generator=generator)
    lengths = torch.randint(2, TOKENS + 1, (ROWS, 1), generator=generator)
    advantages = torch.randn(ROWS, TOKENS, generator=generator)
    return {"ids": ids, "mask": (torch.arange(TOKENS) < lengths).float(), "adv": advantages}


def terms(output: Any, batch: Batch) -> Tensor:
    """Return a loss of each token."""
    logs = output["scores"].log_softmax(-1).gather(-1, batch["ids"][..., None])[..., 0]
    ratio = (logs + 1.6 + 0.0 * batch["mask"]).exp()
    return -torch.min(ratio, ratio.clamp(0.8, 1.2)) * batch["adv"] + output["values"].square()


def mean(output: Any, batch: Batch) -> Tensor:
    """Return the mean over all tokens."""
    return terms(output, batch).mean()


def of_rows(output: Any, batch: Batch) -> Tensor:
    """Return the mean over rows of the means over their masks."""
    mask = batch["mask"]
    return ((terms(output, batch) * mask).sum(1) / mask.sum(1)).mean()


def masked(output: Any, batch: Batch) -> Tensor:
    """Return the mean over a mask of the whole batch: right with a weight only."""
    return (terms(output, batch) * batch["mask"]).sum() / batch["mask"].sum()


def added(output: Any, batch: Batch) -> Tensor:
    """Return a sum over rows."""
    return terms(output, batch).sum() / 48


def normalised(output: Any, batch: Batch) -> Tensor:
    """Normalise advantages over the batch."""
    adv = batch["adv"]
    return mean(output, {**batch, "adv": (adv - adv.mean()) / adv.std()})


def neighbours(output: Any, batch: Batch) -> Tensor:
    """Compare rows 2i and 2i + 1, which lie on one rank."""
    score = (output["values"] * batch["mask"]).sum(1)
    return -F.logsigmoid(score[0::2] - score[1::2]).mean() + 0.0 * batch["adv"].mean()


def halves(output: Any, batch: Batch) -> Tensor:
    """Compare rows of two halves of the batch."""
    better, worse = (output["values"] * batch["mask"]).sum(1).chunk(2)
    return -F.logsigmoid(better - worse).mean() + 0.0 * batch["adv"].mean()


def drawing(output: Any, batch: Batch) -> Tensor:
    """Draw random numbers: nothing is known."""
    return (terms(output, batch) * torch.rand(len(batch["ids"]), 1)).sum()


def communicating(output: Any, batch: Batch) -> Tensor:
    """Divide by the mean count of all ranks, as they do in detection: nothing is known."""
    count = batch["mask"].sum()
    dist.all_reduce(count)
    return (terms(output, batch) * batch["mask"]).sum() / (count / dist.get_world_size())


def count(batch: Batch) -> float:
    """Return the weight of a part by its mask."""
    return float(batch["mask"].sum())


RIGHT: tuple[tuple[Callable[..., Tensor], Any], ...] = (
    *((mean, None), (of_rows, None), (masked, count), (neighbours, None), (drawing, None)),
    (communicating, None),
)


@pytest.fixture(autouse=True)
def _all_models_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "CHEAP_WORK", 0)


def check(
    loss: Callable[..., Tensor], weight: Any, rows: str = "", returns_mask: bool = False
) -> None:
    """Check a loss of two data-parallel ranks, on each of them."""
    plan = make_plan(Policy(returns_mask), f"zero(stage=1, over=dp)\n{rows}", "dp=2")
    part = {key: value[: ROWS // 2] for key, value in batch().items()}

    def body() -> None:
        ready = prepare(plan, part, loss)
        probe.check_if_cheap(plan, batch(), ready, loss=loss, weight=weight)

    Threads().run(body, 2)


@pytest.mark.parametrize("loss, weight", RIGHT)
def test_a_loss_that_parts_make(loss: Any, weight: Any) -> None:
    """It is taken, and so is one of which nothing is known."""
    check(loss, weight)


@pytest.mark.parametrize("loss", [masked, added, normalised, halves])
def test_a_loss_that_parts_do_not_make(loss: Any) -> None:
    """It is refused on all ranks, though the model does not run."""
    with pytest.raises(Refusal, match="`loss` alone, on random outputs") as caught:
        check(loss, None)
    assert caught.value.diagnostic.code == "S703"


def test_pairs_that_microbatches_tear_apart() -> None:
    """Two rows of a pair in two microbatches: their part has no pair, and no finite loss."""
    with pytest.raises(Refusal, match="S703"):
        check(neighbours, None, 'pipeline(order="GPipe", micro=4)')


def test_outputs_that_are_of_the_batch() -> None:
    """A random mask would not be the one that the weight counts: nothing is known."""

    def loss(output: Any, batch: Batch) -> Tensor:
        return masked(output, {**batch, "mask": output["mask"]})

    check(loss, count, returns_mask=True)
